"""Replaces request ids that the service does not keep before Serve repeats them in its responses."""

from __future__ import annotations

from ray.serve._private import http_util
from starlette.types import Receive, Scope, Send

from serve_app.gateway.web import with_request_id


class KeptRequestIds(http_util.RequestIdMiddleware):  # type: ignore[misc]
    """Serve's middleware. It would return an empty, endless or non-ASCII id as it came, while the log has another."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope if scope["type"] == "lifespan" else with_request_id(scope), receive, send)


def keep_request_ids() -> None:
    """Call this in an ingress's constructor. Serve starts its HTTP server, with the middleware, after that."""
    http_util.RequestIdMiddleware = KeptRequestIds
