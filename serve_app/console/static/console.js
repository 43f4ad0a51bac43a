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
    const text = "copySnippet" in button.dataset
      ? [...button.closest(".snippet").querySelectorAll("pre")].find((one) => one.checkVisibility()).textContent
      : button.dataset.copy;
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

  // Times: relative within a day, else the date; the exact one is in the tooltip, in the viewer's zone or in UTC.
  const units = [["hour", 3600], ["minute", 60]];
  const relative = new Intl.RelativeTimeFormat("en");
  function dated(options) { // "28 Sep 2026", as the service writes it; browsers abbreviate September as "Sept"
    const format = new Intl.DateTimeFormat("en-GB", options);
    return (at) => format.format(at).replace("Sept", "Sep");
  }
  function times() {
    const utc = stored("zone") === "utc", now = Date.now();
    const timeZone = utc ? "UTC" : undefined;
    const exact = dated({ dateStyle: "medium", timeStyle: "long", timeZone });
    const date = dated({ dateStyle: "medium", timeZone });
    const inLog = dated({ day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", second: "2-digit", timeZone });
    const zone = new Intl.DateTimeFormat("en-GB", { timeZone, timeZoneName: "short" }).formatToParts(now);
    for (const one of document.querySelectorAll("time[datetime]")) {
      const at = new Date(one.dateTime), seconds = (at - now) / 1000;
      one.title = exact(at);
      if ("exact" in one.dataset) { one.textContent = exact(at); continue; }
      const unit = units.find(([, size]) => Math.abs(seconds) >= size);
      const near = Math.abs(seconds) >= 86400 ? date(at) : unit ? relative.format(Math.trunc(seconds / unit[1]), unit[0])
        : seconds > 0 ? "in a moment" : "just now";
      if ("log" in one.dataset) {
        one.textContent = inLog(at).replace(",", "");
        one.title = `${near}, ${exact(at)}`;
      } else one.textContent = near;
    }
    for (const one of document.querySelectorAll("[data-zone]")) one.textContent = zone.find((part) => part.type === "timeZoneName").value;
    for (const one of document.querySelectorAll("[data-zone-switch]")) {
      one.hidden = false;
      one.querySelector("span").textContent = utc ? "Show times in your time zone" : "Show times in UTC";
    }
  }
  document.addEventListener("click", (event) => {
    if (!event.target.closest("[data-zone-switch]")) return;
    store("zone", stored("zone") === "utc" ? "local" : "utc");
    times();
  });

  // Buttons that write their value into a field.
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-fills]");
    if (button) document.getElementById(button.dataset.fills).value = button.value;
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
  const REDS = ["#d63939", "#f0883e", "#a61e4d", "#e8a0a0", "#7a1414", "#c98a2b", "#f06595", "#862e2e"];
  const STATUS_COLOURS = {
    Completed: "#2fb344", Failed: "#d63939", "Cancelled by the client": "#8a97a8",
    "Rejected (4xx)": "#f59f00", "Failed (5xx)": "#d63939", Cancelled: "#8a97a8", p50: "#066fd1", p95: "#f76707",
  };
  // "2026-11-26" is shown as "26 Nov", an hour of it as "05:00", and its first hour as the day.
  function moment(label, _, all) {
    const found = /^(\d{4}-\d\d-\d\d)(?:T(\d\d))?$/.exec(label);
    if (!found) return label;
    if (found[2] && found[2] !== "00") return `${found[2]}:00`;
    const year = all.length > 180 ? "numeric" : undefined;
    return dated({ day: "numeric", month: "short", year, timeZone: "UTC" })(new Date(found[1]));
  }
  // Of labels such as "14:08", returns those at whole multiples of the shortest of these times that leaves them apart.
  const TIMES = [5, 10, 15, 30, 60, 120, 180, 240, 360, 720]; // minutes
  function atWholeTimes(ticks, labels, width) {
    const at = labels.map((label) => { const [hour, minute] = label.split(":"); return hour.length === 2 ? 60 * hour + Number(minute) : NaN; });
    const whole = (step) => ticks.filter(({ value }) => at[value] % step === 0);
    return at.some(Number.isNaN) ? ticks : whole(TIMES.find((step) => 64 * whole(step).length <= width) ?? 720);
  }
  // Writes why the first part of a chart is empty, if the text fits there.
  const emptyPart = {
    id: "emptyPart",
    afterDatasetsDraw({ ctx, chartArea, scales, options }, _, { until, text }) {
      const between = (scales.x.getPixelForValue(until - 1) + scales.x.getPixelForValue(until)) / 2;
      const right = !until ? chartArea.left : until < scales.x.max + 1 ? between : chartArea.right;
      ctx.save();
      ctx.font = `12px ${Chart.defaults.font.family}`;
      ctx.fillStyle = options.scales.x.ticks.color;
      ctx.textAlign = "center";
      if (ctx.measureText(text).width + 16 <= right - chartArea.left)
        ctx.fillText(text, (chartArea.left + right) / 2, (chartArea.top + chartArea.bottom) / 2);
      ctx.restore();
    },
  };
  function draw(figure) {
    const data = JSON.parse(document.getElementById(figure.dataset.chart).textContent);
    const style = getComputedStyle(document.body);
    const ink = style.getPropertyValue("--chart-ink") || "#667382", grid = style.getPropertyValue("--chart-grid") || "#8883";
    const line = data.type === "line", unit = data.unit ? ` ${data.unit}` : "";
    const number = new Intl.NumberFormat("en", { maximumSignificantDigits: 6 });
    const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
    const whole = data.series.every((one) => one.values.every((value) => Number.isInteger(value ?? 0)));
    const palette = data.failed ? REDS : COLOURS;
    const colour = (one, index) => STATUS_COLOURS[one.name] ?? palette[index % palette.length];
    const last = data.so_far ? data.labels.length - 1 : -1; // a day or hour that is not over: paler
    const paint = (shade) => data.labels.map((_, index) => (index === last ? `${shade}73` : shade));
    charts.get(figure)?.destroy();
    Chart.defaults.font.family = style.fontFamily;
    charts.set(figure, new Chart(figure.querySelector("canvas"), {
      type: line ? "line" : "bar",
      plugins: data.empty ? [emptyPart] : [],
      data: {
        labels: data.labels.map(moment).map((label, index) => (index === last ? [label, "so far"] : label)),
        datasets: data.series.map((one, index) => ({
          label: one.name, data: one.values, backgroundColor: last < 0 ? colour(one, index) : paint(colour(one, index)), borderColor: colour(one, index),
          borderWidth: line ? 2 : 0, borderRadius: 2,
          pointRadius: line && one.values.filter((value) => value !== null).length <= 24 ? 2 : 0, pointHitRadius: 12, spanGaps: true, maxBarThickness: 40,
        })),
      },
      options: {
        animation: false, maintainAspectRatio: false, responsive: true,
        interaction: { mode: "index", intersect: false },
        scales: {
          x: {
            stacked: !!data.stacked, grid: { display: false },
            ticks: { color: ink, maxRotation: 0, autoSkipPadding: 16, major: { enabled: last >= 0 } },
            // The last label is not skipped. The other one keeps the labels between them at equal distances.
            afterBuildTicks: (axis) => {
              axis.ticks = atWholeTimes(axis.ticks, data.labels, axis.maxWidth);
              if (last >= 0) for (const place of [last % 12, last]) axis.ticks[place].major = true;
            },
          },
          y: {
            stacked: !!data.stacked, beginAtZero: true, grid: { color: grid }, border: { display: false },
            ticks: {
              color: ink, maxTicksLimit: 6, precision: whole ? 0 : undefined, callback: (value) => short.format(value),
              autoSkip: false, // it may leave out the tick above the highest bar
            },
            title: { display: !!data.unit, text: data.unit, color: ink },
          },
        },
        plugins: {
          emptyPart: data.empty,
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

  // The language of snippets: the last one that was chosen.
  function languages() {
    for (const one of document.querySelectorAll(".snippet-tabs input")) if (one.value === stored("language")) one.checked = true;
  }
  document.addEventListener("change", (event) => {
    if (!event.target.closest(".snippet-tabs")) return;
    store("language", event.target.value);
    languages();
  });

  // Password fields, with a button that shows the text.
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-show-password]");
    if (!button) return;
    const field = button.previousElementSibling, hides = field.type === "text";
    field.type = hides ? "password" : "text";
    button.setAttribute("aria-pressed", String(!hides));
  });

  // Date fields: typed as YYYY-MM-DD, or chosen in the browser's calendar. Browsers show dates in other ways.
  function dates() {
    for (const field of document.querySelectorAll("input:is([type=date], [type=datetime-local]):not(.native-date)")) {
      const hasTime = field.type === "datetime-local", box = document.createElement("div");
      const native = field.cloneNode(), text = field.cloneNode(), button = document.createElement("button");
      for (const name of ["id", "name", "required", "aria-invalid", "aria-describedby"]) native.removeAttribute(name);
      native.className = "native-date";
      native.tabIndex = -1;
      native.setAttribute("aria-hidden", "true");
      text.type = "text";
      text.value = (native.value || field.getAttribute("value") || "").replace("T", " "); // also a wrong date, to correct it
      text.placeholder = text.title = hasTime ? "YYYY-MM-DD HH:MM" : "YYYY-MM-DD";
      text.pattern = `\\d{4}-\\d{2}-\\d{2}${hasTime ? "[ T]\\d{2}:\\d{2}" : ""}`;
      text.autocomplete = "off";
      text.dataset.date = hasTime ? "time" : "day";
      button.className = "btn btn-action";
      button.type = "button";
      button.title = "Choose a date";
      button.setAttribute("aria-label", "Choose a date");
      const icon = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
      icon.setAttribute("class", "icon");
      icon.setAttribute("aria-hidden", "true");
      use.setAttribute("href", `${document.body.dataset.icons}#calendar`);
      icon.append(use);
      button.append(icon);
      box.className = "with-button";
      box.append(text, button, native);
      field.replaceWith(box);
      button.addEventListener("click", () => {
        native.value = text.value.trim().replace(" ", "T");
        native.showPicker();
      });
      native.addEventListener("change", (event) => {
        event.stopPropagation();
        text.value = native.value.replace("T", " ");
        text.dispatchEvent(new Event("change", { bubbles: true }));
      });
    }
  }
  document.addEventListener("formdata", (event) => { // as a native field would send it
    for (const field of event.target.querySelectorAll("[data-date=time][name]"))
      if (event.formData.has(field.name)) event.formData.set(field.name, field.value.trim().replace(" ", "T"));
  });

  function refresh() {
    dates();
    languages();
    for (const button of document.querySelectorAll("[data-show-password]")) button.hidden = false;
    if (navigator.clipboard) document.querySelectorAll(".copy[hidden]").forEach((button) => { button.hidden = false; });
    for (const dialog of document.querySelectorAll("dialog[data-open]")) { dialog.removeAttribute("data-open"); show(dialog); }
    times();
    themes();
    drawAll();
  }
  document.addEventListener("theme-changed", drawAll);
  document.fonts.addEventListener("loadingdone", drawAll);
  let wasIn = ""; // id of the date field that has the focus while the page is replaced
  // htmx copies attributes of elements that stay: without this, also the style that a chart gives its canvas.
  document.addEventListener("htmx:before:swap", () => {
    for (const [figure, chart] of charts) {
      chart.destroy();
      figure.querySelector("canvas").removeAttribute("style");
    }
    charts.clear();
    wasIn = document.activeElement?.dataset.date ? document.activeElement.id : "";
    for (const field of document.querySelectorAll("[data-date]")) field.removeAttribute("id");
  });
  document.addEventListener("htmx:after:swap", () => {
    refresh();
    for (const one of document.querySelectorAll("[data-updated]")) one.textContent = `${new Date().toISOString().slice(11, 19)} UTC`;
    if (wasIn) document.getElementById(wasIn)?.focus();
  });
  setInterval(times, 30000);
  window.consoleToast = toast;
  document.addEventListener("DOMContentLoaded", refresh); // after all scripts of the page
  for (const one of document.querySelectorAll(".toast.show")) setTimeout(() => one.remove(), 6000);
})();
