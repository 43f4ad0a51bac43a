"""Defines a token door: a wire format for requests that need only the tokenizer. `doors` lists them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from serve_app.api.chat_request import ChatRequest, ServedModels
from serve_app.api.errors import ApiError
from serve_app.contracts.generation import TokenizeCall, Tokenized


@dataclass(frozen=True, slots=True)
class TokenQuery:
    """A checked request. `call` has no account yet. `named` translates the field names in a replica's error."""

    model: str
    call: TokenizeCall
    named: Callable[[ApiError], ApiError] = lambda error: error


class TokenDoor(Protocol):
    """Reads requests and writes answers."""

    path: str  # relative to the base URL

    def parse(self, body: bytes, served: ServedModels, max_bytes: int, max_items: int) -> TokenQuery:
        """Parses a request body. Raises ApiError for a body that the format does not allow."""

    def answer(self, query: TokenQuery, tokenized: Tokenized, context_length: int) -> dict[str, Any]:
        """Returns the response body. `context_length` is the model's, in tokens."""

    def status(self, error: ApiError) -> int:
        """Returns the HTTP status for a rejected request."""

    def error_body(self, error: ApiError) -> dict[str, Any]:
        """Returns the JSON body for a rejected request."""


def prompt_query(chat: ChatRequest) -> TokenQuery:
    """Returns the query for the number of prompt tokens that a request would be billed for."""
    return TokenQuery(chat.model, conversation_call(chat, only_count=True))


def conversation_call(chat: ChatRequest, **options: Any) -> TokenizeCall:
    """Returns the call for the prompt of a request. `options` are other fields of TokenizeCall."""
    return TokenizeCall(
        "",
        chat.messages,
        tools=chat.tools,
        tool_choice=chat.tool_choice,
        function=chat.forced_function,
        functions=chat.allowed_functions,
        template_variables=chat.chat_template_kwargs,
        reasoning_effort=chat.reasoning_effort,
        continue_final=chat.continue_final,
        **options,
    )
