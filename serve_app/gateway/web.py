"""The HTTP parts that every endpoint needs: headers, limited bodies, JSON errors, and clients that hang up."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from math import ceil
from types import MappingProxyType
from typing import Any, Final

from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api import errors
from serve_app.api.door import Door
from serve_app.api.doors import MESSAGES_PATHS, door_at
from serve_app.api.errors import ApiError
from serve_app.api.token_door import TokenDoor
from serve_app.api.unknown_paths import unknown_path
from serve_app.contracts.limiting import Window

logger = logging.getLogger("ray.serve")

BODY_TIMEOUT_S: Final = 30.0
GRACE_S: Final = 5.0
MIN_RATE: Final = 2048  # bytes per second of a body
LISTEN_S: Final = 0.1  # time to read the part of a late body that arrived while this process was busy
SMALL_BODY: Final = 64 * 1024  # bytes of each body that `Bodies` does not count
MAX_BODIES_PER_KEY: Final = 256  # incomplete bodies of a slow sender; others may have four times as many
MAX_BODIES: Final = 1600  # incomplete bodies of all senders: Serve accepts 2,000 requests, health probes included
MOMENT_S: Final = 1.0  # a sender whose oldest body is incomplete for longer than this is slow
LATE_S: Final = 1.0  # time to identify the key after an error in the body: a wrong key is reported first
STALLED_S: Final = 120.0  # a client that reads nothing for this time counts as disconnected
_REQUEST_ID: Final = re.compile(r"[!-~](?:[ -~]{0,126}[!-~])?")
_METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")

Headers = list[tuple[bytes, bytes]]


class ClientGone(Exception):
    """The client has closed the connection."""


def error_response(
    error: ApiError,
    headers: Mapping[str, str] = MappingProxyType({}),
    door: Door | TokenDoor | None = None,
    request_id: str = "",
) -> JSONResponse:
    """Returns the error as JSON, in the format of a door. Without one, the format is chat's."""
    error.request_id = error.request_id or request_id
    own = {**headers, **error.headers}
    return (
        JSONResponse(error.body(), error.status, own)
        if door is None
        else JSONResponse(door.error_body(error), door.status(error), own)
    )


def api_error_response(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


def http_error_response(request: Request, error: Exception) -> Response:
    """Returns the JSON error for an exception that the framework raised."""
    assert isinstance(error, HTTPException)
    path, request_id = request.url.path, getattr(request.state, "request_id", "")
    if error.status_code == 405:
        return _error_at(path, errors.method_not_allowed(request.method, path, _methods(request)), request_id)
    if error.status_code == 404:
        return error_response(unknown_path(request.method, path, request.app.state.methods))
    return _error_at(path, errors.server_error(), request_id)


def _error_at(path: str, error: ApiError, request_id: str = "") -> JSONResponse:
    """Returns the error in the format of the door at the path, if there is one."""
    return error_response(error, door=door_at(path), request_id=request_id)


def _methods(request: Request) -> set[str]:
    """Returns the methods of a path. The router names only those of the first route that matches."""
    if door_at(request.url.path) is not None:
        return {"POST"}
    routes = request.app.router.routes
    return {
        method
        for method in _METHODS
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in routes)
    }


class DoorRoute(Route):
    """Matches every method at its path, and answers 405 to all but its own.

    Otherwise, `GET /responses/input_tokens` would match the route that looks up a stored response.
    """

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        return (match if match is Match.NONE else Match.FULL), child


