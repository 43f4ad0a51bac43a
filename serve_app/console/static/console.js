// What all pages do: dialogs, copy buttons, times, the theme switch, charts.
"use strict";

(() => {
  const stored = (name) => { try { return localStorage.getItem(name); } catch { return null; } };
  const store = (name, value) => { try { localStorage.setItem(name, value); } catch { /* it holds for this page */ } };

  // Dialogs. A dialog in a menu or a table would be hidden or cut with it, so it opens at the end of the page.
  function show(dialog) {
    if (dialog.open) return;
    if (dialog.parentElement !== document.body) document.body.append(dialog);
    dialog.showModal();
    (dialog.querySelector("[autofocus], input:not([type=hidden]), select, textarea") || dialog).focus();
  }
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[commandfor]");
    const dialog = button && document.getElementById(button.getAttribute("commandfor"));
    if (dialog instanceof HTMLDialogElement) {
      event.preventDefault();
      if (button.getAttribute("command") === "close") dialog.close();
      else show(dialog);
    } else if (event.target instanceof HTMLDialogElement) event.target.close(); // beside the dialog
  });
  document.addEventListener("input", (event) => {
    const wanted = event.target.dataset?.typed;
    if (wanted) event.target.setCustomValidity(event.target.value === wanted ? "" : `Type ${wanted}`);
  });

  // A form is sent once.
  document.addEventListener("submit", (event) => {
    const buttons = event.target.querySelectorAll("button:not([type=button])");
    if (event.defaultPrevented || event.target.method === "get" || event.target.matches("[data-hx-post], [hx-post]")) return;
    setTimeout(() => buttons.forEach((button) => { button.disabled = true; }));
  });
  addEventListener("pageshow", (event) => {
    if (event.persisted) document.querySelectorAll("form button[disabled]").forEach((button) => { button.disabled = false; });
  });

  // Copy buttons. Browsers allow copying over https and on this machine alone.
  document.addEventListener("click", async (event) => {
    const button = event.target.closest(".copy");
    if (!button) return;
    const text = "copyAbove" in button.dataset ? button.previousElementSibling.textContent : button.dataset.copy;
    await navigator.clipboard.writeText(text);
    button.classList.add("copied");
    toast("Copied");
    setTimeout(() => button.classList.remove("copied"), 1500);
  });

  function toast(text) {
    const made = document.createElement("div");
    made.className = "toast show";
    made.setAttribute("role", "status");
    const body = document.createElement("div");
    body.className = "toast-body";
    body.textContent = text;
    made.append(body);
    document.getElementById("toasts").replaceChildren(made);
    setTimeout(() => made.remove(), 4000);
  }

  // Times: relative, with the exact one in the tooltip, in the viewer's zone or in UTC.
  const units = [["year", 31536000], ["month", 2592000], ["day", 86400], ["hour", 3600], ["minute", 60]];
  const relative = new Intl.RelativeTimeFormat("en");
  function times() {
    const utc = stored("zone") === "utc", now = Date.now();
    const exact = new Intl.DateTimeFormat("en-GB", {
      dateStyle: "medium", timeStyle: "long", timeZone: utc ? "UTC" : undefined,
    });
    for (const one of document.querySelectorAll("time[datetime]")) {
      const at = new Date(one.dateTime), seconds = (at - now) / 1000;
      one.title = exact.format(at);
      if ("exact" in one.dataset) { one.textContent = exact.format(at); continue; }
      const unit = units.find(([, size]) => Math.abs(seconds) >= size);
      one.textContent = unit ? relative.format(Math.trunc(seconds / unit[1]), unit[0])
        : seconds > 0 ? "in a moment" : "just now";
    }
    for (const one of document.querySelectorAll("[data-zone-switch]")) {
      one.hidden = false;
      one.querySelector("span").textContent = utc ? "Show times in your zone" : "Show times in UTC";
    }
  }
  document.addEventListener("click", (event) => {
    if (!event.target.closest("[data-zone-switch]")) return;
    store("zone", stored("zone") === "utc" ? "local" : "utc");
    times();
  });

  // The theme switch.
  function themes() {
    for (const one of document.querySelectorAll("[data-theme-choice]"))
      one.classList.toggle("active", one.dataset.themeChoice === window.theme.chosen());
  }
  document.addEventListener("click", (event) => {
    const choice = event.target.closest("[data-theme-choice]");
    if (choice) { window.theme.choose(choice.dataset.themeChoice); themes(); }
  });

  // Charts, from the JSON in the page.
  const charts = new Map();
  const COLOURS = ["#066fd1", "#f76707", "#2fb344", "#ae3ec9", "#f59f00", "#0ca678", "#d6336c", "#4263eb", "#74b816", "#667382"];
  function draw(figure) {
    const data = JSON.parse(document.getElementById(figure.dataset.chart).textContent);
    const style = getComputedStyle(document.body);
    const ink = style.getPropertyValue("--chart-ink") || "#667382", grid = style.getPropertyValue("--chart-grid") || "#8883";
    const line = data.type === "line", unit = data.unit ? ` ${data.unit}` : "";
    const number = new Intl.NumberFormat("en", { maximumSignificantDigits: 6 });
    const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
    charts.get(figure)?.destroy();
    charts.set(figure, new Chart(figure.querySelector("canvas"), {
      type: line ? "line" : "bar",
      data: {
        labels: data.labels,
        datasets: data.series.map((one, index) => ({
          label: one.name, data: one.values, backgroundColor: COLOURS[index % COLOURS.length],
          borderColor: COLOURS[index % COLOURS.length], borderWidth: line ? 2 : 0, borderRadius: 2,
          pointRadius: 0, pointHitRadius: 12, spanGaps: true, tension: 0.25, maxBarThickness: 40,
        })),
      },
      options: {
        animation: false, maintainAspectRatio: false, responsive: true,
        interaction: { mode: "index", intersect: false },
        scales: {
          x: { stacked: !!data.stacked, grid: { display: false }, ticks: { color: ink, maxRotation: 0, autoSkipPadding: 16 } },
          y: {
            stacked: !!data.stacked, beginAtZero: true, grid: { color: grid }, border: { display: false },
            ticks: { color: ink, maxTicksLimit: 6, callback: (value) => short.format(value) },
            title: { display: !!data.unit, text: data.unit, color: ink },
          },
        },
        plugins: {
          legend: { display: data.series.length > 1, position: "bottom", labels: { color: ink, boxWidth: 12, boxHeight: 12 } },
          tooltip: {
            filter: (item) => item.parsed.y !== 0,
            callbacks: { label: (item) => ` ${item.dataset.label}: ${number.format(item.parsed.y)}${unit}` },
          },
        },
      },
    }));
  }
  function drawAll() {
    if (typeof Chart === "undefined") return;
    for (const figure of charts.keys()) if (!figure.isConnected) { charts.get(figure).destroy(); charts.delete(figure); }
    document.querySelectorAll("figure[data-chart]").forEach(draw);
  }

  function refresh() {
    if (navigator.clipboard) document.querySelectorAll(".copy[hidden]").forEach((button) => { button.hidden = false; });
    for (const dialog of document.querySelectorAll("dialog[data-open]")) { dialog.removeAttribute("data-open"); show(dialog); }
    times();
    themes();
    drawAll();
  }
  document.addEventListener("theme-changed", drawAll);
  // htmx copies attributes of elements that stay: without this, also the style that a chart gives its canvas.
  document.addEventListener("htmx:before:swap", () => {
    for (const [figure, chart] of charts) {
      chart.destroy();
      figure.querySelector("canvas").removeAttribute("style");
    }
    charts.clear();
  });
  document.addEventListener("htmx:after:swap", refresh);
  setInterval(times, 30000);
  window.consoleToast = toast;
  document.addEventListener("DOMContentLoaded", refresh); // after all scripts of the page
  for (const one of document.querySelectorAll(".toast.show")) setTimeout(() => one.remove(), 6000);
})();
