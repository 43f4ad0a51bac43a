"""Encodes the events of a model replica as a chat reply: one JSON body, or server-sent events."""

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
KEEP_ALIVE: Final = b": keep-alive\n\n"  # a complete frame with an SSE comment, which clients do not read as data
RESUMED: Final = b": resumed\n\n"

LOWEST_LOGPROB: Final = -9999.0  # logprob of a token with probability 0, because JSON has no infinity
FINISH_REASONS: Final = frozenset({"stop", "length", "tool_calls", "content_filter"})


@dataclass(frozen=True, slots=True)
class Usage:
    """The billed tokens of one request. `cached_tokens` are part of the prompt."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Returns the `usage` object. Cache hits plus misses equal the prompt tokens."""
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
    """A tool call in a reply. `arguments` is the JSON text that the model wrote."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice of a non-streamed reply.

    `reasoning` is None if there was none. `tokens` is None if the request did not ask for log-probabilities.
    """

    text: str
    finish_reason: str
    reasoning: str | None = None
    calls: tuple[Call, ...] = ()
    tokens: Sequence[TokenLogprob] | None = None

    def as_dict(self, index: int) -> dict[str, Any]:
        """Returns the choice's object. Raises ValueError for a finish reason that the format does not have."""
        # A message with only tool calls has null content, not an empty string: clients read null as "no text".
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
    """Returns the body of a non-streamed reply. Raises ValueError for a finish reason that the format does not have."""
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
    """Returns the event for a failure after the headers were sent. It is the last event: DONE does not follow."""
    return b"data: " + encode_json(error.body()) + b"\n\n"


class ChunkEncoder:
    """Encodes the chunks of one streamed reply.

    Each choice has an opening chunk, pieces and a finish chunk. The chunks of several choices may be interleaved. The
    last finish chunk has the usage. With `include_usage`, a separate chunk without choices has it instead. The event
    DONE ends the stream.

    The parts that are the same in every chunk are encoded once. For each piece of text, the encoder therefore only
    escapes one string and joins the parts.
    """

    __slots__ = ("_after", "_head", "_include_usage", "_tail")

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
        # If the request asks for usage, all other chunks have null, so that clients can read the field in each chunk.
        self._end_chunks_with(b',"usage":null}\n\n' if include_usage else b"}\n\n")

    def set_usage(self, usage: Usage) -> None:
        """Adds this usage to the chunks that follow."""
        self._end_chunks_with(b',"usage":' + encode_json(usage.as_dict()) + b"}\n\n")

    def _end_chunks_with(self, tail: bytes) -> None:
        self._tail = tail
        self._after = b'},"logprobs":null,"finish_reason":null}]' + tail

    def role_chunk(self, choice: int = 0, *, begins_with_call: bool = False) -> bytes:
        """Returns a choice's opening chunk. With `begins_with_call`, its content is null: clients expect no text."""
        return self._chunk(choice, b'"role":"assistant","content":' + (b"null" if begins_with_call else b'""'))

    def content_chunk(self, text: str, tokens: Sequence[TokenLogprob] = (), choice: int = 0) -> bytes:
        """Returns the chunk for a piece of the reply. It has the log-probabilities of `tokens`."""
        return self._chunk(choice, b'"content":' + encode_text(text), tokens)

    def reasoning_chunk(self, text: str, tokens: Sequence[TokenLogprob] = (), choice: int = 0) -> bytes:
        return self._chunk(choice, b'"reasoning_content":' + encode_text(text), tokens)

    def call_chunk(self, index: int, id: str, name: str, tokens: Sequence[TokenLogprob] = (), choice: int = 0) -> bytes:
        """Returns the chunk that begins a tool call. `index` counts the calls of the choice."""
        begun = {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""}}
        return self._chunk(choice, b'"tool_calls":[' + encode_line(begun) + b"]", tokens)

    def arguments_chunk(self, index: int, text: str, tokens: Sequence[TokenLogprob] = (), choice: int = 0) -> bytes:
        """Returns the chunk for a piece of a call's arguments."""
        piece = b'"tool_calls":[{"index":%d,"function":{"arguments":%b}}]' % (index, encode_text(text))
        return self._chunk(choice, piece, tokens)

    def finish_chunk(self, reason: str, choice: int = 0) -> bytes:
        """Returns the chunk with a choice's finish reason. Raises ValueError for an unknown reason."""
        end = b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b}]' % (choice, encode_text(_known(reason)))
        return self._head + end + self._tail

    def usage_chunk(self, usage: Usage) -> bytes:
        """Returns the chunk with the usage and without choices. Raises ValueError if the client did not ask for it."""
        if not self._include_usage:
            raise ValueError("the client did not ask for usage in the stream")
        return self._head + b'],"usage":' + encode_json(usage.as_dict()) + b"}\n\n"

    def _chunk(self, choice: int, delta: bytes, tokens: Sequence[TokenLogprob] = ()) -> bytes:
        begin = b'{"index":%d,"delta":{' % choice
        if not tokens:
            return b"".join((self._head, begin, delta, self._after))
        logprobs = b'},"logprobs":' + encode_line(_logprobs(tokens)) + b',"finish_reason":null}]'
        return b"".join((self._head, begin, delta, logprobs, self._tail))


