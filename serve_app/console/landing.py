"""The page at the root of the service, for browsers. The gateway serves it; the console renders it in its own look."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from starlette.requests import Request

from serve_app.console.web import HEADERS, Console, Visit
from serve_app.contracts.offers import Front

#: Purpose of each identifier, for which its backends are chosen, and further uses or the guide for them.
PURPOSES: Final[Mapping[str, Mapping[str, str]]] = {
    "svc-chat": {
        "purpose": "Conversation and general text",
        "more": "Also translation, data analysis and creative writing",
    },
    "svc-coder": {
        "purpose": "Programming and mathematics",
        "more": "Settings for codex, Claude Code, opencode and aider",
        "guide": "/docs/guides/clients#coding-agents",
    },
}


def landing(console: Console, facts: Front) -> tuple[bytes, dict[str, str]]:
    """Returns the page and its headers."""
    address = urlsplit(facts.base)
    scope = {"type": "http", "method": "GET", "path": f"{facts.root}/", "root_path": facts.root, "query_string": b""}
    headers = [(b"host", address.netloc.encode()), (b"x-forwarded-proto", address.scheme.encode())]
    visit = Visit(console, Request(scope | {"headers": headers}), token="")  # a page for everyone: no form, no session
    page = visit.page(
        "landing.html",
        facts=facts,
        base=f"{facts.base}/v1",
        key="YOUR_KEY",
        model=_model(facts),
        purposes=PURPOSES,
        company=console.seller.name,
    )
    return bytes(page.body), HEADERS | {"content-type": "text/html; charset=utf-8", "cache-control": "no-cache"}


def _model(facts: Front) -> str:
    return facts.offers[0].identifier if facts.offers else "MODEL"
