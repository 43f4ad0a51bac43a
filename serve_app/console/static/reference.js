// The guides and the API references: the viewer of OpenAPI documents, dark or light, and copying examples.
"use strict";

const page = document.documentElement;
const shown = document.getElementById("docs");

const follow = () => page.classList.toggle("dark-mode", page.getAttribute("data-bs-theme") === "dark");
follow();
document.addEventListener("theme-changed", follow);

for (const button of document.querySelectorAll("[data-theme-toggle]")) {
  button.hidden = false;
  button.addEventListener("click", () => window.theme.choose(page.classList.contains("dark-mode") ? "light" : "dark"));
}

for (const button of document.querySelectorAll(".code .copy")) {
  button.hidden = !navigator.clipboard;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(button.closest(".code").querySelector("pre").textContent);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
}

if (shown) {
  const place = location.hash; // the viewer rewrites it
  const viewer = document.createElement("script");
  viewer.src = shown.dataset.viewer;
  // What the viewer leaves out for the keyboard and screen readers.
  new MutationObserver(() => {
    for (const one of shown.querySelectorAll("pre.microlight:not([tabindex])")) one.tabIndex = 0;
    for (const one of shown.querySelectorAll(".examples-select-element:not([aria-label])")) one.setAttribute("aria-label", "Example");
  }).observe(shown, { childList: true, subtree: true });
  viewer.addEventListener("load", () => {
    window.ui = SwaggerUIBundle({
      url: shown.dataset.document,
      dom_id: "#docs",
      deepLinking: true,
      defaultModelsExpandDepth: 0,
      displayRequestDuration: true,
      validatorUrl: null, // it would send the document to another site
      onComplete: () => {
        // An operation that is open from the start, where there is room for its example and no other one is asked for.
        const [tag, operation] = (shown.dataset.open ?? "").split("/");
        if (operation && !place && matchMedia("(min-width: 992px)").matches)
          window.ui.getStore().dispatch({ type: "layout_show", payload: { thing: ["operations", tag, operation], shown: true } });
        if (place.startsWith("#operations-tag-")) {
          history.replaceState(null, "", place);
          document.getElementById(place.slice(1))?.scrollIntoView();
        }
      },
    });
  });
  document.head.append(viewer);
}
