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


def complete_reply(
    *,
    id: str,
    created: int,
    model: str,
    fingerprint: str,
    text: str,
    finish_reason: str,
    usage: Usage,
    tokens: Sequence[ToldToken] | None = None,
) -> bytes:
    """The body of a reply that is not streamed. `tokens` are those to tell; None: their telling was not asked for.

    Raises ValueError for a finish reason that the format lacks.
    """
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "logprobs": None if tokens is None else logprobs_object(tokens),
        "finish_reason": _reason(finish_reason),
    }
    return encode(
        {
            "id": id,
            "object": "chat.completion",
            "created": created,
            "model": model,
            "choices": [choice],
            "usage": usage.as_dict(),
            "system_fingerprint": fingerprint,
        }
    )


class ChunkEncoder:
    """The events of one streamed reply, in the order `role`, `content`..., `finish`, `usage` if asked for, DONE.

    What is the same in every chunk is encoded once, so that a piece of text costs one string escape and a join.
    """

    __slots__ = ("_after", "_before", "_head", "_include_usage", "_null_usage")

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
        self._before = self._head + b'{"index":0,"delta":{"content":'
        self._after = b'},"logprobs":null,"finish_reason":null}]' + self._null_usage

    def role(self) -> bytes:
        """The opening chunk."""
        delta = b'{"index":0,"delta":{"role":"assistant","content":""'
        return self._head + delta + self._after

    def content(self, text: str, tokens: Sequence[ToldToken] = ()) -> bytes:
        """A chunk with a piece of the reply and the tokens to tell with it."""
        if not tokens:
            return b"".join((self._before, encode_text(text), self._after))
        told = b'},"logprobs":' + encode_line(logprobs_object(tokens)) + b',"finish_reason":null}]'
        return b"".join((self._before, encode_text(text), told, self._null_usage))

    def finish(self, reason: str) -> bytes:
        """The chunk that says why the reply ended. Raises ValueError for a reason that the format lacks."""
        choice = b'{"index":0,"delta":{},"logprobs":null,"finish_reason":' + encode_text(_reason(reason)) + b"}]"
        return self._head + choice + self._null_usage

    def usage(self, usage: Usage) -> bytes:
        """The chunk without choices that carries the usage; only for streams that asked for it."""
        if not self._include_usage:
            raise ValueError("the client did not ask for usage in the stream")
        return self._head + b'],"usage":' + encode(usage.as_dict()) + b"}\n\n"

    @staticmethod
    def error(error: ApiError) -> bytes:
        """The event of a failure after the headers; the stream ends after it without DONE."""
        return b"data: " + encode(error.body()) + b"\n\n"


def _reason(reason: str) -> str:
    if reason not in FINISH_REASONS:
        raise ValueError(f"the format has no finish reason {reason!r}")
    return reason
