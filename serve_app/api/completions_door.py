"""The door for text completions: POST /completions."""

from __future__ import annotations

from typing import Any

from serve_app.api.chat_reply import DONE, KEEP_ALIVE, RESUMED, Usage
from serve_app.api.chat_request import ChatRequest, RawRequest, ServedModels
from serve_app.api.codec import encode_json
from serve_app.api.completions_reply import CompletionStream, WholeCompletion
from serve_app.api.completions_request import parse_completion_request
from serve_app.api.door import ReplyEvent, ReplyHead
from serve_app.api.errors import ApiError
from serve_app.contracts.generation import ChoiceEnded, Finished


class CompletionsDoor:
    """See `Door`."""

    path = "/completions"
    id_prefix = "cmpl-"
    stream_type = "text/event-stream; charset=utf-8"
    keep_alive = KEEP_ALIVE
    resumed = RESUMED

    def parse(self, body: bytes, served: ServedModels, max_bytes: int, max_items: int) -> ChatRequest:
        return parse_completion_request(body, served, max_bytes, max_items)

    def whole(self, request: ChatRequest) -> WholeReply:
        assert isinstance(request, RawRequest)
        return WholeReply(request)

    def stream(self, request: ChatRequest, head: ReplyHead) -> Stream:
        assert isinstance(request, RawRequest)
        return Stream(request, head)

    def status(self, error: ApiError) -> int:
        return error.status

    def error_body(self, error: ApiError) -> dict[str, Any]:
        body = error.body()
        if error.code == "context_length_exceeded":
            message = error.message.replace("your messages are", "your prompt has")
            body["error"] |= {"message": message.replace("the messages", "the prompt"), "param": "prompt"}
        return body

    def error_event(self, error: ApiError) -> bytes:
        return b"data: " + encode_json(self.error_body(error)) + b"\n\n"


class WholeReply:
    """See `WholeReplyEncoder`."""

    def __init__(self, request: RawRequest) -> None:
        self._reply = WholeCompletion(request)

    def add_event(self, event: ReplyEvent) -> None:
        self._reply.add_event(event)

    def body(self, head: ReplyHead, finished: Finished) -> bytes:
        return self._reply.body(head, finished.reason, _usage(finished))


class Stream:
    """See `StreamEncoder`."""

    def __init__(self, request: RawRequest, head: ReplyHead) -> None:
        self._request = request
        self._head = head
        self._reply = CompletionStream(request, head)

    def event(self, event: ReplyEvent) -> bytes:
        if self._request.has_usage_in_each_chunk and not isinstance(event, ChoiceEnded):
            head = self._head
            self._reply.set_usage(Usage(head.prompt_tokens, event.completion_tokens, head.cached_tokens))
        return self._reply.chunks(event)

    def end(self, finished: Finished) -> bytes:
        if self._request.has_usage_in_each_chunk:
            self._reply.set_usage(_usage(finished))
        closing = self._reply.closing_chunks(finished.reason)
        if self._request.include_usage:
            closing += self._reply.usage_chunk(_usage(finished))
        return closing + DONE


def _usage(finished: Finished) -> Usage:
    return Usage(finished.prompt_tokens, finished.completion_tokens, finished.cached_tokens)
