// Colours examples of code: bash, Python, JavaScript and JSON.
import hljs from "./highlight.min.js";
import bash from "./highlight-bash.min.js";
import javascript from "./highlight-javascript.min.js";
import json from "./highlight-json.min.js";
import python from "./highlight-python.min.js";

for (const [name, language] of Object.entries({ bash, javascript, json, python })) hljs.registerLanguage(name, language);
hljs.registerAliases(["curl", "sh"], { languageName: "bash" });
hljs.registerAliases(["js", "node"], { languageName: "javascript" });

function paint(shown, language) {
  if (hljs.getLanguage(language)) shown.innerHTML = hljs.highlight(shown.textContent, { language }).value;
}

for (const shown of document.querySelectorAll("[data-code], .snippet [data-language]")) {
  const language = shown.dataset.code ?? shown.dataset.language;
  const watched = new MutationObserver(() => { // the playground writes its code anew
    paint(shown, language);
    watched.takeRecords();
  });
  paint(shown, language);
  watched.observe(shown, { childList: true });
}
