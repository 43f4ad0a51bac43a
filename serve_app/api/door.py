"""Defines a door: one wire format for requests that generate a reply. `doors` lists the doors of the gateway."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from serve_app.api.chat_request import ChatRequest, ServedModels
from serve_app.api.errors import ApiError
from serve_app.contracts.generation import ChoiceEnded, Delta, Finished, ReplyParts

ReplyEvent = Delta | ReplyParts | ChoiceEnded


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """The data of a reply that is known before its first token."""

    id: str
    created: int  # Unix seconds
    model: str
    fingerprint: str
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the cache; an engine may know them only at the first token


class WholeReplyEncoder(Protocol):
    """Collects the events of a non-streamed reply."""

    def add_event(self, event: ReplyEvent) -> None: ...

    def body(self, head: ReplyHead, finished: Finished) -> bytes:
        """Returns the response body as JSON."""


class StreamEncoder(Protocol):
    """Encodes the events of a streamed reply as server-sent events."""

    def event(self, event: ReplyEvent) -> bytes: ...

    def end(self, finished: Finished) -> bytes:
        """Returns the last events of a complete reply."""


class Door(Protocol):
    """Reads requests and writes replies."""

    path: str  # relative to the base URL
    id_prefix: str  # prefix of request ids
    stream_type: str  # `content-type` of a stream
    keep_alive: bytes  # sent in a stream while there is no event
    resumed: bytes  # sent in a stream when another replica continues the reply

    def parse(self, body: bytes, served: ServedModels, max_bytes: int, max_items: int) -> ChatRequest:
        """Parses a request body. Raises ApiError for a body that the format does not allow."""

    def whole(self, request: ChatRequest) -> WholeReplyEncoder: ...

    def stream(self, request: ChatRequest, head: ReplyHead) -> StreamEncoder: ...

    def status(self, error: ApiError) -> int:
        """Returns the HTTP status for a rejected request. Formats use different statuses for the same error."""

    def error_body(self, error: ApiError) -> dict[str, Any]:
        """Returns the JSON body for a rejected request."""

    def error_event(self, error: ApiError) -> bytes:
        """Returns the last event of a stream that fails after its headers were sent."""
