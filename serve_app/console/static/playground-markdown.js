// Shows a text as Markdown. A text is a model's: nothing in it may run, load, cover the page, become a part of a form,
// or give orders to htmx or console.js, which read attributes.

const ALLOWED = {
  ALLOWED_TAGS: ["a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p",
    "pre", "strong", "sub", "sup", "table", "tbody", "td", "th", "thead", "tr", "ul"],
  ALLOWED_ATTR: ["align", "href", "start", "title"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
};

export function showMarkdown(place, text) {
  const { marked, DOMPurify } = globalThis;
  if (!marked || !DOMPurify) {
    place.textContent = text;
    return;
  }
  const html = marked.parse(text, { gfm: true, breaks: true });
  place.replaceChildren(DOMPurify.sanitize(html, { ...ALLOWED, RETURN_DOM_FRAGMENT: true }));
  for (const link of place.querySelectorAll("a[href]")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const table of place.querySelectorAll("table")) table.className = "table table-sm";
}
