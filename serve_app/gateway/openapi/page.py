"""The routes `/openapi.json` and `/docs`. Nothing of them comes from another host, so they work offline."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Final

from fastapi import APIRouter
from fastapi.responses import FileResponse, Response

from serve_app.gateway.catalogue import Catalogue
from serve_app.gateway.openapi.document import build_document

# Swagger UI sets styles from scripts and has its icons in data: addresses.
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

# All addresses are relative: the page is the same under `/` and under `/v1`.
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
<div id="docs"><noscript>This page needs JavaScript. The same as JSON: <a href="openapi.json">openapi.json</a>.\
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


def documentation_router(catalogue: Callable[[], Catalogue]) -> APIRouter:
    """The document of whatever `catalogue` gives, and a page to read it on. No key is needed."""
    router = APIRouter()
    document = _Document(catalogue)
    folder = _assets_folder()

    @router.get("/openapi.json")
    async def openapi() -> Response:
        return Response(document.read(), media_type="application/json", headers={"cache-control": "no-cache"})

    @router.get("/docs")
    async def page() -> Response:
        return Response(_PAGE, media_type="text/html", headers=_SAFE)

    @router.get("/docs/start.js")
    async def start() -> Response:
        return Response(_START, media_type="text/javascript", headers=_SAFE)

    def serve(name: str) -> None:
        @router.get(f"/docs/{name}")
        async def asset() -> Response:
            return FileResponse(folder / name, headers=_SAFE | {"cache-control": "max-age=86400"})

    for name in _ASSETS:
        serve(name)
    return router


class _Document:
    """The document's bytes, made anew only when the catalogue has changed."""

    def __init__(self, catalogue: Callable[[], Catalogue]) -> None:
        self._catalogue = catalogue
        self._of: Catalogue | None = None
        self._bytes = b""

    def read(self) -> bytes:
        catalogue = self._catalogue()
        if catalogue is not self._of:
            models = {name: catalogue[name] for name in catalogue.identifiers}
            self._bytes = json.dumps(build_document(models), ensure_ascii=False, separators=(",", ":")).encode()
            self._of = catalogue
        return self._bytes


def _assets_folder() -> Path:
    """Where the package `fastapi-offline` keeps Swagger UI. It is not imported: only its files are of use."""
    found = importlib.util.find_spec("fastapi_offline")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "static"
