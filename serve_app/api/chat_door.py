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
from serve_app.api.door import ReplyEvent, ReplyHead
from serve_app.api.errors import ApiError
from serve_app.contracts.generation import ChoiceEnded, Finished


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
        self._head = head
        self._include_usage = request.include_usage
        self._has_usage_in_each_chunk = request.has_usage_in_each_chunk
        self._encoder = ChunkEncoder(
            id=head.id,
            created=head.created,
            model=head.model,
            fingerprint=head.fingerprint,
            include_usage=request.include_usage,
        )
        self._reply = StreamedReply(self._encoder, request.n)
        self.event = self._chunks_with_usage if request.has_usage_in_each_chunk else self._reply.chunks

    def _chunks_with_usage(self, event: ReplyEvent) -> bytes:
        if not isinstance(event, ChoiceEnded):
            self._encoder.set_usage(Usage(self._head.prompt_tokens, event.completion_tokens, self._head.cached_tokens))
        return self._reply.chunks(event)

    def end(self, finished: Finished) -> bytes:
        usage = _usage(finished)
        if not self._include_usage:
            return self._reply.closing_chunks(finished.reason, usage) + DONE
        closing = self._reply.closing_chunks(finished.reason, usage if self._has_usage_in_each_chunk else None)
        return closing + self._encoder.usage_chunk(usage) + DONE


def _usage(finished: Finished) -> Usage:
    return Usage(
        prompt_tokens=finished.prompt_tokens,
        cached_tokens=finished.cached_tokens,
        completion_tokens=finished.completion_tokens,
        reasoning_tokens=finished.marked_tokens or 0,
    )
