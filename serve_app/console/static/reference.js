// The guides and the API references: the viewer of OpenAPI documents, dark or light, and copying examples.
"use strict";

const page = document.documentElement;
const shown = document.getElementById("docs");
const EXAMPLE = "http://127.0.0.1:8000"; // the service's address in the document's examples
const inConsole = Boolean(shown?.closest(".page-wrapper")); // beside the navigation: examples below the text
const isDark = () => page.getAttribute("data-bs-theme") === "dark";

for (const button of document.querySelectorAll("[data-theme-toggle]")) {
  button.hidden = false;
  button.addEventListener("click", () => window.theme.choose(isDark() ? "light" : "dark"));
}

for (const button of document.querySelectorAll(".code .copy")) {
  button.hidden = !navigator.clipboard;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(button.closest(".code").querySelector("pre").textContent);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
}

// The language of examples: the last one that was chosen, here or in the console.
const LANGUAGES = { Shell: "curl", curl: "curl", Python: "python", Node: "node" };
function language() {
  try { return localStorage.getItem("language"); } catch { return null; }
}
function keep(label) {
  try { localStorage.setItem("language", LANGUAGES[label]); } catch { /* it holds for this page */ }
}
const labels = [...document.querySelectorAll(".tabs > label")];
const take = () => labels.filter((one) => LANGUAGES[one.textContent] === (language() ?? "curl")).forEach((one) => { one.control.checked = true; });
take();
document.addEventListener("change", (event) => {
  if (!event.target.matches(".tabs > .tab") || !(event.target.labels[0].textContent in LANGUAGES)) return;
  keep(event.target.labels[0].textContent);
  take();
});

const SHORT = 400; // characters of a description that is not folded
const KEYS = { apiKey: "an API key", managementKey: "a management key", operatorKey: "the operator key" };
// Simplifies a schema and its parts for the viewer, which then shows "string or null" instead of a choice, and "Array of
// objects" instead of "any". Rules on which fields go together and the limits of 32-bit and 64-bit integers are left out.
const WORD = 2 ** 31 - 1;
function simplify(schema, shared) {
  for (const one of Object.values(schema)) if (one && typeof one === "object") simplify(one, shared);
  if (schema.properties && schema.allOf?.every((one) => one.anyOf)) delete schema.allOf;
  for (const choice of ["anyOf", "oneOf"]) {
    if (!Array.isArray(schema[choice])) continue;
    if (schema.properties && schema[choice].every((one) => !one.$ref)) { delete schema[choice]; continue; }
    const others = schema[choice].filter((one) => one?.type !== "null");
    if (others.length > 1 && others.every(({ $ref }) => shared[$ref?.split("/").pop()]?.type === "object")) schema.type ??= "object";
    if (!others.length || others.length === schema[choice].length) continue;
    const { [choice]: _, ...own } = schema, [first] = others;
    delete schema[choice];
    if (others.length > 1) schema[choice] = others;
    else if (typeof first.type === "string") Object.assign(schema, first, own, { type: [first.type, "null"] });
    else schema.allOf = others;
  }
  for (const limit of ["minimum", "maximum"]) if (Math.abs(schema[limit]) >= WORD) delete schema[limit];
}
// Arranges the document for the viewer: one table of the errors, rules of an operation folded, and one base URL.
function arranged(document) {
  const errors = new Map(), shared = document.components.responses ?? {};
  for (const operation of Object.values(document.paths).flatMap((item) => Object.values(item))) {
    const statuses = [];
    for (const [status, { $ref }] of Object.entries(operation.responses)) {
      if (status < "400" || !$ref || (errors.get(status) ?? $ref) !== $ref) continue;
      errors.set(status, $ref);
      statuses.push(status);
      delete operation.responses[status];
    }
    const text = operation.description ?? "";
    const rules = text.length > SHORT ? `<details><summary>Notes</summary>\n\n${text}\n\n</details>\n\n` : text && `${text}\n\n`;
    const key = KEYS[Object.keys(operation.security?.[0] ?? {})[0]];
    const facts = [key && `Needs ${key}.`, statuses.length && `[Errors](#section/Errors): ${statuses.join(", ")}`];
    operation.description = rules + facts.filter(Boolean).join(" ");
    delete operation.security;
    const chosen = operation["x-codeSamples"]?.findIndex((one) => LANGUAGES[one.label] === language());
    if (chosen > 0) operation["x-codeSamples"].unshift(...operation["x-codeSamples"].splice(chosen, 1));
  }
  simplify(document.components, document.components.schemas);
  simplify(document.paths, document.components.schemas);
  document.servers = [{ url: `${location.origin}/v1` }];
  const about = `**Base URL** \`${location.origin}/v1\` · [OpenAPI document](${shown.dataset.document})`;
  document.info.description = `${about}\n\n${document.info.description}`;
  delete document.info.version;
  const rows = [...errors].sort().map(([status, reference]) => {
    const { description } = shared[reference.split("/").pop()];
    return `| ${status} | ${description.replaceAll("\n", " ")} |`;
  });
  if (rows.length) document.info.description += `\n\n# Errors\n\n| Status | Meaning |\n|---|---|\n${rows.join("\n")}\n`;
  return document;
}

