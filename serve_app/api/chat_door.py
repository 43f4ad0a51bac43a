"""The door for the chat format: POST /chat/completions."""

from __future__ import annotations

from typing import Any

from serve_app.api.chat_reply import (
    DONE,
    KEEP_ALIVE,
    RESUMED,
    ChunkEncoder,
    StreamedReply,
    Usage,
    WholeReply,
    complete_reply,
    error_event,
)
from serve_app.api.chat_request import ChatRequest, ServedModels, parse_chat_request
from serve_app.api.door import ReplyHead
from serve_app.api.errors import ApiError
from serve_app.contracts.generation import Finished


class ChatDoor:
    """See `Door`."""

    path = "/chat/completions"
    id_prefix = "chatcmpl-"
    stream_type = "text/event-stream; charset=utf-8"
    keep_alive = KEEP_ALIVE
    resumed = RESUMED

    def parse(self, body: bytes, served: ServedModels, max_bytes: int, max_items: int) -> ChatRequest:
        return parse_chat_request(body, served, max_bytes, max_items)

    def whole(self, request: ChatRequest) -> WholeChatReply:
        return WholeChatReply(request)

    def stream(self, request: ChatRequest, head: ReplyHead) -> ChatStream:
        return ChatStream(request, head)

    def status(self, error: ApiError) -> int:
        return error.status

    def error_body(self, error: ApiError) -> dict[str, Any]:
        return error.body()

    def error_event(self, error: ApiError) -> bytes:
        return error_event(error)


class WholeChatReply:
    """See `WholeReplyEncoder`."""

    def __init__(self, request: ChatRequest) -> None:
        self._reply = WholeReply(request.n)
        self._logprobs = request.logprobs
        self.add_event = self._reply.add_event

    def body(self, head: ReplyHead, finished: Finished) -> bytes:
        return complete_reply(
            id=head.id,
            created=head.created,
            model=head.model,
            fingerprint=head.fingerprint,
            choices=self._reply.choices(finished.reason, self._logprobs),
            usage=_usage(finished),
        )


class ChatStream:
    """See `StreamEncoder`."""

    def __init__(self, request: ChatRequest, head: ReplyHead) -> None:
        self._include_usage = request.include_usage
        self._encoder = ChunkEncoder(
            id=head.id,
            created=head.created,
            model=head.model,
            fingerprint=head.fingerprint,
            include_usage=request.include_usage,
        )
        self._reply = StreamedReply(self._encoder, request.n)
        self.event = self._reply.chunks

    def end(self, finished: Finished) -> bytes:
        closing = self._reply.closing_chunks(finished.reason)
        if self._include_usage:
            closing += self._encoder.usage_chunk(_usage(finished))
        return closing + DONE


def _usage(finished: Finished) -> Usage:
    return Usage(
        prompt_tokens=finished.prompt_tokens,
        cached_tokens=finished.cached_tokens,
        completion_tokens=finished.completion_tokens,
        reasoning_tokens=finished.marked_tokens or 0,
    )
