"""A chat reply as exact bytes: whole, or as server-sent events, from the events of a model replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Final

from serve_app.api.codec import encode_json, encode_line, encode_text
from serve_app.api.errors import ApiError
from serve_app.contracts.generation import (
    CallArguments,
    CallEnded,
    CallStarted,
    ChoiceEnded,
    Delta,
    Ending,
    FinishReason,
    Part,
    Reasoning,
    ReplyParts,
    Text,
    TokenLogprob,
)

DONE: Final = b"data: [DONE]\n\n"
KEEP_ALIVE: Final = b": keep-alive\n\n"  # a comment: a complete frame that no client takes for data
RESUMED: Final = b": resumed\n\n"

LOWEST_LOGPROB: Final = -9999.0  # for a token that has no chance at all: JSON knows no infinity
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

    `reasoning` of None: there was none. `tokens` of None: the request does not ask for log-probabilities.
    """

    text: str
    finish_reason: str
    reasoning: str | None = None
    calls: tuple[Call, ...] = ()
    tokens: Sequence[TokenLogprob] | None = None

    def as_dict(self, index: int) -> dict[str, Any]:
        """The choice's object. Raises ValueError for a finish reason that the format lacks."""
        # A message that only calls tools has null, not an empty string: clients read that as "no text".
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
            "logprobs": None if self.tokens is None else _logprobs(self.tokens),
            "finish_reason": _known(self.finish_reason),
        }


def complete_reply(
    *, id: str, created: int, model: str, fingerprint: str, choices: Sequence[Choice], usage: Usage
) -> bytes:
    """The body of a reply that is not streamed. Raises ValueError for a finish reason that the format lacks."""
    return encode_json(
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


def error_event(error: ApiError) -> bytes:
    """The event of a failure after the headers; the stream ends after it without DONE."""
    return b"data: " + encode_json(error.body()) + b"\n\n"


class ChunkEncoder:
    """The bytes of each chunk of one streamed reply.

    Each choice has an opening chunk, pieces and a finish; the chunks of several choices may take turns. Then comes the
    usage, if the request asks for it, and DONE. What is the same in every chunk is encoded once, so that a piece of
    text costs one string escape and a join.
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
        self._head = b"data: " + encode_json(fixed)[:-1] + b',"choices":['
        # With usage asked for, every other chunk says null, so that clients can read the field in each.
        self._null_usage = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._after = b'},"logprobs":null,"finish_reason":null}]' + self._null_usage

    def role_chunk(self, choice: int = 0) -> bytes:
        """The opening chunk of a choice."""
        return self._chunk(choice, b'"role":"assistant","content":""')

    def content_chunk(self, text: str, tokens: Sequence[TokenLogprob] = (), choice: int = 0) -> bytes:
        """A piece of the reply, and the tokens whose log-probabilities it carries."""
        return self._chunk(choice, b'"content":' + encode_text(text), tokens)

    def reasoning_chunk(self, text: str, tokens: Sequence[TokenLogprob] = (), choice: int = 0) -> bytes:
        return self._chunk(choice, b'"reasoning_content":' + encode_text(text), tokens)

    def call_chunk(self, index: int, id: str, name: str, tokens: Sequence[TokenLogprob] = (), choice: int = 0) -> bytes:
        """The chunk that begins a tool call; `index` counts the calls of the choice."""
        begun = {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""}}
        return self._chunk(choice, b'"tool_calls":[' + encode_line(begun) + b"]", tokens)

    def arguments_chunk(self, index: int, text: str, tokens: Sequence[TokenLogprob] = (), choice: int = 0) -> bytes:
        """A piece of a call's arguments."""
        piece = b'"tool_calls":[{"index":%d,"function":{"arguments":%b}}]' % (index, encode_text(text))
        return self._chunk(choice, piece, tokens)

    def finish_chunk(self, reason: str, choice: int = 0) -> bytes:
        """The chunk that says why a choice ended. Raises ValueError for a reason that the format lacks."""
        end = b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b}]' % (choice, encode_text(_known(reason)))
        return self._head + end + self._null_usage

    def usage_chunk(self, usage: Usage) -> bytes:
        """The chunk without choices that carries the usage; only for streams that asked for it."""
        if not self._include_usage:
            raise ValueError("the client did not ask for usage in the stream")
        return self._head + b'],"usage":' + encode_json(usage.as_dict()) + b"}\n\n"

    def _chunk(self, choice: int, delta: bytes, tokens: Sequence[TokenLogprob] = ()) -> bytes:
        begin = b'{"index":%d,"delta":{' % choice
        if not tokens:
            return b"".join((self._head, begin, delta, self._after))
        logprobs = b'},"logprobs":' + encode_line(_logprobs(tokens)) + b',"finish_reason":null}]'
        return b"".join((self._head, begin, delta, logprobs, self._null_usage))


