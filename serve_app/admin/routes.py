"""All routes of this package: the declared endpoints, and `/openapi.json` and `/docs`, which describe them.

The page loads nothing from a different host, so it works offline.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Awaitable, Callable
from functools import lru_cache
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, Response
from starlette.convertors import PathConvertor, register_url_convertor

from serve_app.admin.document import ENDPOINTS, build_document
from serve_app.admin.endpoint import AdminServices, Endpoint
from serve_app.gateway.backends import Catalogue

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
_ASSETS: Final = ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png")

# All URLs are relative: the page is the same under `/` and under `/v1`.
_PAGE: Final = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>serve-app API</title>
<link rel="icon" href="docs/favicon.png">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="docs"><noscript>This page needs JavaScript. Read <a href="openapi.json">openapi.json</a> instead.\
</noscript></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
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
        encoded = _encoded_document(admin.catalogue())
        return Response(encoded, media_type="application/json", headers={"cache-control": "no-cache"})

    @router.get("/docs")
    async def docs_page() -> Response:
        return Response(_PAGE, media_type="text/html", headers=_SAFE)

    @router.get("/docs/start.js")
    async def docs_script() -> Response:
        return Response(_START, media_type="text/javascript", headers=_SAFE)

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


@lru_cache(maxsize=1)
def _encoded_document(catalogue: Catalogue) -> bytes:
    """Returns the encoded document, cached until the catalogue changes."""
    models = {name: catalogue[name] for name in catalogue.identifiers}
    return json.dumps(build_document(models), ensure_ascii=False, separators=(",", ":")).encode()


def _assets_folder() -> Path:
    """Returns the folder of Swagger UI in the package `fastapi-offline`. Only its files are used, not its code."""
    package = importlib.util.find_spec("fastapi_offline")
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).parent / "static"
