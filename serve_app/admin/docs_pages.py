"""Builds the pages below `/docs`: header, navigation and content. Also serves their style sheets, scripts and font.

The style sheets, the icons and the scripts are files of the console, which a gateway reads from its own installation.
"""

from __future__ import annotations

import gzip
import html
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Final

from serve_app.admin.document import CUSTOMER_TAGS
from serve_app.admin.guides import EXAMPLE, FOLDER, GUIDES
from serve_app.settings import BrandSettings

REFERENCE: Final = "API reference"
MIN_COMPRESSED: Final = 8192
#: Console files that the pages use: their names below `/docs`, and their paths in the console's static folder.
LOOK: Final = {
    "inter.woff2": "vendor/inter.woff2",
    "tabler.min.css": "vendor/tabler.min.css",
    "console.css": "console.css",
    "page.css": "docs.css",
    "theme.js": "theme.js",
    "start.js": "reference.js",
    "code.js": "code.js",
    **{
        f"highlight{one}.min.js": f"vendor/highlight{one}.min.js"
        for one in ("", "-bash", "-javascript", "-json", "-python")
    },
    "redoc.js": "vendor/redoc.standalone.js",
}
#: The viewer of OpenAPI documents, the largest file by far.
VIEWER: Final = "redoc.js"

_PAGE: Final = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} · {brand}</title>
<script src="{docs}/theme.js"></script>
<link rel="icon" href="{docs}/favicon.ico">
<link rel="preload" href="{docs}/{font}" as="font" type="font/woff2" crossorigin>
<link rel="stylesheet" href="{docs}/tabler.min.css">
<link rel="stylesheet" href="{docs}/console.css">
<link rel="stylesheet" href="{docs}/page.css">
<link rel="stylesheet" href="{docs}/brand.css">
<script src="{docs}/start.js" defer></script>
<script src="{docs}/code.js" type="module"></script>
</head>
<body>
<a class="skip btn btn-primary" href="#main">Skip to the content</a>
<header class="navbar navbar-expand visitors service"><div class="container-fluid page-width">
<a class="navbar-brand" href="/">{logo} <span class="brand-name text-truncate">{brand}</span></a>
<nav class="navbar-nav ms-auto align-items-center" aria-label="Service">
{links}<button type="button" class="btn btn-action" data-theme-toggle aria-label="Dark or light" hidden>\
{sun}{moon}</button>
{console}</nav>
</div></header>
<div class="{width} docs">
{side}<main id="main" class="{kind}" tabindex="-1">
{content}</main>
{contents}</div>
{foot}</body>
</html>
"""
_VIEWER: Final = f"""\
<div class="reference-head"><h1>{REFERENCE}</h1>
<dl class="facts"><dt>Base URL</dt><dd><code>{EXAMPLE}/v1</code></dd>
<dt>OpenAPI document</dt><dd><a href="openapi.json">openapi.json</a></dd></dl></div>
<div id="docs" data-document="openapi.json" data-viewer="docs/{VIEWER}">\
<noscript>This page needs JavaScript. Read openapi.json instead.</noscript></div>
"""


def reference_page(brand: BrandSettings, console: str | None, address: str = EXAMPLE) -> str:
    """Returns the customers' API reference for the service at `address`. `/docs` and `/v1/docs` are the same page."""
    content = _VIEWER.replace(EXAMPLE, html.escape(address))
    return _framed(REFERENCE, content, brand, console, "docs", "", kind="reference")


def guide_page(
    title: str, content: str, sections: Sequence[tuple[str, str]], brand: BrandSettings, console: str | None
) -> str:
    """Returns a guide. `console` is the console's path; None: no console runs."""
    return _framed(title, content, brand, console, "..", "../../", sections=sections, kind="guide")


