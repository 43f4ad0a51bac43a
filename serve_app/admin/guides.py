"""The customers' guides below `/docs`: pages of the documentation, with this service's address in their examples."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token

FOLDER: Final = Path(__file__).parents[2] / "docs"
#: File and title of each guide, by its name in the address.
GUIDES: Final = {
    "quick-start": ("quick-start.md", "Quick start"),
    "clients": ("clients.md", "SDKs and tools"),
    "chat": ("api.md", "The API"),
    "responses": ("responses.md", "Responses"),
    "messages": ("messages.md", "Messages"),
    "completions": ("completions.md", "Text completions"),
    "tokens": ("tokenize.md", "Counting tokens"),
    "troubleshooting": ("troubleshooting-clients.md", "Troubleshooting"),
}
EXAMPLE: Final = "http://127.0.0.1:8000"  # the service's address in the documentation
LANGUAGES: Final = {"sh": "Shell", "python": "Python", "js": "Node", "json": "JSON", "yaml": "YAML", "toml": "TOML"}
_GUIDE_BY_FILE: Final = {file: name for name, (file, _) in GUIDES.items()}


class Guide(NamedTuple):
    """A guide as HTML, and its sections: anchor and title."""

    content: str
    sections: tuple[tuple[str, str], ...]


def guide(name: str, address: str) -> Guide | None:
    """Returns a guide for the service at `address`; None if there is no such guide."""
    if name not in GUIDES or not (FOLDER / GUIDES[name][0]).is_file():
        return None
    made = _rendered(name)
    return made._replace(content=made.content.replace(EXAMPLE, html.escape(address)))


@cache
def _rendered(name: str) -> Guide:
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = markdown.parse((FOLDER / GUIDES[name][0]).read_text())
    sections = []
    for index, token in enumerate(tokens):
        if token.type == "heading_open":
            title = tokens[index + 1].content.replace("`", "")
            token.attrSet("id", _anchor(title))
            if token.tag == "h2":
                sections.append((_anchor(title), title))
        elif token.type == "inline":
            _lead_to_guides(token.children or [])
    _group(tokens)
    numbers = count()
    for kind, rule in (
        ("table_open", lambda *_: '<div class="table-responsive" tabindex="0" role="region"><table class="table">\n'),
        ("table_close", lambda *_: "</table></div>\n"),
        ("fence", lambda _, some, index, *__: _code(some, index, next(numbers))),
    ):
        markdown.add_render_rule(kind, rule)
    return Guide(str(markdown.renderer.render(tokens, markdown.options, {})), tuple(sections))


def _anchor(title: str) -> str:
    return html.escape(re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title.lower())).strip("-"))


def _lead_to_guides(tokens: list[Token]) -> None:
    """Points links of the documentation to the guides. A link to a page for operators becomes plain text."""
    ends: list[bool] = []
    for index, token in enumerate(tokens):
        if token.type == "link_open":
            file, _, anchor = str(token.attrs["href"]).partition("#")
            is_kept = not file or file in _GUIDE_BY_FILE or re.match(r"https?:", file) is not None
            if file in _GUIDE_BY_FILE:
                token.attrs["href"] = f"{_GUIDE_BY_FILE[file]}{'#' if anchor else ''}{anchor}"
                if tokens[index + 1].content == file:
                    tokens[index + 1].content = GUIDES[_GUIDE_BY_FILE[file]][1]
            ends.append(is_kept)
            token.hidden = not is_kept
        elif token.type == "link_close":
            token.hidden = not ends.pop()
        if token.hidden:
            token.type, token.content, token.tag = "text", "", ""


def _group(tokens: Sequence[Token]) -> None:
    """Marks consecutive examples in different languages, which are shown as tabs."""
    start = 0
    while start < len(tokens):
        end = start
        while end < len(tokens) and tokens[end].type == "fence":
            end += 1
        languages = [token.info for token in tokens[start:end]]
        if len(languages) > 1 and len(set(languages)) == len(languages):
            for place in range(start, end):
                tokens[place].meta = {"first": place == start, "last": place == end - 1}
        start = max(end, start + 1)


def _code(tokens: Sequence[Token], index: int, number: int) -> str:
    """Returns an example with its language and a copy button. The button is hidden until a script shows it."""
    token = tokens[index]
    language = html.escape(LANGUAGES.get(token.info, token.info.capitalize()))
    copy = '<button type="button" class="btn btn-sm copy" hidden>Copy</button>'
    text = f'<pre tabindex="0"><code data-code="{html.escape(token.info)}">{html.escape(token.content)}</code></pre>'
    block = f'<div class="code">{copy}{text}</div>\n'
    if not token.meta:
        return block
    group = number if token.meta["first"] else _first_of(tokens, index, number)
    checked = " checked" if token.meta["first"] else ""
    tab = f'<input type="radio" class="tab" name="tabs-{group}" id="tab-{number}"{checked}>'
    tab += f'<label for="tab-{number}">{language}</label>{block}'
    return ('<div class="tabs">' if token.meta["first"] else "") + tab + ("</div>\n" if token.meta["last"] else "")


def _first_of(tokens: Sequence[Token], index: int, number: int) -> int:
    """Returns the number of the first example in the same group as the example `number`."""
    while not tokens[index].meta["first"]:
        index, number = index - 1, number - 1
    return number
