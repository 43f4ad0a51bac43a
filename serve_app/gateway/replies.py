"""The chat endpoint as an ASGI response: reads the body, runs the exchange, writes one reply or a stream.

It is one object with one `__call__`, so that every exit, a client that hangs up included, passes through the same
`async with` and nothing is left open between a handler and its response.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from serve_app.api import (
    DONE,
    KEEP_ALIVE,
    LINE_FEED,
    ApiError,
    ChatRequest,
    ChunkEncoder,
    Usage,
    complete_reply,
    errors,
    headers,
    parse_chat_request,
)
from serve_app.engine.request import Finished
from serve_app.gateway.bodies import read_body
from serve_app.gateway.catalogue import Catalogue
from serve_app.gateway.exchange import ClientGone, Exchange, Services
from serve_app.gateway.identity import Authenticator, Caller
from serve_app.gateway.refusals import rate_limit_headers
from serve_app.gateway.retries import Retry
from serve_app.gateway.telling import Chunks, Whole

logger = logging.getLogger("ray.serve")

STALLED_S = 120.0  # a client that takes nothing for so long is gone, whatever its connection says

Headers = list[tuple[bytes, bytes]]


def error_response(error: ApiError) -> JSONResponse:
    """The JSON error with its headers."""
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers)


class ChatReply(Response):
    """Answers POST /chat/completions."""

    def __init__(self, services: Services, authenticator: Authenticator, request: Request) -> None:
        self._services = services
        self._authenticator = authenticator
        self._request = request
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._streamed = False
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Every failure before the first byte of the reply keeps its status."""
        clock = self._services.clock
        came, model, status = clock(), "none", 500
        sender = _Sender(send)
        try:
            caller = self._authenticator.caller(self._request)
            try:
                most = self._services.settings.max_body_bytes
                body = await read_body(self._request, most, self._services.settings.body_timeout_s)
                chat = parse_chat_request(body, served(self._services.catalogue), most)
                # Streams ignore it. OpenAI's SDKs send such a key only where they are told to, but then, like clients
                # that are made by the same generator, with every POST alike: a refusal would take streams from them.
                retry = None if chat.stream else Retry.of(self._request.headers.get("idempotency-key"), body)
            except ApiError:
                # A wrong key is told before a wrong body.
                await caller.identify()
                raise
            model, self._streamed = chat.model, chat.stream
            await until_gone(self._request.receive, self._answer(chat, caller, retry, sender, came))
            status = 200
        except ApiError as error:
            status = error.status
            self._services.metrics.refusal(error.code or error.type)
            await self._fail(error, scope, receive, sender)
        except ClientGone:
            status = 499
        except asyncio.CancelledError:
            status = 499
            raise
        except Exception:
            logger.exception("chat request failed")
            await self._fail(errors.server_error(), scope, receive, sender)
        finally:
            self._services.metrics.request(model, status, clock() - came)

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, sender: _Sender) -> None:
        with contextlib.suppress(ClientGone):
            if not sender.started:
                await error_response(error)(scope, receive, sender.send)
            elif self._streamed:
                await sender.send({"type": "http.response.body", "body": ChunkEncoder.error(error), "more_body": False})
            else:
                # The status has been told already. A server closes the connection of a response that its application
                # leaves without the last chunk, so that no client takes what it has for a whole reply.
                logger.error("the reply %s had begun and is cut: %d %s", self._id, error.status, error.message)

    async def _answer(
        self, chat: ChatRequest, caller: Caller, retry: Retry | None, sender: _Sender, came: float
    ) -> None:
        async with Exchange(self._services, chat, self._id, caller, retry) as exchange:
            await exchange.open()
            if exchange.replayed is not None:
                await self._replay(exchange.replayed, exchange, sender)
            elif chat.stream:
                await self._stream(chat, exchange, sender)
            else:
                await self._whole(chat, exchange, sender, came)

    def _reply_headers(self, exchange: Exchange, content_type: str) -> Headers:
        grant = exchange.grant
        values = {
            "content-type": content_type,
            **(rate_limit_headers(grant.requests, grant.tokens) if grant is not None else {}),
            "server-timing": headers.server_timing(admit=exchange.admitted_s, total=time.time() - exchange.started_at),
        }
        return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in values.items()]

    async def _replay(self, body: bytes, exchange: Exchange, sender: _Sender) -> None:
        """The stored reply of a request that was answered before, byte for byte."""

        def replay_headers() -> Headers:
            own = [(b"idempotency-replayed", b"true"), (b"content-length", str(len(body)).encode())]
            return [*self._reply_headers(exchange, "application/json"), *own]

        await sender.write(body, replay_headers, more=False)

    async def _whole(self, chat: ChatRequest, exchange: Exchange, sender: _Sender, came: float) -> None:
        """A reply that takes long is begun before it is there, with line feeds.

        A load balancer may leave it unread that its client has hung up, but not that it can't write to it any more.
        """
        settings, clock = self._services.settings, self._services.clock
        # HTTP/1.0 has no chunks: it needs the length first, and a client of it could not tell a reply that is cut.
        may_begin = self._request.scope.get("http_version") != "1.0"
        due = came + settings.early_reply_s
        reply = Whole(chat.n)
        while True:
            event = await exchange.next(max(0.0, due - clock()) if may_begin else None)
            if isinstance(event, Finished):
                break
            if event is not None:
                reply.take(event)
            if may_begin and clock() >= due:
                await sender.write(LINE_FEED, lambda: self._reply_headers(exchange, "application/json"))
                due = clock() + settings.line_feed_s
        body = complete_reply(
            id=exchange.request_id,
            created=int(exchange.started_at),
            model=chat.model,
            fingerprint=exchange.fingerprint,
            choices=reply.choices(event.reason, chat.logprobs),
            usage=usage_of(event),
        )
        await exchange.complete(body)

        def with_length() -> Headers:
            return [*self._reply_headers(exchange, "application/json"), (b"content-length", str(len(body)).encode())]

        await sender.write(body, with_length, more=False)

    async def _stream(self, chat: ChatRequest, exchange: Exchange, sender: _Sender) -> None:
        encoder = ChunkEncoder(
            id=exchange.request_id,
            created=int(exchange.started_at),
            model=chat.model,
            fingerprint=exchange.fingerprint,
            include_usage=chat.include_usage,
        )
        keep_alive_s = self._services.settings.keep_alive_s

        def start_headers() -> Headers:
            own = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
            return [*self._reply_headers(exchange, "text/event-stream; charset=utf-8"), *own]

        async def write(data: bytes, more: bool = True) -> None:
            await sender.write(data, start_headers, more=more)

        chunks = Chunks(encoder, chat.n)
        while True:
            event = await exchange.next(keep_alive_s)
            if isinstance(event, Finished):
                break
            await write(KEEP_ALIVE if event is None else chunks.of(event))
        await exchange.complete()
        closing = chunks.end(event.reason)
        if chat.include_usage:
            closing += encoder.usage(usage_of(event))
        await write(closing + DONE, more=False)


