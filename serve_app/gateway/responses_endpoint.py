"""Handles requests to POST /responses: as `reply_endpoint` does, with errors and streams of this format."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from serve_app.api.chat_request import ChatRequest
from serve_app.api.door import ReplyHead, StreamEncoder
from serve_app.api.errors import ApiError
from serve_app.api.responses_chat import ResponsesChat
from serve_app.api.responses_reply import ResponseStream
from serve_app.gateway.authentication import Caller
from serve_app.gateway.idempotency import Retry
from serve_app.gateway.reply_endpoint import ReplyEndpoint, ReplyToRequest
from serve_app.gateway.web import Sender


class ResponsesEndpoint(ReplyEndpoint):
    """Answers requests to POST /responses."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await ReplyToResponses(self, Request(scope, receive)).respond(scope, receive, send)


class ReplyToResponses(ReplyToRequest):
    """The answer to one request."""

    _stream_encoder: ResponseStream | None = None

    async def _reply(
        self, chat: ChatRequest, caller: Caller, retry: Retry | None, sender: Sender, arrived: float
    ) -> None:
        assert isinstance(chat, ResponsesChat)
        try:
            await super()._reply(chat, caller, retry, sender, arrived)
        except ApiError as error:
            raise chat.named(error) from None

    def _begin_stream(self, chat: ChatRequest, head: ReplyHead) -> StreamEncoder:
        assert isinstance(chat, ResponsesChat)
        self._stream_encoder = ResponseStream(chat, head)
        return self._stream_encoder

    def _error_event(self, error: ApiError) -> bytes:
        encoder = self._stream_encoder
        return super()._error_event(error) if encoder is None else encoder.error_event(error)
