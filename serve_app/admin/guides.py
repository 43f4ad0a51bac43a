"""The customers' guides beside `/docs`: pages of the documentation, with this service's address in their examples."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from markdown_it import MarkdownIt
from markdown_it.token import Token

FOLDER: Final = Path(__file__).parents[2] / "docs"
#: File and title of each guide, by its name in the address.
GUIDES: Final = {
    "quick-start": ("clients.md", "Quick start"),
    "chat": ("api.md", "Chat completions"),
    "responses": ("responses.md", "Responses"),
    "messages": ("messages.md", "Messages"),
    "completions": ("completions.md", "Completions"),
    "tokens": ("tokenize.md", "Tokens"),
    "troubleshooting": ("troubleshooting-clients.md", "Troubleshooting"),
}
EXAMPLE: Final = "http://127.0.0.1:8000"  # the service's address in the documentation
_OF_FILE: Final = {file: name for name, (file, _) in GUIDES.items()}
STYLE: Final = """\
:root { --ink: #1f2937; --soft: #64748b; --line: #dce1e7; --paper: #fff; --code: #f6f8fa; --accent: #066fd1; }
body { margin: 0; color: var(--ink); background: var(--paper); }
body, .swagger-ui, .swagger-ui .info .title { font-family: system-ui, sans-serif; }
.service { border-bottom: 1px solid var(--line); padding: 0.75rem 1.25rem; }
.service nav { display: flex; flex-wrap: wrap; gap: 0.25rem 1.5rem; max-width: 1440px; margin: auto; }
.service a, .guide a { color: var(--accent); text-decoration: none; }
.service a:hover, .guide a:hover { text-decoration: underline; }
.service a[aria-current] { color: var(--ink); font-weight: 600; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
.hidden { position: absolute; clip-path: inset(50%); width: 1px; height: 1px; overflow: hidden; }
.guide { max-width: 60rem; margin: auto; padding: 1rem 1.25rem 4rem; line-height: 1.6; }
.guide h1, .guide h2, .guide h3 { line-height: 1.25; margin: 2em 0 0.5em; }
.guide h1 { margin-top: 1em; }
.guide code { font-size: 0.9em; background: var(--code); padding: 0.1em 0.3em; border-radius: 4px; }
.guide pre { background: var(--code); border: 1px solid var(--line); border-radius: 6px; padding: 1rem; }
.guide pre, .guide .wide { overflow: auto; }
.guide pre code { padding: 0; background: none; }
.guide table { border-collapse: collapse; margin: 1rem 0; }
.guide th, .guide td { border-bottom: 1px solid var(--line); padding: 0.4rem 0.75rem 0.4rem 0; text-align: left; \
vertical-align: top; }
"""


def navigation(prefix: str, current: str) -> str:
    """Returns the head of a page. `prefix` leads to the address of `/docs`; `current` is the page's title."""
    links = [("/", "Home"), (f"{prefix}docs", "API reference")]
    if FOLDER.is_dir():
        links += [(f"{prefix}docs/guides/{name}", title) for name, (_, title) in GUIDES.items()]
    shown = "".join(
        f'<a href="{href}"{" aria-current=page" if title == current else ""}>{title}</a>' for href, title in links
    )
    return f'<header class="service"><nav aria-label="Documentation">{shown}</nav></header>'


def guide(name: str, address: str) -> str | None:
    """Returns a guide as HTML, for the service at `address`; None if there is no such guide."""
    if name not in GUIDES or not (FOLDER / GUIDES[name][0]).is_file():
        return None
    return _rendered(name).replace(EXAMPLE, html.escape(address))


@cache
def _rendered(name: str) -> str:
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    markdown.add_render_rule("heading_open", _heading)
    markdown.add_render_rule("table_open", lambda *_: '<div class="wide" tabindex="0" role="region"><table>\n')
    markdown.add_render_rule("table_close", lambda *_: "</table></div>\n")
    tokens = markdown.parse((FOLDER / GUIDES[name][0]).read_text())
    for token in tokens:
        for child in token.children or ():
            if child.type == "link_open":
                child.attrs["href"] = _target(str(child.attrs["href"]))
    return str(markdown.renderer.render(tokens, markdown.options, {}))


def _heading(renderer: Any, tokens: Sequence[Token], index: int, *_: Any) -> str:
    text = tokens[index + 1].content.lower()
    anchor = re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", text)).strip("-")
    return f'<{tokens[index].tag} id="{html.escape(anchor)}">'


def _target(href: str) -> str:
    """Returns where a link of the documentation leads here: pages for operators are not served, and lead to the top."""
    file, _, anchor = href.partition("#")
    if re.match(r"https?:", href) or not file:
        return href
    return f"{_OF_FILE[file]}{'#' if anchor else ''}{anchor}" if file in _OF_FILE else "#"