class StreamedReply:
    """The chunks of a streamed reply of `n` choices, from the events of a replica."""

    def __init__(self, encoder: ChunkEncoder, n: int) -> None:
        self._encoder = encoder
        self._unopened = set(range(n))
        self._unended = set(range(n))
        self._last_calls: list[Ending | None] = [None] * n

    def chunks(self, event: Delta | ReplyParts | ChoiceEnded) -> bytes:
        """The chunks to send for one event; the choice's opening chunk comes with its first."""
        encoder = self._encoder
        if isinstance(event, ChoiceEnded):
            return self._finish_choice(event.choice, event.reason)
        if isinstance(event, Delta):
            piece = encoder.content_chunk(event.text, event.tokens) if event.text or event.tokens else b""
            return self._opening_chunk(0) + piece
        choice, tokens = event.choice, event.tokens
        self._last_calls[choice] = _last_call(event.parts, self._last_calls[choice])
        chunks = [self._opening_chunk(choice)]
        for part in event.parts:
            if isinstance(part, Text):
                chunks.append(encoder.content_chunk(part.text, tokens, choice))
            elif isinstance(part, Reasoning):
                chunks.append(encoder.reasoning_chunk(part.text, tokens, choice))
            elif isinstance(part, CallStarted):
                chunks.append(encoder.call_chunk(part.index, part.id, part.name, tokens, choice))
            elif isinstance(part, CallArguments):
                chunks.append(encoder.arguments_chunk(part.index, part.text, tokens, choice))
            else:
                continue
            tokens = ()  # only the first chunk carries them
        if tokens:
            chunks.append(encoder.content_chunk("", tokens, choice))
        return b"".join(chunks)

    def closing_chunks(self, reason: FinishReason) -> bytes:
        """The chunks that close the choices that have not ended yet. `reason` is why the reply ended."""
        return b"".join(self._finish_choice(choice, reason) for choice in sorted(self._unended))

    def _opening_chunk(self, choice: int) -> bytes:
        if choice not in self._unopened:
            return b""
        self._unopened.discard(choice)
        return self._encoder.role_chunk(choice)

    def _finish_choice(self, choice: int, reason: FinishReason) -> bytes:
        self._unended.discard(choice)
        return self._opening_chunk(choice) + self._encoder.finish_chunk(
            _finish_reason(self._last_calls[choice], reason), choice
        )


@dataclass(slots=True)
class _Pieces:
    """What has come of one choice."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[CallStarted, list[str]]] = field(default_factory=list)
    tokens: list[TokenLogprob] = field(default_factory=list)
    last_call: Ending | None = None
    reason: FinishReason = FinishReason.STOP


class WholeReply:
    """Gathers the events of a reply of `n` choices that is not streamed."""

    def __init__(self, n: int) -> None:
        self._choices = [_Pieces() for _ in range(n)]

    def add_event(self, event: Delta | ReplyParts | ChoiceEnded) -> None:
        if isinstance(event, Delta):
            self._choices[0].text.append(event.text)
            self._choices[0].tokens += event.tokens
            return
        choice = self._choices[event.choice]
        if isinstance(event, ChoiceEnded):
            choice.reason = event.reason
            return
        choice.last_call = _last_call(event.parts, choice.last_call)
        choice.tokens += event.tokens
        for part in event.parts:
            if isinstance(part, Text):
                choice.text.append(part.text)
            elif isinstance(part, Reasoning):
                choice.reasoning.append(part.text)
            elif isinstance(part, CallStarted):
                choice.calls.append((part, []))
            elif isinstance(part, CallArguments):
                choice.calls[-1][1].append(part.text)

    def choices(self, reason: FinishReason, logprobs: bool) -> list[Choice]:
        """All choices. `reason` is why the reply ended, which of an only choice is its own."""
        if len(self._choices) == 1:
            self._choices[0].reason = reason
        return [
            Choice(
                text="".join(choice.text),
                finish_reason=_finish_reason(choice.last_call, choice.reason),
                reasoning="".join(choice.reasoning) if choice.reasoning else None,
                calls=tuple(Call(call.id, call.name, "".join(pieces)) for call, pieces in choice.calls),
                tokens=choice.tokens if logprobs else None,
            )
            for choice in self._choices
        ]


def _last_call(parts: tuple[Part, ...], before: Ending | None) -> Ending | None:
    """How the last call of a choice ended, once it has `parts` too."""
    return next((part.ending for part in reversed(parts) if isinstance(part, CallEnded)), before)


def _finish_reason(last_call: Ending | None, reason: FinishReason) -> str:
    """Why a choice ended, in the words of the format: one that ends after whole calls waits for their results."""
    if last_call is Ending.CUT:
        return "length"  # also where a stop string or the model itself cut it: clients must not run half a call
    return "tool_calls" if last_call is not None and reason is FinishReason.STOP else reason.value


def _known(reason: str) -> str:
    if reason not in FINISH_REASONS:
        raise ValueError(f"the format has no finish reason {reason!r}")
    return reason


def _logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The `logprobs` object of a choice. The bytes of its tokens, put together, spell the text."""
    content = [{**_entry(token), "top_logprobs": [_entry(other) for other in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def _entry(token: TokenLogprob) -> dict[str, Any]:
    logprob = token.logprob if isfinite(token.logprob) else LOWEST_LOGPROB
    return {"token": token.text, "logprob": logprob, "bytes": list(token.raw)}
