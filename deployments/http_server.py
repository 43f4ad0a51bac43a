"""Corrects three things in Serve's HTTP server: invalid request ids, streams over HTTP/1.0, and slow accepts."""

from __future__ import annotations

import socket
from typing import Any, Final

import uvicorn
from ray.serve._private import http_util
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http import httptools_impl

from serve_app.gateway.web import with_request_id

ACCEPTED: Final = 8  # maximum connections that one iteration of the event loop accepts


class KeptRequestIds(http_util.RequestIdMiddleware):
    """Serve's middleware, with a valid request id. Serve would return an empty, long or non-ASCII id unchanged."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope if scope["type"] == "lifespan" else with_request_id(scope), receive, send)


class UnchunkedBefore11(httptools_impl.RequestResponseCycle):
    """uvicorn's response. Over HTTP/1.0, closing the connection ends a body without a length (RFC 9112, section 6.1).

    uvicorn would send it in chunks, and an HTTP/1.0 client would read the chunk headers as part of the body.
    """

    async def send(self, message: Any) -> None:
        if self.scope["http_version"] == "1.0":
            if message["type"] == "http.response.start":
                self._ends_with_connection = all(name.lower() != b"content-length" for name, _ in message["headers"])
                if self._ends_with_connection:
                    self.chunked_encoding = False
            elif self._ends_with_connection:
                self.expected_content_length = len(message.get("body", b""))  # of this piece: uvicorn counts it down
        await super().send(message)


class AcceptsSeveral(uvicorn.Server):
    """uvicorn's server. libuv accepts one connection of a socket in each iteration of the event loop.

    An iteration takes some milliseconds under load, so new connections would wait for seconds, while requests on open
    connections overtake them. So this server listens on ACCEPTED copies of the socket, and libuv accepts one connection
    from each.
    """

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        given = sockets or []
        await super().serve([*given, *(one.dup() for one in given for _ in range(ACCEPTED - 1))] or None)


def amend_http_server() -> None:
    """Installs the corrections. Call this in an ingress's constructor: Serve starts its HTTP server afterwards."""
    http_util.RequestIdMiddleware = KeptRequestIds
    uvicorn.Server = AcceptsSeveral  # type: ignore[misc]
    httptools_impl.RequestResponseCycle = UnchunkedBefore11  # type: ignore[misc]
