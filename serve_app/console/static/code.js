// Colours examples of code: bash, Python, JavaScript and JSON.
const examples = document.querySelectorAll("[data-code], .snippet [data-language]");

async function highlighter() {
  const names = ["bash", "javascript", "json", "python"];
  const files = ["./highlight.min.js", ...names.map((name) => `./highlight-${name}.min.js`)];
  const [{ default: hljs }, ...languages] = await Promise.all(files.map((file) => import(file)));
  names.forEach((name, index) => hljs.registerLanguage(name, languages[index].default));
  hljs.registerAliases(["curl", "sh"], { languageName: "bash" });
  hljs.registerAliases(["js", "node"], { languageName: "javascript" });
  return hljs;
}

function paint(hljs, shown, language) {
  if (hljs.getLanguage(language)) shown.innerHTML = hljs.highlight(shown.textContent, { language }).value;
}

if (examples.length) { // most pages have none, and need none of the files
  const hljs = await highlighter();
  for (const shown of examples) {
    const language = shown.dataset.code ?? shown.dataset.language;
    const watched = new MutationObserver(() => { // the playground writes its code anew
      paint(hljs, shown, language);
      watched.takeRecords();
    });
    paint(hljs, shown, language);
    watched.observe(shown, { childList: true });
  }
}