def _framed(
    title: str,
    content: str,
    brand: BrandSettings,
    console: str | None,
    docs: str,
    top: str,
    *,
    kind: str,
    sections: Sequence[tuple[str, str]] = (),
) -> str:
    """Returns a page. `docs` and `top` are relative paths: to the files below `/docs`, and to the parent of `/docs`."""
    guides = [(f"{top}docs/guides/{name}", one) for name, (_, one) in GUIDES.items()] if FOLDER.is_dir() else []
    links = [(f"{top}docs/guides/quick-start", "Guides", title != REFERENCE)] if guides else []
    links += [(f"{top}docs", REFERENCE, title == REFERENCE)]
    picture = f'<img class="brand-logo" src="{docs}/logo" alt="" width="28" height="28">'
    mark = f'<span class="brand-logo brand-mark">{_icon("bolt")}</span>'
    legal = "".join(
        f'<a class="link-secondary" href="{html.escape(address)}">{name}</a>' for name, address in brand.links()
    )
    inside = "".join(f'<li><a href="#{anchor}">{html.escape(one)}</a></li>' for anchor, one in sections)
    return _PAGE.format(
        title=title,
        brand=html.escape(brand.name),
        docs=docs,
        font=_font(),
        logo=mark if brand.logo is None else picture,
        links="".join(_link(*link) + "\n" for link in links),
        sun=_icon("sun", "hide-theme-dark"),
        moon=_icon("moon", "hide-theme-light"),
        console="" if console is None else f'<a class="btn ms-2" href="{html.escape(console)}/">Console</a>\n',
        side="" if kind == "reference" else _side(guides, title, f"{top}docs"),
        kind=kind,
        width="reference-width" if kind == "reference" else "container-fluid page-width",
        content=content,
        contents=f'<nav class="contents" aria-label="On this page"><h2>On this page</h2><ul>{inside}</ul></nav>\n'
        if len(sections) > 1
        else "",
        foot=f'<footer class="page-width foot">{legal}</footer>\n' if legal else "",
    )


def _link(href: str, text: str, is_here: bool) -> str:
    return f'<a class="nav-link" href="{href}"{" aria-current=page" if is_here else ""}>{text}</a>'


def _side(guides: Sequence[tuple[str, str]], title: str, reference: str) -> str:
    """Returns the navigation: the guides, and the groups of operations."""
    groups = [(f"{reference}#tag/{name.replace(' ', '-')}", name) for name in CUSTOMER_TAGS]
    parts = [("Guides", guides, title != REFERENCE), (REFERENCE, groups, title == REFERENCE)]
    side = ""
    for name, pages, is_here in parts:
        if pages:
            links = "".join(_link(href, text, text == title) for href, text in pages)
            side += f'<div class="part{" here" if is_here else ""}"><h2>{name}</h2>{links}</div>'
    return f'<nav class="guides" aria-label="Documentation">{side}</nav>\n'


@cache
def _icon(name: str, kind: str = "") -> str:
    """Returns an icon as inline SVG, because the pages need only a few of the console's icons."""
    sprite = (files("serve_app.console") / "static" / "vendor" / "icons.svg").read_text()
    found = re.search(rf'<symbol id="{name}"(.*?)</symbol>', sprite)
    assert found is not None
    return f'<svg class="icon{" " * bool(kind)}{kind}" aria-hidden="true"{found[1]}</svg>'


@cache
def _font() -> str:
    """Returns the font's address below `/docs`, including the version that the console's style sheet names."""
    style = (files("serve_app.console") / "static" / "console.css").read_text()
    found = re.search(r'url\("(inter\.woff2\?v=\w+)"\)', style)
    assert found is not None
    return found[1]


@cache
def look_file(name: str) -> tuple[bytes, bytes | None]:
    """Returns a file of LOOK, and its gzip version: None for a file that is small or already compressed."""
    content = (files("serve_app.console") / "static" / LOOK[name]).read_bytes()
    is_compressed = len(content) >= MIN_COMPRESSED and not name.endswith(".woff2")
    return content, gzip.compress(content, 9, mtime=0) if is_compressed else None