class _Sender:
    """Remembers whether the response has begun. Raises ClientGone when the client takes no more."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def send(self, message: Any) -> None:
        self.started = True
        try:
            async with asyncio.timeout(STALLED_S):
                await self._send(message)
        except OSError:  # TimeoutError is one, and so is what servers raise for a connection that is closed
            raise ClientGone from None

    async def write(self, data: bytes, headers: Callable[[], Headers], *, more: bool = True) -> None:
        """Sends a piece of a 200 reply. Raises ClientGone.

        `headers` go before the first piece and not earlier: until then a failure can still have its proper status.
        """
        if not self.started:
            await self.send({"type": "http.response.start", "status": 200, "headers": headers()})
        await self.send({"type": "http.response.body", "body": data, "more_body": more})


async def until_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work`; when the client hangs up first, cancels it, waits for its clean-up and raises ClientGone."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait([task, watch], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()  # whatever it is, there is nobody left to be told
            raise ClientGone
        await task
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def served(catalogue: Catalogue) -> dict[str, tuple[int, int]]:
    """Identifiers with context and output limits, as validation wants them."""
    return {name: (catalogue[name].context_length, catalogue[name].max_output) for name in catalogue.identifiers}


def usage_of(finished: Finished) -> Usage:
    """As the wire shows it."""
    return Usage(
        prompt_tokens=finished.prompt_tokens,
        cached_tokens=finished.cached_tokens,
        completion_tokens=finished.completion_tokens,
        reasoning_tokens=finished.marked_tokens or 0,
    )
