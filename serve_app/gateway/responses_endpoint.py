"""Handles requests to POST /responses: as `reply_endpoint` does, with errors and streams of this format.

A response is stored with the settlement of its request: it is stored exactly if it is billed as complete.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from serve_app.api import errors
from serve_app.api.chat_request import ChatRequest
from serve_app.api.door import StreamEncoder, WholeReplyEncoder
from serve_app.api.errors import ApiError
from serve_app.api.responses_chat import (
    ResponsesChat,
    Stored,
    read_responses_request,
    stored_ids,
    to_chat,
)
from serve_app.api.responses_reply import ResponseStream, WholeResponse
from serve_app.api.stored_responses import MAX_BYTES, decode_stored, encode_stored
from serve_app.api.token_door import TokenQuery, prompt_query
from serve_app.contracts.books import StoredResponse
from serve_app.contracts.calls import Unavailable
from serve_app.contracts.generation import Finished
from serve_app.contracts.limiting import Identity
from serve_app.gateway.authentication import Caller
from serve_app.gateway.exchange import Exchange
from serve_app.gateway.idempotency import Retry
from serve_app.gateway.reply_endpoint import Encoder, ReplyEndpoint, ReplyToRequest, aside, head_of
from serve_app.gateway.settlements import Settlements
from serve_app.gateway.token_endpoint import TokenEndpoint
from serve_app.gateway.web import Sender

LOOK_UPS_PER_MINUTE: Final = 3000
"""Stored responses that an account may refer to, in each gateway: the ledger reads each before the request is held."""


async def find_stored(settlements: Settlements, account_id: str, response_ids: Sequence[str]) -> Stored:
    """Returns those of these responses that the account has stored. Raises ApiError: 429, or 503 without the ledger."""
    found = {}
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
        if stored is not None:
            found[response_id] = decode_stored(stored.body)
    return found


class InputTokensEndpoint(TokenEndpoint):
    """Answers requests to POST /responses/input_tokens."""

    async def _read_query(self, body: bytes, identity: Identity) -> TokenQuery:
        settings, served = self._services.settings, self._services.catalogue.served
        parsed, request = await aside(
            body, lambda: read_responses_request(body, served, settings.max_body_bytes, settings.max_body_items)
        )
        stored = await find_stored(self._services.settlements, identity.account_id, stored_ids(request))
        return await aside(body, lambda: prompt_query(to_chat(parsed, request, served, stored)))


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
        return await aside(body, lambda: self._checked(body, to_chat(parsed, request, served, stored)))

    async def _reply(
        self, chat: ChatRequest, caller: Caller, retry: Retry | None, sender: Sender, arrived: float
    ) -> None:
        assert isinstance(chat, ResponsesChat)
        try:
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
        settings = self._services.settings
        assert exchange.grant is not None
        is_allowed = exchange.grant.account_id not in settings.unstored_accounts
        return chat.sent.store and is_allowed and settings.stored_responses_s > 0

    async def _complete(
        self, chat: ChatRequest, exchange: Exchange, reply: Encoder, finished: Finished, body: bytes | None
    ) -> None:
        assert isinstance(chat, ResponsesChat)
        assert isinstance(reply, ResponseStream | WholeResponse)
        if isinstance(reply, ResponseStream):
            reply.finish(finished)
        response = None
        if reply.final["store"]:
            encoded = await aside(body or b"", lambda: encode_stored(chat.items, reply.final))
            if len(encoded) <= MAX_BYTES:
                expires_at = time.time() + self._services.settings.stored_responses_s
                response = StoredResponse(reply.final["id"], encoded, expires_at)
            else:
                reply.final["store"] = False
        await exchange.complete(body, response)

    def _error_event(self, error: ApiError) -> bytes:
        encoder = self._stream_encoder
        return super()._error_event(error) if encoder is None else encoder.error_event(error)