class RequestContext:
    """Middleware: sets the request id on every response, and turns an unexpected exception into the API's 500.

    Without `tag_responses`, only web sockets get the id here, because the server sets it on all other responses.
    """

    def __init__(self, app: ASGIApp, tag_responses: bool = True) -> None:
        self._app = app
        self._tag_responses = tag_responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # This is plain ASGI, because a middleware that buffers would delay streams.
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(scope)
        scope.setdefault("state", {})["request_id"] = request_id  # as `request.state.request_id`, for the audit log
        started = False

        async def send_tagged(message: Message) -> None:
            nonlocal started
            starts = message["type"] in ("http.response.start", "websocket.http.response.start")
            started = started or starts
            if starts and message["status"] >= 400 and not scope["state"].get("identified") and _has_body(scope):
                # Closes the connection instead of waiting for the rest of an unidentified sender's body.
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            if starts and scope["path"] in MESSAGES_PATHS:
                message["headers"] = [*message["headers"], (b"request-id", request_id.encode("latin-1"))]
            if starts and (self._tag_responses or scope["type"] == "websocket"):
                kept = [pair for pair in message["headers"] if pair[0].lower() != b"x-request-id"]
                message["headers"] = [*kept, (b"x-request-id", request_id.encode("latin-1"))]
            await send(message)

        try:
            if scope["type"] == "websocket":
                await receive()  # takes the client's request to connect
                refusal = error_response(errors.not_found("there are no web sockets here: use HTTP"))
                await refusal(scope, receive, send_tagged)
                return
            await self._app(scope, receive, send_tagged)
        except ClientGone:
            logger.info("the client of request %s disconnected", json.dumps(request_id))
        except Exception:
            logger.exception("request %s failed", json.dumps(request_id))
            if not started:
                await _error_at(scope["path"], errors.server_error(), request_id)(scope, receive, send_tagged)


def _has_body(scope: Scope) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
        for name, value in scope["headers"]
    )


class Bodies:
    """The bodies that are being read and parsed now, limited by sender and in total.

    A single client can exhaust neither memory nor request slots: only its own requests are refused. The first
    SMALL_BODY bytes of each body do not count. A request of ordinary size is therefore never refused because of other
    bodies' bytes.
    """

    def __init__(self) -> None:
        self.size = 0  # bytes of all bodies, without the first SMALL_BODY of each
        self.count = 0
        self._shares: dict[str, list[Share]] = {}

    def of_sender(self, sender: str) -> list[Share]:
        """Returns the sender's bodies."""
        return self._shares.get(sender, [])

    def begin(self, share: Share) -> None:
        mine = self._shares.setdefault(share.sender, [])
        # In a burst of requests, most bodies are incomplete for a moment. The limit is therefore four times as high for
        # a sender that is not slow.
        is_slow = bool(mine) and share.began - mine[0].began > MOMENT_S
        if len(mine) >= MAX_BODIES_PER_KEY * (1 if is_slow else 4):
            raise errors.too_many_bodies("Too many of your request bodies are incomplete. Finish sending them first.")
        if self.count >= MAX_BODIES:
            raise errors.overloaded("Too many bodies are incomplete. Try again.", retry_after_s=1)
        mine.append(share)
        self.count += 1

    def end(self, share: Share) -> None:
        mine = self._shares[share.sender]
        mine.remove(share)
        self.count -= 1
        self.size -= share.size
        if not mine:
            del self._shares[share.sender]


