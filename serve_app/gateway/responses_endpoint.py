"""Handles requests to POST /responses, like `reply_endpoint`, but with the errors and streams of the Responses API.

A complete response is stored together with the settlement of its request, so it is stored only if it is billed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Final

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from serve_app.api import errors
from serve_app.api.chat_request import ChatRequest
from serve_app.api.codec import encode_json
from serve_app.api.door import ReplyHead, StreamEncoder, WholeReplyEncoder
from serve_app.api.errors import ApiError
from serve_app.api.responses_chat import (
    Json,
    ResponsesChat,
    Stored,
    StoredConversation,
    read_responses_request,
    stored_ids,
    to_chat,
)
from serve_app.api.responses_door import count_query
from serve_app.api.responses_reply import ResponseStream, WholeResponse
from serve_app.api.stored_responses import MAX_JSON, TooLarge, decode_stored, encode_stored, without_logprobs
from serve_app.api.token_door import TokenQuery
from serve_app.api.tools_and_formats import invalid
from serve_app.contracts.books import StoredResponse
from serve_app.contracts.calls import Unavailable, detached
from serve_app.contracts.commands import BeginResponse, EndResponse
from serve_app.contracts.generation import Finished
from serve_app.contracts.limiting import Identity
from serve_app.gateway.authentication import Caller
from serve_app.gateway.backends import Catalogue
from serve_app.gateway.exchange import Exchange
from serve_app.gateway.idempotency import Retry
from serve_app.gateway.record import RequestRecord
from serve_app.gateway.refusal_errors import restarting
from serve_app.gateway.reply_endpoint import Encoder, ReplyEndpoint, ReplyToRequest, Result, aside, head_of
from serve_app.gateway.reruns import RunsAgain
from serve_app.gateway.services import Services
from serve_app.gateway.settlements import Settlements
from serve_app.gateway.token_endpoint import TokenEndpoint
from serve_app.gateway.web import Headers, Sender

logger = logging.getLogger("ray.serve")

BEGIN_S = 3.0  # if no replica takes a background request within this time, its client gets the queued response
END_TRIES: Final = 10
END_PAUSE_S: Final = 2.0
# Threads for work on stored conversations, which can be long even if the body is short. They are separate from the
# thread that parses bodies, so neither kind of work delays the other.
_STORED: Final = ThreadPoolExecutor(max_workers=2, thread_name_prefix="stored")
LOOK_UPS_PER_MINUTE: Final = 3000
"""Maximum number of stored responses to which an account's requests may refer per minute, in each gateway.

The ledger reads them before the request has a hold. A response counts once more for each LOOK_UP_BYTES of its size.
"""
LOOK_UP_BYTES: Final = 64 * 1024


async def off_loop(work: Callable[[], Result]) -> Result:
    """Runs work on a stored conversation outside the event loop."""
    return await asyncio.get_running_loop().run_in_executor(_STORED, work)


async def find_stored(settlements: Settlements, account_id: str, response_ids: Sequence[str]) -> Stored:
    """Returns the stored responses of the account that have one of these ids.

    Raises ApiError: 422 for a response that still runs or is too large, 429 after too many, 503 without the ledger.
    """
    found: dict[str, StoredConversation] = {}
    for response_id in response_ids:
        limit = f"responses of {account_id}", LOOK_UPS_PER_MINUTE
        if wait_s := settlements.replays.count(limit):
            message = f"Stored responses per minute of this account: the limit is {LOOK_UPS_PER_MINUTE}."
            raise errors.rate_limit(message, code="requests", retry_after_s=wait_s)
        try:
            stored = await settlements.find_response(account_id, response_id)
        except Unavailable:
            message = "stored responses can't be read right now: try again"
            raise errors.overloaded(message, retry_after_s=2) from None
        if stored is not None and stored.beat_at is not None:
            raise invalid("previous_response_id", f"must be a response that has ended, and {response_id} has not")
        if stored is not None:
            settlements.replays.charge(*[limit] * (len(stored.body) // LOOK_UP_BYTES))
            left = MAX_JSON - sum(conversation.size for conversation in found.values())
            try:
                found[response_id] = await off_loop(partial(decode_stored, stored.body, left))
            except TooLarge:
                rule = f"must not refer to stored responses of more than {MAX_JSON} bytes together"
                raise invalid("input", rule) from None
    return found


class InputTokensEndpoint(TokenEndpoint):
    """Answers requests to POST /responses/input_tokens."""

    async def _read_query(self, body: bytes, identity: Identity, catalogue: Catalogue) -> TokenQuery:
        settings, served = self._services.settings, catalogue.served
        parsed, request = await aside(
            body, lambda: read_responses_request(body, served, settings.max_body_bytes, settings.max_body_items)
        )
        stored = await find_stored(self._services.settlements, identity.account_id, stored_ids(request))
        return await _with_stored(body, stored, lambda: count_query(to_chat(parsed, request, served, stored)))


async def _with_stored(body: bytes, stored: Stored, work: Callable[[], Result]) -> Result:
    """Runs work on a body and its stored responses. If there are any, the work runs outside the event loop."""
    return await (off_loop(work) if stored else aside(body, work))


class ResponsesEndpoint(ReplyEndpoint):
    """Answers requests to POST /responses."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await ReplyToResponses(self, Request(scope, receive)).respond(scope, receive, send)


