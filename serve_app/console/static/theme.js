// Sets the theme before the page is painted: the person's choice, else the system's.
"use strict";

(() => {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => {
    try { return localStorage.getItem("theme") || "system"; } catch { return "system"; }
  };
  const apply = () => {
    const theme = chosen() === "system" ? (system.matches ? "dark" : "light") : chosen();
    document.documentElement.setAttribute("data-bs-theme", theme);
    document.dispatchEvent(new CustomEvent("theme-changed"));
  };
  apply();
  system.addEventListener("change", apply);
  window.theme = {
    chosen,
    choose(name) {
      try { localStorage.setItem("theme", name); } catch { /* it holds for this page */ }
      apply();
    },
  };
})();