function choose(tab) {
  if (!(tab.textContent in LANGUAGES)) return;
  keep(tab.textContent);
  const before = tab.getBoundingClientRect().top;
  for (const one of shown.querySelectorAll("[role=tab]:not([aria-selected=true])"))
    if (one.textContent === tab.textContent) one.click();
  scrollBy({ top: tab.getBoundingClientRect().top - before, behavior: "instant" });
}

function look() {
  const [text, quiet, surface, panel, edge, link, ground] = isDark()
    ? ["#e5e5e5", "#a3a3a3", "#171717", "#262626", "#404040", "#7db8f7", "#171717"]
    : ["#262626", "#636363", "#ffffff", "#f5f5f5", "#e0e0e0", "#0558a8", "#fafafa"];
  const font = { fontFamily: "var(--tblr-font-sans-serif)" };
  return {
    spacing: { unit: 5, sectionHorizontal: innerWidth < 576 ? 16 : 40, sectionVertical: 28 },
    breakpoints: inConsole ? { small: "50rem", medium: "120rem", large: "121rem" } : { small: "50rem", medium: "70rem", large: "105rem" },
    colors: { primary: { main: link }, text: { primary: text, secondary: quiet }, border: { light: edge, dark: edge } },
    typography: {
      fontSize: "15px", lineHeight: "1.55", ...font, headings: { ...font, fontWeight: "600" },
      code: { fontSize: "13px", fontFamily: "var(--tblr-font-monospace)", color: text, backgroundColor: panel, wrap: true },
      links: { color: link, visited: link, hover: link },
    },
    sidebar: { backgroundColor: surface, textColor: text, activeTextColor: link, width: "270px" },
    rightPanel: { backgroundColor: ground, textColor: text, width: "42%" },
    codeBlock: { backgroundColor: surface },
    schema: { nestedBackground: panel, linesColor: edge, typeNameColor: quiet, typeTitleColor: quiet, requireLabelColor: isDark() ? "#ff9c9c" : "#b42318" },
  };
}

let described;
function draw() {
  const place = document.createElement("div");
  shown.replaceChildren(place);
  Redoc.init(structuredClone(described), {
    theme: look(), scrollYOffset: ".service, .topbar", hideDownloadButtons: true, requiredPropsFirst: true,
    hideSchemaTitles: true, hideSchemaPattern: true, nativeScrollbars: true, payloadSampleIdx: 3, jsonSamplesExpandLevel: 4, pathInMiddlePanel: true,
  }, place, () => {
    document.querySelector(".reference-head")?.remove();
    for (const one of shown.querySelectorAll(".search-input")) one.setAttribute("aria-label", "Search the API reference");
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target) setTimeout(() => target.scrollIntoView({ behavior: "instant" }));
  });
}

if (shown) {
  const viewer = document.createElement("script");
  viewer.src = shown.dataset.viewer;
  const fail = () => { shown.textContent = "The reference could not be loaded. Reload the page."; };
  viewer.addEventListener("error", fail);
  viewer.addEventListener("load", async () => {
    try {
      const text = await (await fetch(shown.dataset.document)).text(); // the sign-in page after a session's end
      described = arranged(JSON.parse(text.replaceAll(EXAMPLE, location.origin)));
    } catch { return fail(); }
    draw();
    document.addEventListener("theme-changed", draw);
    shown.addEventListener("click", (event) => {
      if (event.isTrusted && event.target.matches("[role=tab]")) choose(event.target);
    });
  });
  document.head.append(viewer);
}