class StreamedReply:
    """Builds the chunks of a streamed reply of `n` choices from the events of a replica."""

    def __init__(self, encoder: ChunkEncoder, n: int) -> None:
        self._encoder = encoder
        self._unopened = set(range(n))
        self._unended = set(range(n))
        self._last_calls: list[Ending | None] = [None] * n
        self._last_reason: FinishReason | None = None  # why the last choice ended; `closing_chunks` sends it

    def chunks(self, event: Delta | ReplyParts | ChoiceEnded) -> bytes:
        """Returns the chunks to send for one event. A choice's first event also produces its opening chunk."""
        encoder = self._encoder
        if isinstance(event, ChoiceEnded):
            if len(self._unended) == 1:
                self._last_reason = event.reason  # sent later, as the finish chunk also has the usage
                return b""
            return self._finish_choice(event.choice, event.reason)
        if isinstance(event, Delta):
            piece = encoder.content_chunk(event.text, event.tokens) if event.text or event.tokens else b""
            return self._opening_chunk(0) + piece
        choice, tokens = event.choice, event.tokens
        self._last_calls[choice] = _last_call(event.parts, self._last_calls[choice])
        begins_with_call = bool(event.parts) and isinstance(event.parts[0], CallStarted)
        chunks = [self._opening_chunk(choice, begins_with_call=begins_with_call)]
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
            tokens = ()  # only the first chunk carries the tokens
        if tokens:
            chunks.append(encoder.content_chunk("", tokens, choice))
        return b"".join(chunks)

    def closing_chunks(self, reason: FinishReason, usage: Usage | None = None) -> bytes:
        """Returns the finish chunks that have not been sent yet. `reason` is why the reply ended.

        The last chunk has the usage, if `usage` is given.
        """
        reason = self._last_reason or reason
        *others, last = sorted(self._unended)
        closing = b"".join(self._finish_choice(choice, reason) for choice in others) + self._opening_chunk(last)
        if usage is not None:
            self._encoder.set_usage(usage)
        return closing + self._finish_choice(last, reason)

    def _opening_chunk(self, choice: int, *, begins_with_call: bool = False) -> bytes:
        if choice not in self._unopened:
            return b""
        self._unopened.discard(choice)
        return self._encoder.role_chunk(choice, begins_with_call=begins_with_call)

    def _finish_choice(self, choice: int, reason: FinishReason) -> bytes:
        self._unended.discard(choice)
        return self._opening_chunk(choice) + self._encoder.finish_chunk(
            _finish_reason(self._last_calls[choice], reason), choice
        )


@dataclass(slots=True)
class _Pieces:
    """The pieces of one choice that have arrived."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[CallStarted, list[str]]] = field(default_factory=list)
    tokens: list[TokenLogprob] = field(default_factory=list)
    last_call: Ending | None = None
    reason: FinishReason = FinishReason.STOP


class WholeReply:
    """Collects the events of a non-streamed reply of `n` choices."""

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
        """Returns all choices. `reason` is why the reply ended, and applies to the choice if there is only one."""
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
    """Returns how a choice's latest call ended: the last call in `parts`, or `before` if no call ended there."""
    return next((part.ending for part in reversed(parts) if isinstance(part, CallEnded)), before)


def _finish_reason(last_call: Ending | None, reason: FinishReason) -> str:
    """Returns the format's finish reason for a choice: `tool_calls` if it has calls and the last one was not cut."""
    if last_call is Ending.CUT:
        return "length"  # clients must not run an incomplete call
    return "tool_calls" if last_call is not None and reason is FinishReason.STOP else reason.value


def _known(reason: str) -> str:
    if reason not in FINISH_REASONS:
        raise ValueError(f"the format has no finish reason {reason!r}")
    return reason


def _logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Returns the `logprobs` object of a choice. Joining the bytes of its tokens gives the text."""
    content = [
        {**logprob_entry(token), "top_logprobs": [logprob_entry(other) for other in token.top]} for token in tokens
    ]
    return {"content": content, "refusal": None}


def logprob_entry(token: TokenLogprob) -> dict[str, Any]:
    logprob = token.logprob if isfinite(token.logprob) else LOWEST_LOGPROB
    return {"token": token.text, "logprob": logprob, "bytes": list(token.raw)}
