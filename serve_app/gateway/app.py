"""The HTTP surface: routes under both base forms, JSON errors everywhere, a request id on every response."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any, Final

from fastapi import APIRouter, FastAPI, Path, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app import __version__
from serve_app.api import ApiError, balance_body, errors, headers, model_body, model_list, usage_body
from serve_app.gateway.admin import admin_router
from serve_app.gateway.catalogue import system_fingerprint
from serve_app.gateway.exchange import ClientGone, Services
from serve_app.gateway.identity import Authenticator
from serve_app.gateway.openapi import documentation_router
from serve_app.gateway.operations import Operations
from serve_app.gateway.ports import BackendUnavailable
from serve_app.gateway.replies import ChatReply, error_response
from serve_app.ledger.money import format_amount

_METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")

logger = logging.getLogger("ray.serve")

Lifespan = Callable[[], Awaitable[None]]


def build_app(
    services: Services,
    authenticator: Authenticator,
    operations: Operations,
    *,
    on_start: Lifespan | None = None,
    on_stop: Lifespan | None = None,
    tag_responses: bool = True,
) -> FastAPI:
    """The ASGI application of one gateway process.

    With `tag_responses` every response carries `x-request-id`; a server that sets it itself wants it off.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> Any:
        if on_start is not None:
            await on_start()
        yield
        if on_stop is not None:
            await on_stop()

    # A redirect would be no JSON, and behind a TLS ingress it would send the key over plain HTTP.
    app = FastAPI(title="serve-app", lifespan=lifespan, openapi_url=None, redirect_slashes=False)

    async def chat_completions(request: Request) -> Response:
        return ChatReply(services, authenticator, request)

    # A plain route before all others: this one is hot, and there is nothing in it for FastAPI to parse or to match.
    for prefix in ("/v1", ""):
        app.add_route(f"{prefix}/chat/completions", chat_completions, methods=["POST"])
    public = public_router(services, authenticator, operations)
    admin = admin_router(authenticator, operations)
    documentation = documentation_router(lambda: services.catalogue)
    for prefix in ("", "/v1"):
        app.include_router(documentation, prefix=prefix)
        app.include_router(public, prefix=prefix)
        app.include_router(admin, prefix=prefix)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(RequestContext, tag_responses=tag_responses)
    return app


def public_router(services: Services, authenticator: Authenticator, operations: Operations) -> APIRouter:
    """What API keys open, and the two health endpoints."""
    router = APIRouter()

    @router.get("/models")
    async def models(request: Request) -> JSONResponse:
        await authenticator.caller(request).identify()
        shown = await asyncio.gather(*(describe(services, name) for name in services.catalogue.identifiers))
        return JSONResponse(model_list(shown))

    @router.get("/models/{id}")
    async def model(request: Request, identifier: Annotated[str, Path(alias="id")]) -> JSONResponse:
        await authenticator.caller(request).identify()
        if identifier not in services.catalogue:
            raise errors.not_found(
                f"the model {identifier!r} does not exist; served are {', '.join(services.catalogue.identifiers)}"
            )
        return JSONResponse(await describe(services, identifier))

    @router.get("/user/balance")
    async def balance(request: Request) -> JSONResponse:
        identity = await authenticator.caller(request).identify()
        account = await operations.account(identity.account_id)
        total = account.available(operations.now())  # without grants that have expired
        return JSONResponse(
            balance_body(
                available=total > 0,
                currency=account.currency,
                total=format_amount(total),
                granted=format_amount(total - account.topped_up),
                topped_up=format_amount(account.topped_up),
            )
        )

    @router.get("/user/usage")
    async def usage(request: Request) -> JSONResponse:
        identity = await authenticator.caller(request).identify()
        query = request.query_params
        rows = await operations.usage(
            account=identity.account_id,
            day_from=query.get("from"),
            day_to=query.get("to"),
            group_by=query.get("group_by") or "day",
            allowed=("day", "model", "key"),
        )
        return JSONResponse(usage_body(rows))

    @router.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse({"status": "alive", "version": __version__})

    @router.get("/ready")
    async def ready() -> JSONResponse:
        if (disagreement := services.leases.disagreement) is not None:
            raise errors.overloaded(f"nothing is let in: {disagreement}", retry_after_s=2)
        try:
            status = await services.backends.status()
        except BackendUnavailable:
            raise errors.overloaded("the service is starting: try again", retry_after_s=2) from None
        serving = {name: bool(status.get(name, {}).get("replicas")) for name in services.catalogue.backends()}
        if not all(serving.values()):
            missing = ", ".join(name for name, up in serving.items() if not up)
            raise errors.overloaded(f"no replica of {missing} is ready yet: try again", retry_after_s=2)
        return JSONResponse({"status": "ready", "backends": list(serving)})

    return router


async def describe(services: Services, identifier: str) -> dict[str, Any]:
    """One identifier as `/models` shows it. Backends that can't be asked now are left out of its fingerprints."""
    model, backends = services.catalogue[identifier], services.catalogue.behind(identifier)

    async def fingerprint(backend: str) -> str | None:
        try:
            return system_fingerprint(backend, await services.backends.fingerprint(backend))
        except BackendUnavailable:
            return None

    told = await asyncio.gather(*map(fingerprint, backends))
    return model_body(
        identifier,
        context_length=model.context_length,
        max_output_length=model.max_output,
        fingerprints=[one for one in told if one is not None],
    )


def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        return error_response(errors.method_not_allowed(request.method, request.url.path, _methods(request)))
    if error.status_code == 404:
        return error_response(errors.not_found(f"there is no {request.method} {request.url.path}"))
    return error_response(errors.server_error())


def _methods(request: Request) -> set[str]:
    """The methods of a path. The router names only those of the first route that has it."""
    routes = request.app.router.routes
    return {
        method
        for method in _METHODS
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in routes)
    }


class RequestContext:
    """Keeps or makes the request id, sets it on every response, and turns a stray exception into the 500 of the API."""

    def __init__(self, app: ASGIApp, tag_responses: bool = True) -> None:
        self._app = app
        self._tag_responses = tag_responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Plain ASGI: a wrapper that buffers would hold streams back."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        incoming = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = headers.request_id(incoming.decode("latin-1"))
        scope.setdefault("state", {})["request_id"] = request_id  # as `request.state.request_id`, for the audit log
        started = False

        async def tagged(message: Message) -> None:
            nonlocal started
            starts = message["type"] in ("http.response.start", "websocket.http.response.start")
            started = started or starts
            if starts and (self._tag_responses or scope["type"] == "websocket"):  # which no server of ours tags
                kept = [pair for pair in message["headers"] if pair[0].lower() != b"x-request-id"]
                message["headers"] = [*kept, (b"x-request-id", request_id.encode("latin-1"))]
            await send(message)

        try:
            if scope["type"] == "websocket":
                await receive()  # that it wants to connect
                await error_response(errors.not_found("there are no web sockets here: use HTTP"))(
                    scope, receive, tagged
                )
                return
            await self._app(scope, receive, tagged)
        except ClientGone:
            logger.info("the client of request %s is gone", json.dumps(request_id))
        except Exception:
            logger.exception("request %s failed", json.dumps(request_id))
            if not started:
                await error_response(errors.server_error())(scope, receive, tagged)
