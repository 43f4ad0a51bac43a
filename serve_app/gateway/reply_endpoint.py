"""Handles requests that generate a reply: reads the body, runs the exchange, and writes a reply or a stream.

Replies have the format of the request's door. The endpoint is a plain ASGI application with one `__call__` per request.
However a request ends, even if its client hangs up, the same `async with` ends its exchange. So nothing stays open.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from serve_app.api import errors
from serve_app.api.chat_request import ChatRequest
from serve_app.api.codec import parses_in_a_moment
from serve_app.api.door import Door, ReplyHead, StreamEncoder, WholeReplyEncoder
from serve_app.api.errors import ApiError
from serve_app.contracts.generation import Finished
from serve_app.contracts.phases import Phases
from serve_app.contracts.trace_context import TraceContext
from serve_app.gateway.authentication import Authenticator, Caller
from serve_app.gateway.exchange import Exchange
from serve_app.gateway.idempotency import Retry
from serve_app.gateway.record import RequestRecord
from serve_app.gateway.refusal_errors import restarting
from serve_app.gateway.reruns import RunsAgain
from serve_app.gateway.services import Services
from serve_app.gateway.web import (
    Bodies,
    BodyReader,
    ClientGone,
    Headers,
    Sender,
    Share,
    error_response,
    rate_limit_headers,
    server_timing,
    until_gone,
)

logger = logging.getLogger("ray.serve")

Encoder = StreamEncoder | WholeReplyEncoder
Result = TypeVar("Result")

MAX_JOINED: Final = 32  # events of a reply that are joined into one write
LINE_FEED: Final = b"\n"  # sent before a slow whole reply: JSON may begin with whitespace (RFC 8259)

# One body at a time: parsing holds the interpreter lock, and the event loop must keep running.
PARSING: Final = ThreadPoolExecutor(max_workers=1, thread_name_prefix="parse")


#: Statuses whose messages are logged: they are about keys, limits, money and load. Others may quote the request.
REASONED: Final = frozenset({401, 402, 403, 429, 503})


@dataclass(slots=True)
class IncompleteBodies:
    """The bodies that a gateway is reading, for all doors."""

    identified: Bodies = field(default_factory=Bodies)  # by the key's digest
    unidentified: Bodies = field(default_factory=Bodies)  # by address


class ReplyEndpoint:
    """Answers the requests of one door."""

    def __init__(self, door: Door, services: Services, authenticator: Authenticator, bodies: IncompleteBodies) -> None:
        self.door = door
        self.services = services
        self.authenticator = authenticator
        self.bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await ReplyToRequest(self, Request(scope, receive)).respond(scope, receive, send)


def new_digits() -> str:
    """Returns the 32 hexadecimal digits of a request's id, which are also those of its trace.

    Ids sort by time, to the millisecond, so new ids are added at the end of the ledger's index.
    """
    return f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"


class ReplyToRequest:
    """The answer to one request."""

    def __init__(self, endpoint: ReplyEndpoint, request: Request) -> None:
        self._door = endpoint.door
        self._services = endpoint.services
        self._authenticator = endpoint.authenticator
        self._bodies = endpoint.bodies
        self._request = request
        digits, observer = new_digits(), self._services.observer
        self._record = RequestRecord(
            f"{self._door.id_prefix}{digits}",
            getattr(request.state, "request_id", ""),
            TraceContext.of(request.headers.get("traceparent"), digits),
            observer.ended,
            Phases(lambda seconds: observer.gap(self._record, seconds)),
            path=self._door.path,
        )

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the reply. If the request fails before the first byte, sends the error and its HTTP status."""
        clock, record = self._services.clock, self._record
        arrived = clock()
        sender = Sender(send)
        try:
            caller = self._authenticator.caller(self._request)
            chat, retry = await self._read_request(caller)
            record.model, record.stream = chat.model, chat.stream
            await until_gone(receive, self._start(chat, caller, retry, sender, arrived))
            record.status = 200
        except ApiError as error:
            record.status, record.code = error.status, error.code
            if error.status in REASONED:
                record.reason = error.message
            await self._fail(error, scope, receive, sender)
        except ClientGone:
            record.status = 499
        except asyncio.CancelledError:
            record.status = 499
            raise
        except Exception:
            logger.exception("a request failed")
            record.code = "server_error"
            await self._fail(errors.server_error(), scope, receive, sender)
        finally:
            sender.close()
            record.total_s = clock() - arrived
            record.close()

    async def _read_request(self, caller: Caller) -> tuple[ChatRequest, Retry | None]:
        """Identifies the key unless it is confirmed, and reads the body. Slow parsing runs outside the event loop."""
        settings = self._services.settings
        reader = BodyReader(self._request, settings.max_body_bytes, settings.body_timeout_s)
        sender_max = max(settings.bodies_max_bytes // 8, settings.max_body_bytes)
        if not caller.is_confirmed:
            with Share(self._bodies.unidentified, caller.address, sender_max, sender_max) as share:
                try:
                    await reader.read_while(caller.identify(), share)
                except ApiError:
                    self._record.admitted(*caller.account_and_key)
                    raise
        self._request.state.identified = True
        if not self._services.catalogue.is_known:
            raise restarting()
        try:
            with Share(self._bodies.identified, caller.digest, settings.bodies_max_bytes, sender_max) as share:
                body = await reader.read(share)
                return await self._read_body(body, caller)
        except ApiError:
            identity = await caller.identify()  # a wrong key is reported before a wrong body
            self._record.admitted(identity.account_id, identity.key_id)
            raise

    async def _read_body(self, body: bytes, caller: Caller) -> tuple[ChatRequest, Retry | None]:
        return await aside(body, lambda: self._parse(body))

    def _parse(self, body: bytes) -> tuple[ChatRequest, Retry | None]:
        settings = self._services.settings
        served = self._services.catalogue.served
        return self._checked(body, self._door.parse(body, served, settings.max_body_bytes, settings.max_body_items))

    def _checked(self, body: bytes, chat: ChatRequest) -> tuple[ChatRequest, Retry | None]:
        _ = chat.estimated_prompt_tokens  # computed and cached as part of the parsing, like messages and tools
        # Streams ignore the idempotency key. An error would break the streams of clients that send a key with every
        # POST: OpenAI's SDKs, and others from the same generator, can be configured to do so.
        key = None if chat.stream else self._request.headers.get("idempotency-key")
        return chat, None if key is None else Retry.from_header(key, self._door.path, body)

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, sender: Sender) -> None:
        with contextlib.suppress(ClientGone):
            if not sender.started:
                headers = {"x-trace-id": self._record.trace.trace_id}
                request_id = getattr(self._request.state, "request_id", "")
                response = error_response(error, headers, self._door, request_id)
                await response(scope, receive, sender.send_message)
            elif self._record.stream:
                await sender.send_message(
                    {"type": "http.response.body", "body": self._error_event(error), "more_body": False}
                )
            else:
                # The status is already sent. If the application does not send the last chunk, the server closes the
                # connection, so no client mistakes a partial reply for a complete one.
                logger.error(
                    "the reply %s failed after its start: %d %s", self._record.request_id, error.status, error.message
                )

    def _error_event(self, error: ApiError) -> bytes:
        """Returns the last event of a stream that fails."""
        return self._door.error_event(error)

    async def _complete(
        self, chat: ChatRequest, exchange: Exchange, reply: Encoder, finished: Finished, body: bytes | None
    ) -> bytes | None:
        """Settles a finished request, and returns the body to send. `body` is the reply if it is not streamed."""
        await exchange.complete(body)
        return body

    async def _start(
        self, chat: ChatRequest, caller: Caller, retry: Retry | None, sender: Sender, arrived: float
    ) -> None:
        await self._services.starts.wait(caller.account_id or caller.digest)
        await self._reply(chat, caller, retry, sender, arrived)

    async def _reply(
        self, chat: ChatRequest, caller: Caller, retry: Retry | None, sender: Sender, arrived: float
    ) -> None:
        async with Exchange(self._services, chat, self._record, caller, retry) as exchange:
            await exchange.begin()
            if exchange.replayed is not None:
                await self._replay(exchange.replayed, exchange, sender)
            elif chat.stream:
                await self._stream(chat, exchange, sender)
            else:
                await self._send_whole_reply(chat, exchange, sender, arrived)

    def _headers(self, exchange: Exchange, content_type: str, **more: str) -> Headers:
        grant, record, phases = exchange.grant, self._record, self._record.phases
        values = {
            "content-type": content_type,
            **(rate_limit_headers(grant.requests, grant.tokens) if grant is not None else {}),
            "server-timing": server_timing(
                admit=record.admit_s,
                queue=phases.queue_s,
                prefill=phases.prefill_s,
                decode=phases.decode_s,
                settle=record.settle_s,
                total=time.time() - record.arrived_at,
            ),
            "x-trace-id": record.trace.trace_id,
            **more,
        }
        return [(name.replace("_", "-").encode("latin-1"), value.encode("latin-1")) for name, value in values.items()]

    async def _replay(self, body: bytes, exchange: Exchange, sender: Sender) -> None:
        """Sends the stored reply of a request that was answered before, byte for byte."""
        own = {"idempotency_replayed": "true", "content_length": str(len(body))}
        await sender.write_piece(body, lambda: self._headers(exchange, "application/json", **own), more=False)

    async def _send_whole_reply(self, chat: ChatRequest, exchange: Exchange, sender: Sender, arrived: float) -> None:
        """Sends a reply that is not streamed. Sends line feeds while a slow reply is being generated.

        Without them, a load balancer may not notice that its client has hung up until the reply is complete: it notices
        only when it fails to write to the client.
        """
        settings, clock = self._services.settings, self._services.clock
        # HTTP/1.0 has no chunks. It needs the length first, and its client could not detect an incomplete reply.
        may_begin = self._request.scope.get("http_version") != "1.0"
        due = arrived + settings.early_reply_s
        reply = self._begin_whole(chat, exchange)
        while True:
            event = await exchange.next_event(max(0.0, due - clock()) if may_begin else None)
            if isinstance(event, Finished):
                break
            if isinstance(event, RunsAgain):
                reply = self._begin_whole(chat, exchange)
            elif event is not None:
                reply.add_event(event)
            if may_begin and clock() >= due:
                await sender.write_piece(LINE_FEED, lambda: self._headers(exchange, "application/json"))
                due = clock() + settings.line_feed_s
        body = reply.body(head_of(chat, exchange), event)
        body = await self._complete(chat, exchange, reply, event, body) or body
        own = {"content_length": str(len(body))}
        await sender.write_piece(body, lambda: self._headers(exchange, "application/json", **own), more=False)

    def _begin_whole(self, chat: ChatRequest, exchange: Exchange) -> WholeReplyEncoder:
        return self._door.whole(chat)

    def _begin_stream(self, chat: ChatRequest, exchange: Exchange) -> StreamEncoder:
        return self._door.stream(chat, head_of(chat, exchange))

    async def _stream(self, chat: ChatRequest, exchange: Exchange, sender: Sender) -> None:
        def begun() -> StreamEncoder:
            return self._begin_stream(chat, exchange)

        keep_alive_s = self._services.settings.keep_alive_s

        def stream_headers() -> Headers:
            own = {"cache_control": "no-cache", "x_accel_buffering": "no"}
            return self._headers(exchange, self._door.stream_type, **own)

        reply = begun()
        pieces: list[bytes] = []  # encoded events that arrived together, to be sent together
        while True:
            try:
                event = await exchange.next_event(0.0 if pieces else keep_alive_s)
            except ApiError:
                if pieces:  # they are billed, so the client must get them
                    await sender.write_piece(b"".join(pieces), stream_headers)
                raise
            if isinstance(event, RunsAgain):
                if event.continues:
                    pieces.append(self._door.resumed)
                else:
                    reply = begun()
            elif event is None:
                pieces = pieces or [self._door.keep_alive]
            elif not isinstance(event, Finished):
                if piece := reply.event(event):
                    pieces.append(piece)
                if exchange.has_event and len(pieces) < MAX_JOINED:
                    continue
            if pieces:
                await sender.write_piece(b"".join(pieces), stream_headers)
                pieces.clear()
            if isinstance(event, Finished):
                break
        await self._complete(chat, exchange, reply, event, None)
        await sender.write_piece(reply.end(event), stream_headers, more=False)


async def aside(body: bytes, work: Callable[[], Result]) -> Result:
    """Runs work on a body. If it takes long, it runs outside the event loop."""
    if parses_in_a_moment(body):
        return work()
    return await asyncio.get_running_loop().run_in_executor(PARSING, work)


def head_of(chat: ChatRequest, exchange: Exchange) -> ReplyHead:
    usage = exchange.usage
    return ReplyHead(
        exchange.request_id,
        int(exchange.started_at),
        chat.model,
        exchange.fingerprint,
        usage.prompt_tokens,
        usage.cached_tokens,
    )
