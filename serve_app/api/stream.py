"""Replies as exact bytes: the complete one, and the server-sent events of a streamed one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from serve_app.api.codec import encode, encode_line, encode_text
from serve_app.api.errors import ApiError
from serve_app.api.logprobs import ToldToken, logprobs_object

DONE: Final = b"data: [DONE]\n\n"
KEEP_ALIVE: Final = b": keep-alive\n\n"  # a comment: a complete frame that no client takes for data
LINE_FEED: Final = b"\n"  # the same for a complete reply: JSON may begin with whitespace (RFC 8259, section 2)

FINISH_REASONS: Final = frozenset({"stop", "length", "tool_calls", "content_filter"})


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request, as billed. `cached_tokens` are part of the prompt."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The `usage` object. Cache hits and misses together are the prompt."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "prompt_cache_hit_tokens": self.cached_tokens,
            "prompt_cache_miss_tokens": self.prompt_tokens - self.cached_tokens,
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of a reply. `arguments` are the JSON text that the model wrote."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice of a reply that is not streamed.

    `reasoning` of None: there was none. `tokens` are those to tell; None: their telling was not asked for.
    """

    text: str
    finish_reason: str
    reasoning: str | None = None
    calls: tuple[Call, ...] = ()
    tokens: Sequence[ToldToken] | None = None

    def as_dict(self, index: int) -> dict[str, Any]:
        """The choice's object. Raises ValueError for a finish reason that the format lacks."""
        # A message that only calls has null, not an empty string, by which clients tell that nothing was said.
        message: dict[str, Any] = {"role": "assistant", "content": None if self.calls and not self.text else self.text}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return {
            "index": index,
            "message": message,
            "logprobs": None if self.tokens is None else logprobs_object(self.tokens),
            "finish_reason": _reason(self.finish_reason),
        }


def complete_reply(
    *, id: str, created: int, model: str, fingerprint: str, choices: Sequence[Choice], usage: Usage
) -> bytes:
    """The body of a reply that is not streamed. Raises ValueError for a finish reason that the format lacks."""
    return encode(
        {
            "id": id,
            "object": "chat.completion",
            "created": created,
            "model": model,
            "choices": [choice.as_dict(index) for index, choice in enumerate(choices)],
            "usage": usage.as_dict(),
            "system_fingerprint": fingerprint,
        }
    )


class ChunkEncoder:
    """The events of one streamed reply, in the order `role`, pieces..., `finish`, `usage` if asked for, DONE.

    Each choice, told by its index, has its own role, pieces and finish; those of several may take turns. What is the
    same in every chunk is encoded once, so that a piece of text costs one string escape and a join.
    """

    __slots__ = ("_after", "_head", "_include_usage", "_null_usage")

    def __init__(self, *, id: str, created: int, model: str, fingerprint: str, include_usage: bool) -> None:
        fixed = {
            "id": id,
            "object": "chat.completion.chunk",
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._include_usage = include_usage
        self._head = b"data: " + encode(fixed)[:-1] + b',"choices":['
        # With usage asked for, every other chunk says null, so that clients can look at the field blindly.
        self._null_usage = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._after = b'},"logprobs":null,"finish_reason":null}]' + self._null_usage

    def role(self, choice: int = 0) -> bytes:
        """The opening chunk of a choice."""
        return self._chunk(choice, b'"role":"assistant","content":""')

    def content(self, text: str, tokens: Sequence[ToldToken] = (), choice: int = 0) -> bytes:
        """A chunk with a piece of the reply and the tokens to tell with it."""
        return self._chunk(choice, b'"content":' + encode_text(text), tokens)

    def reasoning(self, text: str, tokens: Sequence[ToldToken] = (), choice: int = 0) -> bytes:
        """A chunk with a piece of what the model says to itself."""
        return self._chunk(choice, b'"reasoning_content":' + encode_text(text), tokens)

    def call(self, index: int, id: str, name: str, tokens: Sequence[ToldToken] = (), choice: int = 0) -> bytes:
        """The chunk that begins a tool call; `index` counts the calls of the choice."""
        begun = {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""}}
        return self._chunk(choice, b'"tool_calls":[' + encode_line(begun) + b"]", tokens)

    def arguments(self, index: int, text: str, tokens: Sequence[ToldToken] = (), choice: int = 0) -> bytes:
        """A chunk with a piece of a call's arguments."""
        piece = b'"tool_calls":[{"index":%d,"function":{"arguments":%b}}]' % (index, encode_text(text))
        return self._chunk(choice, piece, tokens)

    def finish(self, reason: str, choice: int = 0) -> bytes:
        """The chunk that says why a choice ended. Raises ValueError for a reason that the format lacks."""
        told = b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b}]' % (choice, encode_text(_reason(reason)))
        return self._head + told + self._null_usage

    def usage(self, usage: Usage) -> bytes:
        """The chunk without choices that carries the usage; only for streams that asked for it."""
        if not self._include_usage:
            raise ValueError("the client did not ask for usage in the stream")
        return self._head + b'],"usage":' + encode(usage.as_dict()) + b"}\n\n"

    @staticmethod
    def error(error: ApiError) -> bytes:
        """The event of a failure after the headers; the stream ends after it without DONE."""
        return b"data: " + encode(error.body()) + b"\n\n"

    def _chunk(self, choice: int, delta: bytes, tokens: Sequence[ToldToken] = ()) -> bytes:
        begin = b'{"index":%d,"delta":{' % choice
        if not tokens:
            return b"".join((self._head, begin, delta, self._after))
        told = b'},"logprobs":' + encode_line(logprobs_object(tokens)) + b',"finish_reason":null}]'
        return b"".join((self._head, begin, delta, told, self._null_usage))


def _reason(reason: str) -> str:
    if reason not in FINISH_REASONS:
        raise ValueError(f"the format has no finish reason {reason!r}")
    return reason
