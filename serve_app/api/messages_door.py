"""The doors for the Messages format: POST /messages, and POST /messages/count_tokens."""

from __future__ import annotations

import re
from typing import Any, Final

from serve_app.api.chat_request import ChatRequest, ServedModels
from serve_app.api.codec import parse_object
from serve_app.api.door import ReplyHead
from serve_app.api.errors import TOO_LARGE, ApiError
from serve_app.api.messages_reply import PING, MessageStream, WholeMessage, error_event
from serve_app.api.messages_request import MessagesChat, parse_count_request, parse_messages_request
from serve_app.api.token_door import TokenQuery, prompt_query
from serve_app.contracts.generation import Tokenized

ERRORS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    529: "overloaded_error",
}
"""`error.type` by status, for every status of the format."""

_STATUSES: Final = {422: 400, 503: 529}
_NAMES: Final = (
    (re.compile(r"(tools\[\d+\])\.function\.parameters"), r"\1.input_schema"),
    (re.compile(r"(tools\[\d+\])\.function\."), r"\1."),
    (re.compile(r"tool_choice\.function\.name"), "tool_choice.name"),
    (re.compile(r"response_format\.json_schema\.schema"), "output_config.format.schema"),
    (re.compile(r"response_format"), "output_config.format"),
    (re.compile(r"\bn: 1\b"), "one reply"),
)
"""Fields of the chat format in error messages, and their names in this format."""
_TOO_LONG: Final = re.compile(
    r"maximum context length is (\d+) tokens, and your messages are (more than )?(\d+) tokens"
)


class _MessagesErrors:
    """Statuses and bodies of errors in this format."""

    def status(self, error: ApiError) -> int:
        if error.status == 400 and error.message.startswith(TOO_LARGE):
            return 413
        if error.code == "model_not_found":
            return 404
        return _STATUSES.get(error.status, error.status)

    def error_body(self, error: ApiError) -> dict[str, Any]:
        body = {"type": "error", "error": {"type": ERRORS[self.status(error)], "message": message_of(error)}}
        return {**body, "request_id": error.request_id} if error.request_id else body


class MessagesDoor(_MessagesErrors):
    """See `Door`."""

    path = "/messages"
    id_prefix = "msg_"
    stream_type = "text/event-stream; charset=utf-8"
    keep_alive = PING
    resumed = PING

    def parse(self, body: bytes, served: ServedModels, max_bytes: int, max_items: int) -> ChatRequest:
        return parse_messages_request(parse_object(body, max_bytes, max_items), served)

    def whole(self, request: ChatRequest) -> WholeMessage:
        return WholeMessage(_shows_thinking(request))

    def stream(self, request: ChatRequest, head: ReplyHead) -> MessageStream:
        return MessageStream(head, _shows_thinking(request))

    def error_event(self, error: ApiError) -> bytes:
        return error_event(self.error_body(error))


class CountTokensDoor(_MessagesErrors):
    """See `TokenDoor`."""

    path = "/messages/count_tokens"

    def parse(self, body: bytes, served: ServedModels, max_bytes: int, max_items: int) -> TokenQuery:
        return prompt_query(parse_count_request(body, served, max_bytes, max_items))

    def answer(self, query: TokenQuery, tokenized: Tokenized, context_length: int) -> dict[str, Any]:
        return {"input_tokens": tokenized.count}


def message_of(error: ApiError) -> str:
    """Returns the error's message with the names of this format.

    Clients such as Claude Code shorten the conversation if they find "prompt is too long: N tokens > M maximum".
    """
    if error.code == "context_length_exceeded" and (found := _TOO_LONG.search(error.message)) is not None:
        limit = int(found[1]) - 1  # one token is left for the reply
        return f"prompt is too long: {found[2] or ''}{found[3]} tokens > {limit} maximum. Shorten the messages."
    message = error.message
    for name, own in _NAMES:
        message = name.sub(own, message)
    return message


def _shows_thinking(request: ChatRequest) -> bool:
    return isinstance(request, MessagesChat) and request.shows_thinking
