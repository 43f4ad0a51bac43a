"""A door: one wire format for requests that generate a reply. `doors` lists those that the gateway serves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from serve_app.api.chat_request import ChatRequest, ServedModels
from serve_app.api.errors import ApiError
from serve_app.contracts.generation import ChoiceEnded, Delta, Finished, ReplyParts

ReplyEvent = Delta | ReplyParts | ChoiceEnded


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What is known of a reply before its first token."""

    id: str
    created: int  # Unix seconds
    model: str
    fingerprint: str


class WholeReplyEncoder(Protocol):
    """Gathers the events of a reply that is not streamed."""

    def add_event(self, event: ReplyEvent) -> None: ...

    def body(self, head: ReplyHead, finished: Finished) -> bytes:
        """The response's body, in JSON."""


class StreamEncoder(Protocol):
    """Encodes the events of a streamed reply as server-sent events."""

    def event(self, event: ReplyEvent) -> bytes: ...

    def end(self, finished: Finished) -> bytes:
        """The last events of a complete reply."""


class Door(Protocol):
    """How requests are read and replies are written."""

    path: str  # below the base address
    id_prefix: str  # of a request's id
    keep_alive: bytes  # in a stream, while no event comes
    resumed: bytes  # in a stream, when another replica continues the reply

    def parse(self, body: bytes, served: ServedModels, max_bytes: int, max_items: int) -> ChatRequest:
        """Raises ApiError for a body that the format does not allow."""

    def whole(self, request: ChatRequest) -> WholeReplyEncoder: ...

    def stream(self, request: ChatRequest, head: ReplyHead) -> StreamEncoder: ...

    def error_body(self, error: ApiError) -> dict[str, Any]:
        """The JSON body of a refused request."""

    def error_event(self, error: ApiError) -> bytes:
        """The last event of a stream that fails after its headers were sent."""
