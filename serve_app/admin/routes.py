"""All routes of this package: the declared endpoints, and the documents that describe them.

`/docs` and `/openapi.json` are for customers and need no key. `/admin/openapi.json` has the operators' part as well,
and needs the operator key. The console shows the operators' part. The pages load nothing from other hosts, so they
work offline.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import mimetypes
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Final, NamedTuple

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, Response
from starlette.convertors import PathConvertor, register_url_convertor

from serve_app.admin.docs_pages import LOOK, VIEWER, guide_page, look_file, reference_page
from serve_app.admin.document import ENDPOINTS, build_document, customer_document, operator_document
from serve_app.admin.endpoint import AdminServices, Endpoint
from serve_app.admin.guides import GUIDES, guide
from serve_app.admin.values import Schema
from serve_app.api import errors
from serve_app.gateway.backends import Catalogue
from serve_app.gateway.front import address_of, brand_style, icon

# The viewer, Redoc, sets styles from scripts, embeds icons as data: URLs, and runs its search in a blob: URL worker.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; worker-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SECURITY_HEADERS: Final = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_CACHED_AN_HOUR: Final = {"cache-control": "max-age=3600"}
_CACHED_A_DAY: Final = {"cache-control": "max-age=86400"}
_CACHED_FOREVER: Final = {"cache-control": "public, max-age=31536000, immutable"}


class _ModelName(PathConvertor):
    """A model's name in a path. An alias may have slashes."""

    regex = "[^/].*"


register_url_convertor("model", _ModelName())


def admin_router(admin: AdminServices) -> APIRouter:
    """Returns a router with the declared endpoints and their documentation."""
    router = APIRouter()
    for endpoint in ENDPOINTS:
        path = endpoint.path.replace("{request_id}", "{request_id:path}")  # a client's request id may have slashes
        if path == "/models/{id}":
            path = "/models/{id:model}"
        router.add_api_route(path, _responder(endpoint, admin), methods=[endpoint.method], response_model=None)

    @router.get("/openapi.json")
    async def docs_document(request: Request) -> Response:
        encoded = encoded_documents(admin.catalogue()).customers
        return _packed(request, encoded, _compressed(encoded), "application/json", {"cache-control": "no-cache"})

    @router.get("/admin/openapi.json")
    async def operators_document(request: Request) -> Response:
        admin.authenticator.check_operator(request)
        encoded = encoded_documents(admin.catalogue()).whole
        return Response(encoded, media_type="application/json", headers={"cache-control": "no-store"})

    @router.get("/docs")
    async def docs_page(request: Request) -> Response:
        page = reference_page(admin.brand, admin.console(), address_of(request))
        return Response(page, media_type="text/html", headers=_SECURITY_HEADERS)

    @router.get("/docs/guides/{name}")
    async def docs_guide(request: Request, name: str) -> Response:
        made = guide(name, address_of(request))
        if made is None:
            raise errors.not_found(f"there is no guide {name[:60]!r}: GET /docs lists them")
        page = guide_page(GUIDES[name][1], *made, admin.brand, admin.console())
        return Response(page, media_type="text/html", headers=_SECURITY_HEADERS)

    @router.get("/docs/brand.css")
    async def docs_brand() -> Response:
        return Response(
            brand_style(admin.brand.accent), media_type="text/css", headers=_SECURITY_HEADERS | _CACHED_AN_HOUR
        )

    @router.get("/docs/logo")
    async def docs_logo() -> Response:
        if admin.brand.logo is None:
            raise errors.not_found("there is no logo")
        return FileResponse(admin.brand.logo, headers=_SECURITY_HEADERS | _CACHED_AN_HOUR)

    for name in LOOK:
        router.add_api_route(f"/docs/{name}", _look(name), methods=["GET"], response_model=None)
    router.add_api_route("/docs/favicon.ico", icon, methods=["GET"], response_model=None)
    return router


def _responder(endpoint: Endpoint, admin: AdminServices) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        return await endpoint.respond(admin, request)

    return respond


def _look(name: str) -> Callable[[Request], Awaitable[Response]]:
    media_type = "font/woff2" if name.endswith(".woff2") else mimetypes.guess_type(name)[0]

    async def send(request: Request) -> Response:
        content, compressed = await asyncio.to_thread(look_file, name)  # compressing the viewer takes 0.1 s
        kept = _CACHED_FOREVER if name.endswith(".woff2") else _CACHED_A_DAY if name == VIEWER else _CACHED_AN_HOUR
        headers = _SECURITY_HEADERS | kept
        return _packed(request, content, compressed, media_type, headers)

    return send


def _packed(
    request: Request, content: bytes, compressed: bytes | None, media_type: str | None, headers: dict[str, str]
) -> Response:
    """Returns the compressed content, if there is one, to a client that accepts it."""
    headers = headers | {"vary": "accept-encoding"}
    if compressed is None or "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(content, media_type=media_type, headers=headers)
    return Response(compressed, media_type=media_type, headers=headers | {"content-encoding": "gzip"})


@lru_cache(maxsize=1)
def _compressed(document: bytes) -> bytes:
    return gzip.compress(document, mtime=0)


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
