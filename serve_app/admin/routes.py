"""All routes of this package: the declared endpoints, and the documents that describe them.

`/docs` and `/openapi.json` are for customers and need no key. `/admin/openapi.json` has the operators' part as well,
and needs the operator key. The console shows operators their part. The pages load nothing from a different host, so
they work offline.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Awaitable, Callable
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, Response
from starlette.convertors import PathConvertor, register_url_convertor

from serve_app.admin.document import ENDPOINTS, build_document, customer_document, operator_document
from serve_app.admin.endpoint import AdminServices, Endpoint
from serve_app.admin.guides import GUIDES, STYLE, guide, navigation
from serve_app.admin.values import Schema
from serve_app.api import errors
from serve_app.gateway.backends import Catalogue
from serve_app.gateway.front import address_of, icon

# Swagger UI sets styles from scripts and embeds its icons as data: URLs.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SAFE: Final = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_ASSETS: Final = ("swagger-ui-bundle.js", "swagger-ui.css")

# URLs are relative: the pages are the same under `/` and under `/v1`.
_HEAD: Final = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="{docs}/favicon.ico">
<link rel="stylesheet" href="{docs}/page.css">
"""
_PAGE: Final = """\
{head}<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
{navigation}
<main>
<h1 class="hidden">API reference</h1>
<div id="docs"><noscript>This page needs JavaScript. Read <a href="openapi.json">openapi.json</a> instead.\
</noscript></div>
</main>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
_GUIDE: Final = """\
{head}</head>
<body>
{navigation}
<main class="guide">
{content}</main>
</body>
</html>
"""
# `validatorUrl` would send the document to Swagger's own site.
_START: Final = """\
window.ui = SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#docs",
  deepLinking: true,
  defaultModelsExpandDepth: 0,
  displayRequestDuration: true,
  validatorUrl: null,
});
"""


class _ModelName(PathConvertor):
    """A model's name in a path. An alias may have slashes."""

    regex = "[^/].*"


register_url_convertor("model", _ModelName())


def admin_router(admin: AdminServices) -> APIRouter:
    """Returns the operator's and the account holder's endpoints, and their documentation, which needs no key."""
    router = APIRouter()
    for endpoint in ENDPOINTS:
        path = endpoint.path.replace("{request_id}", "{request_id:path}")  # a client's request id may have slashes
        if path == "/models/{id}":
            path = "/models/{id:model}"
        router.add_api_route(path, _responder(endpoint, admin), methods=[endpoint.method], response_model=None)

    @router.get("/openapi.json")
    async def docs_document() -> Response:
        encoded = encoded_documents(admin.catalogue()).customers
        return Response(encoded, media_type="application/json", headers={"cache-control": "no-cache"})

    @router.get("/admin/openapi.json")
    async def operators_document(request: Request) -> Response:
        admin.authenticator.check_operator(request)
        encoded = encoded_documents(admin.catalogue()).whole
        return Response(encoded, media_type="application/json", headers={"cache-control": "no-store"})

    @router.get("/docs")
    async def docs_page() -> Response:
        head = _HEAD.format(title="API reference", docs="docs")
        page = _PAGE.format(head=head, navigation=navigation("", "API reference"))
        return Response(page, media_type="text/html", headers=_SAFE)

    @router.get("/docs/guides/{name}")
    async def docs_guide(request: Request, name: str) -> Response:
        content = guide(name, address_of(request))
        if content is None:
            raise errors.not_found(f"there is no guide {name[:60]!r}: GET /docs lists them")
        title = GUIDES[name][1]
        page = _GUIDE.format(
            head=_HEAD.format(title=title, docs=".."), navigation=navigation("../../", title), content=content
        )
        return Response(page, media_type="text/html", headers=_SAFE)

    @router.get("/docs/page.css")
    async def docs_style() -> Response:
        return Response(STYLE, media_type="text/css", headers=_SAFE | {"cache-control": "max-age=3600"})

    @router.get("/docs/start.js")
    async def docs_script() -> Response:
        return Response(_START, media_type="text/javascript", headers=_SAFE)

    router.add_api_route("/docs/favicon.ico", icon, methods=["GET"], response_model=None)
    for name in _ASSETS:
        router.add_api_route(f"/docs/{name}", _file(_assets_folder() / name), methods=["GET"], response_model=None)
    return router


def _responder(endpoint: Endpoint, admin: AdminServices) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        return await endpoint.respond(admin, request)

    return respond


def _file(path: Path) -> Callable[[], Awaitable[Response]]:
    async def file() -> Response:
        return FileResponse(path, headers=_SAFE | {"cache-control": "max-age=86400"})

    return file


class Documents(NamedTuple):
    """The encoded document: the part for customers, the part for operators, and both."""

    customers: bytes
    operators: bytes
    whole: bytes


@lru_cache(maxsize=1)
def encoded_documents(catalogue: Catalogue) -> Documents:
    """Returns the encoded documents, cached until the catalogue changes."""
    whole = build_document({name: catalogue[name] for name in catalogue.identifiers})
    return Documents(*map(_encoded, (customer_document(whole), operator_document(whole), whole)))


def _encoded(document: Schema) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def _assets_folder() -> Path:
    """Returns the folder of Swagger UI in the package `fastapi-offline`. Only its files are used, not its code."""
    package = importlib.util.find_spec("fastapi_offline")
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).parent / "static"