class ReplyToResponses(ReplyToRequest):
    """The answer to one request."""

    _stream_encoder: ResponseStream | None = None

    async def _read_body(self, body: bytes, caller: Caller) -> tuple[ChatRequest, Retry | None]:
        settings, served = self._services.settings, self._services.catalogue.served
        parsed, request = await aside(
            body, lambda: read_responses_request(body, served, settings.max_body_bytes, settings.max_body_items)
        )
        stored: Stored = {}
        if ids := stored_ids(request):
            stored = await find_stored(self._services.settlements, (await caller.identify()).account_id, ids)
        checked = partial(self._checked, body)
        return await _with_stored(body, stored, lambda: checked(to_chat(parsed, request, served, stored)))

    async def _reply(
        self, chat: ChatRequest, caller: Caller, retry: Retry | None, sender: Sender, arrived: float
    ) -> None:
        assert isinstance(chat, ResponsesChat)
        try:
            if chat.sent.background:
                await self._reply_in_background(chat, caller, retry, sender)
            else:
                await super()._reply(chat, caller, retry, sender, arrived)
        except ApiError as error:
            raise chat.named(error) from None

    def _begin_whole(self, chat: ChatRequest, exchange: Exchange) -> WholeReplyEncoder:
        assert isinstance(chat, ResponsesChat)
        return WholeResponse(chat, self._stores(chat, exchange))

    def _begin_stream(self, chat: ChatRequest, exchange: Exchange) -> StreamEncoder:
        assert isinstance(chat, ResponsesChat)
        self._stream_encoder = ResponseStream(chat, head_of(chat, exchange), self._stores(chat, exchange))
        return self._stream_encoder

    def _stores(self, chat: ResponsesChat, exchange: Exchange) -> bool:
        """Returns whether the response will be stored."""
        assert exchange.grant is not None
        return chat.sent.store and self._may_store(exchange.grant.account_id)

    def _may_store(self, account_id: str) -> bool:
        settings = self._services.settings
        return account_id not in settings.unstored_accounts and settings.stored_responses_s > 0

    async def _reply_in_background(
        self, chat: ResponsesChat, caller: Caller, retry: Retry | None, sender: Sender
    ) -> None:
        """Starts a run, and sends its response with the status `queued` or `in_progress`.

        A request that is refused within BEGIN_S gets the HTTP status of the refusal. If the client hangs up before the
        response is stored, the run is cancelled.
        """
        account_id = (await caller.identify()).account_id
        if not self._may_store(account_id):
            raise invalid("background", "is not possible: the responses of this account are not stored")
        if self._services.background.is_stopping:
            raise restarting()
        run = Run(self._services, chat, self._record, account_id, self._complete)
        await run.check_size()
        task = detached(run.run(Exchange(self._services, chat, self._record, caller, retry)))
        begun = asyncio.ensure_future(run.has_begun.wait())
        try:
            await asyncio.wait([task, begun], timeout=BEGIN_S, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                response: Json | bytes | ApiError = task.result()
            else:
                response = await run.store()
                self._services.background.start(account_id, run.head.id, task)
        except BaseException as error:
            run.is_refused = isinstance(error, ApiError)
            task.cancel()
            raise
        finally:
            begun.cancel()
        if isinstance(response, ApiError):
            raise response
        is_replayed = isinstance(response, bytes)
        body = response if isinstance(response, bytes) else encode_json(response)
        own = {"content_length": str(len(body)), **({"idempotency_replayed": "true"} if is_replayed else {})}
        await sender.write_piece(body, lambda: self._plain_headers(**own), more=False)

    def _plain_headers(self, **own: str) -> Headers:
        values = {"content-type": "application/json", "x-trace-id": self._record.trace.trace_id, **own}
        return [(name.replace("_", "-").encode("latin-1"), value.encode("latin-1")) for name, value in values.items()]

    async def _complete(
        self, chat: ChatRequest, exchange: Exchange, reply: Encoder, finished: Finished, body: bytes | None
    ) -> bytes | None:
        assert isinstance(chat, ResponsesChat)
        assert isinstance(reply, ResponseStream | WholeResponse)
        if isinstance(reply, ResponseStream):
            reply.finish(finished)
        response = None
        if reply.final["store"]:
            try:
                encoded = await off_loop(lambda: _encoded(chat, reply.final))
            except TooLarge:
                if chat.sent.background:
                    raise errors.server_error() from None
                reply.final["store"] = False
                body = None if body is None else await off_loop(lambda: encode_json(reply.final))
            else:
                expires_at = time.time() + self._services.settings.stored_responses_s
                response = StoredResponse(reply.final["id"], encoded, expires_at)
        await exchange.complete(body, response)
        return body

    def _error_event(self, error: ApiError) -> bytes:
        encoder = self._stream_encoder
        return super()._error_event(error) if encoder is None else encoder.error_event(error)


def _encoded(chat: ResponsesChat, response: Json) -> bytes:
    """Returns the bytes of a complete response to store. Raises TooLarge.

    A background response that is too large is stored without its log probabilities, because its client has no other
    copy.
    """
    try:
        return encode_stored(chat.items, response)
    except TooLarge:
        if not chat.sent.background:
            raise
        return encode_stored(chat.items, without_logprobs(response))


class Run:
    """A response that runs in the background."""

    def __init__(
        self,
        services: Services,
        chat: ResponsesChat,
        record: RequestRecord,
        account_id: str,
        complete: Callable[[ResponsesChat, Exchange, WholeResponse, Finished, bytes], Awaitable[bytes | None]],
    ) -> None:
        self._services = services
        self._chat = chat
        self._account_id = account_id
        self._complete = complete
        self.head = ReplyHead(record.request_id, int(time.time()), chat.model, "")
        self.has_begun = asyncio.Event()  # a replica has taken the request
        self.is_refused = False  # whether the gateway has refused the request after `run` has begun
        self._is_due = False  # whether the client gets an id: the ledger must then record the response's end
        self._is_stored = asyncio.Event()
        self._reply = WholeResponse(chat, stored=True)

    async def check_size(self) -> None:
        """Raises ApiError (422) if the conversation leaves too little room to store the complete response."""
        try:
            await self._stored(self._reply.partial(self.head, "queued"), room=0.5)  # the reply may need the other half
        except TooLarge:
            raise invalid("background", "is not possible: the conversation is too large to be stored") from None

    async def store(self) -> Json:
        """Stores the response before it is complete, and returns it. Raises ApiError (503) without the ledger."""
        self._is_due = True
        status = "in_progress" if self.has_begun.is_set() else "queued"
        response = WholeResponse(self._chat, stored=True).partial(self.head, status)
        stored = await self._stored(response)
        try:
            await self._services.settlements.ask(BeginResponse(self._account_id, stored))
        except Unavailable:
            message = "responses can't be stored right now: try again, or send background: false"
            raise errors.overloaded(message, retry_after_s=5) from None
        self._is_stored.set()
        return response

    async def run(self, exchange: Exchange) -> bytes | ApiError:
        """Runs the request.

        Returns the stored reply of a retry, the error of a request that failed before `store`, or nothing (`b""`).
        """
        try:
            async with exchange:
                try:
                    return await self._generate(exchange)
                except asyncio.CancelledError:
                    # Within `exchange`, an ApiError (503) bills nothing. The cancellation would bill the output so far.
                    if self.is_refused or self._services.background.is_stopping:
                        message = "the service has stopped: send the request again"
                        raise errors.overloaded(message, retry_after_s=5) from None
                    raise
        except asyncio.CancelledError:
            if not self._is_stored.is_set():
                raise
            await self._end("cancelled")
        except Exception as error:
            if not isinstance(error, ApiError):
                logger.exception("a response in the background failed")
                error = errors.server_error()
            if self.is_refused or not self._is_due:
                return error
            await self._is_stored.wait()
            self._reply = WholeResponse(self._chat, stored=True)  # a failed response is not billed, so it has no text
            await self._end("failed", self._chat.named(error))
        return b""

    async def _generate(self, exchange: Exchange) -> bytes:
        await exchange.begin()
        if exchange.replayed is not None:
            if self._is_due:  # the client already has a new id, not the stored reply's
                message = "the request was answered before: send it again with the same idempotency-key"
                raise errors.overloaded(message, retry_after_s=1)
            return exchange.replayed
        self.has_begun.set()
        while not isinstance(event := await exchange.next_event(), Finished):
            if isinstance(event, RunsAgain):
                self._reply = WholeResponse(self._chat, stored=True)
            elif event is not None:
                self._reply.add_event(event)
        self.head = replace(self.head, fingerprint=exchange.fingerprint)
        body = self._reply.body(self.head, event)
        await self._is_stored.wait()
        completed = detached(self._complete(self._chat, exchange, self._reply, event, body))  # type: ignore[arg-type]
        try:
            await asyncio.shield(completed)
        except asyncio.CancelledError:
            await completed  # too late to cancel: the response is billed as complete
        return b""

    async def _end(self, status: str, error: ApiError | None = None) -> None:
        """Records the end of the response in the ledger.

        If the ledger stays unavailable, readers treat the response as failed, because its row is no longer renewed.
        """
        partial_response = self._reply.partial(self.head, status, error)
        try:
            response = await self._stored(partial_response)
        except TooLarge:
            response = await self._stored(without_logprobs(partial_response))
        for _ in range(END_TRIES):
            try:
                await self._services.settlements.ask(EndResponse(self._account_id, response))
            except Unavailable:
                await asyncio.sleep(END_PAUSE_S)
            else:
                return
        logger.error("could not write the end of response %s to the ledger", self.head.id)

    async def _stored(self, response: Json, room: float = 1.0) -> StoredResponse:
        """Returns the response in its stored form. Raises TooLarge as `encode_stored` does."""
        encoded = await off_loop(partial(encode_stored, self._chat.items, response, room))
        return StoredResponse(self.head.id, encoded, time.time() + self._services.settings.stored_responses_s)