class Share:
    """One body's part of `bodies`, for the duration of a `with` block.

    `most` is the maximum number of bytes of all bodies together, `most_of_sender` that of one sender's bodies.
    """

    def __init__(self, bodies: Bodies, sender: str, most: int, most_of_sender: int) -> None:
        self.sender = sender
        self.size = 0
        self.began = time.monotonic()
        self._bodies = bodies
        self._most = most
        self._most_of_sender = most_of_sender

    def __enter__(self) -> Share:
        self._bodies.begin(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._bodies.end(self)

    def grow(self, size: int) -> None:
        """Counts the body's bytes, which are now `size`.

        Raises ApiError: 429 when the sender has too many bytes, 503 when all senders together have too many.
        """
        more = size - SMALL_BODY - self.size
        if more <= 0:
            return
        bodies = self._bodies
        if sum(share.size for share in bodies.of_sender(self.sender)) + more > self._most_of_sender:
            message = "Too many of your large request bodies are being read. Send them one after another."
            raise errors.too_many_bodies(message)
        if bodies.size + more > self._most:
            raise errors.overloaded("Too many large bodies are being read. Try again.", retry_after_s=1)
        self.size += more
        bodies.size += more


class BodyReader:
    """Reads the body of one request, and refuses it as soon as it is known to be too long, compressed or too slow.

    The server reads and ignores the rest of a refused body, so the client sees the refusal. A body is too slow when it
    is not complete after `timeout_s` seconds, or after GRACE_S plus one second for each MIN_RATE bytes received.
    """

    def __init__(self, request: Request, most: int, timeout_s: float = BODY_TIMEOUT_S) -> None:
        self._request = request
        self._most = most
        self._timeout_s = timeout_s
        self._began = asyncio.get_running_loop().time()
        self._body = bytearray()
        self._has_more = True

    async def read(self, share: Share | None = None) -> bytes:
        """Returns the whole body. A call that was cancelled can be repeated, and continues where the first stopped.

        Raises:
            ApiError: 400 when it is too long or compressed, 408 when it is too slow, 429 and 503 from `share`.
            ClientGone: the client hung up before the end of the body.
        """
        self._check_head()
        if len(self._body) > self._most:  # an earlier call refused it
            raise errors.body_too_large(self._most)
        loop = asyncio.get_running_loop()
        late_since = self._began + self._allowed_s()
        try:
            async with asyncio.timeout_at(late_since) as limit:
                while self._has_more:
                    await self._receive(share)
                    if (allowed_until := self._began + self._allowed_s()) > late_since:
                        late_since = allowed_until
                        limit.reschedule(late_since)
        except TimeoutError:
            try:
                # If this process was too busy to read in time, the client gets the time of that delay in addition.
                async with asyncio.timeout(LISTEN_S + loop.time() - late_since):
                    while self._has_more:
                        await self._receive(share)
            except TimeoutError:
                raise errors.body_timeout(self._allowed_s()) from None
        if share is not None:
            share.grow(len(self._body))  # includes the bytes that were read earlier for another share
        return bytes(self._body)

    async def _receive(self, share: Share | None) -> None:
        message = await self._request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        self._body += message.get("body", b"")
        self._has_more = message.get("more_body", False)
        if len(self._body) > self._most:
            raise errors.body_too_large(self._most)
        if share is not None:
            share.grow(len(self._body))

    async def read_while(self, work: Coroutine[Any, Any, Any], share: Share) -> None:
        """Reads the body until `work` is done. Serve buffers what a client sends, so a body must not be left unread.

        An error of the body is raised only if `work` is not done LATE_S later. Otherwise the next `read` raises it.
        Raises ClientGone as soon as the client hangs up.
        """
        working, reading = asyncio.ensure_future(work), asyncio.ensure_future(self._read_and_watch(share))
        try:
            await asyncio.wait([working, reading], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                if isinstance(reading.exception(), ApiError):
                    await asyncio.wait([working], timeout=LATE_S)
                if not working.done():
                    reading.result()
            await working
        finally:
            for task in (working, reading):
                task.cancel()
            await asyncio.wait([working, reading])
            if not reading.cancelled():
                reading.exception()  # the next `read` raises it again

    async def _read_and_watch(self, share: Share) -> None:
        await self.read(share)
        await _disconnected(self._request.receive)
        raise ClientGone

    def _check_head(self) -> None:
        headers = self._request.headers
        encoding = headers.get("content-encoding", "").strip().lower()
        if encoding not in ("", "identity"):
            raise errors.body_encoded(encoding)
        declared = headers.get("content-length", "")
        if declared.isdecimal() and (len(declared) > 18 or int(declared) > self._most):
            raise errors.body_too_large(self._most)

    def _allowed_s(self) -> float:
        return min(self._timeout_s, GRACE_S + len(self._body) // MIN_RATE)


class Sender:
    """Sends one response and knows whether it has begun. Raises ClientGone when the client stops reading.

    One timer watches the whole response, because a timeout for each message would cost more than sending the message.
    `close` ends the timer.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None  # start of the message that is being sent
        self._sending: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_stalled = False

    async def send_message(self, message: Any) -> None:
        self.started = True
        if self._timer is None:
            self._timer = self._loop.call_later(STALLED_S, self._check_stall)
        self._since, self._sending = self._loop.time(), asyncio.current_task(self._loop)
        try:
            await self._send(message)
        except OSError:  # the server raises it when the connection is closed
            raise ClientGone from None
        except asyncio.CancelledError:
            if self._is_stalled and self._sending is not None and not self._sending.uncancel():
                raise ClientGone from None
            raise
        finally:
            self._since = None

    def _check_stall(self) -> None:
        self._timer = None
        if self._since is None:
            return  # the next message starts the timer again
        if (left_s := self._since + STALLED_S - self._loop.time()) > 0:
            self._timer = self._loop.call_later(left_s, self._check_stall)
        elif self._sending is not None:
            self._is_stalled = True
            self._sending.cancel()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def write_piece(self, data: bytes, make_headers: Callable[[], Headers], *, more: bool = True) -> None:
        """Sends a piece of a 200 reply.

        The headers are sent with the first piece and not earlier. Until then a failure can still have its proper
        status.
        """
        if not self.started:
            await self.send_message({"type": "http.response.start", "status": 200, "headers": make_headers()})
        await self.send_message({"type": "http.response.body", "body": data, "more_body": more})


async def until_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work`. If the client hangs up first, cancels it, waits for its clean-up and raises ClientGone."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait([task, watch], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()  # marks it as retrieved: there is no client to send it to
            raise ClientGone
        await task
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def request_id_of(scope: Scope) -> str:
    """Returns the caller's `x-request-id` if it is 1 to 128 characters of printable ASCII, else a new id.

    The id is for finding a request in logs. It is not unique, because a caller may send the same id repeatedly.
    Admission and billing use an id that the service generates.
    """
    incoming = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
    return incoming if _REQUEST_ID.fullmatch(incoming) else f"req_{uuid.uuid4().hex}"


def with_request_id(scope: Scope) -> Scope:
    """Returns the scope with `request_id_of` as its only `x-request-id`, for a server that copies this header."""
    others = [pair for pair in scope["headers"] if pair[0] != b"x-request-id"]
    return {**scope, "headers": [*others, (b"x-request-id", request_id_of(scope).encode())]}


def rate_limit_headers(requests: Window | None, tokens: Window | None) -> dict[str, str]:
    """Returns `x-ratelimit-{limit,remaining,reset}-{requests,tokens}`; none if the limiter has sent no windows."""
    if requests is None or tokens is None:
        return {}
    found = {}
    for name, window in (("requests", requests), ("tokens", tokens)):
        found[f"x-ratelimit-limit-{name}"] = str(window.limit)
        found[f"x-ratelimit-remaining-{name}"] = str(max(0, window.remaining))
        found[f"x-ratelimit-reset-{name}"] = duration(window.reset_s)
    return found


def duration(seconds: float) -> str:
    """Formats seconds for client libraries, rounded up to a millisecond: "20ms", "1.5s", "6m0s", "1h0m0s"."""
    ms = max(0, ceil(round(seconds * 1000, 3)))
    if ms == 0:
        return "0s"
    if ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    rest = f"{ms / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if hours:
        return f"{hours}h{minutes}m{rest}"
    return f"{minutes}m{rest}" if minutes else rest


def server_timing(**seconds: float | None) -> str:
    """Formats `server-timing` (W3C Server Timing): the name of each step and its duration in ms.

    The durations are given in seconds. A step with None has no duration yet and is left out.
    """
    return ", ".join(f"{name};dur={max(0.0, value) * 1000:.1f}" for name, value in seconds.items() if value is not None)
