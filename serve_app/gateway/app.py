"""Builds the ASGI application of one gateway process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.routing import Route

from serve_app.api.doors import DOORS, TOKEN_DOORS
from serve_app.api.errors import ApiError
from serve_app.api.responses_door import InputTokensDoor, ResponsesDoor
from serve_app.gateway.authentication import Authenticator
from serve_app.gateway.reply_endpoint import IncompleteBodies, ReplyEndpoint
from serve_app.gateway.responses_endpoint import InputTokensEndpoint, ResponsesEndpoint
from serve_app.gateway.services import Services
from serve_app.gateway.token_endpoint import TokenEndpoint, TokenLimits
from serve_app.gateway.web import DoorRoute, RequestContext, api_error_response, http_error_response


def build_app(
    services: Services,
    authenticator: Authenticator,
    routers: Sequence[APIRouter],
    *,
    front: Sequence[Route] = (),
    on_stop: Callable[[], Awaitable[None]] | None = None,
    tag_responses: bool = True,
) -> FastAPI:
    """Builds an application with all doors and `routers` under both base paths, `/` and `/v1`.

    The routes in `front` are added as they are. With `tag_responses` every response carries `x-request-id`. Turn it off
    for a server that sets the header itself.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> Any:
        yield
        if on_stop is not None:
            await on_stop()

    # Redirects are off: they are not JSON, and behind a TLS ingress they would lead to HTTP, so that clients would send
    # their keys unencrypted.
    app = FastAPI(title="serve-app", lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    bodies, limits = IncompleteBodies(), TokenLimits()
    # Plain routes come first: most requests use them, and they need none of FastAPI's parsing.
    for prefix in ("/v1", ""):
        for door in DOORS:
            kind = ResponsesEndpoint if isinstance(door, ResponsesDoor) else ReplyEndpoint
            endpoint = kind(door, services, authenticator, bodies)
            app.router.routes.append(DoorRoute(prefix + door.path, endpoint, methods=["POST"]))
        for token_door in TOKEN_DOORS:
            token_kind = InputTokensEndpoint if isinstance(token_door, InputTokensDoor) else TokenEndpoint
            token_endpoint = token_kind(token_door, services, authenticator, bodies, limits)
            app.router.routes.append(DoorRoute(prefix + token_door.path, token_endpoint, methods=["POST"]))
    app.router.routes.extend(front)
    for prefix in ("", "/v1"):
        for router in routers:
            app.include_router(router, prefix=prefix)
    app.state.methods = _methods_by_path(routers)
    app.add_exception_handler(ApiError, api_error_response)
    app.add_exception_handler(HTTPException, http_error_response)
    app.add_middleware(RequestContext, tag_responses=tag_responses)
    return app


def _methods_by_path(routers: Sequence[APIRouter]) -> dict[str, list[str]]:
    """Returns the methods of each path, without the base path."""
    paths = [*(door.path for door in DOORS), *(door.path for door in TOKEN_DOORS)]
    methods = {path: ["POST"] for path in paths}
    for route in (route for router in routers for route in router.routes if isinstance(route, Route)):
        methods.setdefault(route.path, []).extend(sorted((route.methods or set()) - {"HEAD"}))
    return methods
