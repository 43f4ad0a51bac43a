"""The doors for OpenAI's Responses format: POST /responses, and /responses/input_tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from serve_app.api.chat_reply import KEEP_ALIVE, RESUMED
from serve_app.api.chat_request import ChatRequest, ServedModels
from serve_app.api.door import ReplyHead
from serve_app.api.errors import ApiError
from serve_app.api.responses_chat import ID_PREFIX, ResponsesChat, read_responses_request, to_chat
from serve_app.api.responses_reply import ResponseStream, WholeResponse, lone_error_event
from serve_app.api.token_door import TokenQuery, prompt_query
from serve_app.contracts.generation import Tokenized


def count_query(chat: ResponsesChat) -> TokenQuery:
    """Returns the query for the number of prompt tokens of a request."""
    return replace(prompt_query(chat), named=chat.named)


class InputTokensDoor:
    """The door for POST /responses/input_tokens. See `TokenDoor`."""

    path = "/responses/input_tokens"

    def parse(self, body: bytes, served: ServedModels, max_bytes: int, max_items: int) -> TokenQuery:
        """Parses a request that refers to no stored response."""
        parsed, request = read_responses_request(body, served, max_bytes, max_items)
        return count_query(to_chat(parsed, request, served, {}))

    def answer(self, query: TokenQuery, tokenized: Tokenized, context_length: int) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": tokenized.count}

    def status(self, error: ApiError) -> int:
        return error.status

    def error_body(self, error: ApiError) -> dict[str, Any]:
        return error.body()


class ResponsesDoor:
    """See `Door`."""

    path = "/responses"
    id_prefix = ID_PREFIX
    stream_type = "text/event-stream; charset=utf-8"
    keep_alive = KEEP_ALIVE
    resumed = RESUMED

    def parse(self, body: bytes, served: ServedModels, max_bytes: int, max_items: int) -> ChatRequest:
        """Parses a request that refers to no stored response."""
        parsed, request = read_responses_request(body, served, max_bytes, max_items)
        return to_chat(parsed, request, served, {})

    def whole(self, request: ChatRequest) -> WholeResponse:
        assert isinstance(request, ResponsesChat)
        return WholeResponse(request)

    def stream(self, request: ChatRequest, head: ReplyHead) -> ResponseStream:
        assert isinstance(request, ResponsesChat)
        return ResponseStream(request, head)

    def status(self, error: ApiError) -> int:
        return error.status

    def error_body(self, error: ApiError) -> dict[str, Any]:
        return error.body()

    def error_event(self, error: ApiError) -> bytes:
        return lone_error_event(error)
