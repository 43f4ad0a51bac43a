"""What a backend says of a choice, as the client is told it: in chunks of a stream, or gathered into a whole reply."""

from __future__ import annotations

from dataclasses import dataclass, field

from serve_app.api import Call, Choice, ChunkEncoder
from serve_app.backend.messages import Ended, Said
from serve_app.engine.request import Delta, FinishReason, TokenLogprob
from serve_app.tools import CallArguments, CallEnded, CallStarted, Ending, Part, Reasoning, Text


class Finish:
    """Why a choice ended, as the format says it: one that ends after whole calls waits for their results."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: Ending | None = None  # of the last call

    def look(self, parts: tuple[Part, ...]) -> None:
        """Learn which calls there are."""
        for part in parts:
            if isinstance(part, CallEnded):
                self._last = part.ending

    def reason(self, reason: FinishReason) -> str:
        """The finish reason of a choice that the model or a limit has ended."""
        if self._last is Ending.CUT:
            return "length"  # also where a stop string or the model itself cut it: clients must not run half a call
        return "tool_calls" if self._last is not None and reason is FinishReason.STOP else reason.value


class Chunks:
    """The events of a streamed reply of `n` choices, from those of the backend."""

    def __init__(self, encoder: ChunkEncoder, n: int) -> None:
        self._encoder = encoder
        self._unopened = set(range(n))
        self._finishes = [Finish() for _ in range(n)]
        self._unended = set(range(n))

    def of(self, event: Delta | Said | Ended) -> bytes:
        """The chunks to send for one event; the choice's opening chunk comes with its first."""
        encode = self._encoder
        if isinstance(event, Ended):
            return self._end(event.choice, event.reason)
        if isinstance(event, Delta):
            said = event.text or event.tokens
            return self._open(0) + (encode.content(event.text, event.tokens) if said else b"")
        choice, tokens = event.choice, event.tokens
        self._finishes[choice].look(event.parts)
        chunks = [self._open(choice)]
        for part in event.parts:
            if isinstance(part, Text):
                chunks.append(encode.content(part.text, tokens, choice))
            elif isinstance(part, Reasoning):
                chunks.append(encode.reasoning(part.text, tokens, choice))
            elif isinstance(part, CallStarted):
                chunks.append(encode.call(part.index, part.id, part.name, tokens, choice))
            elif isinstance(part, CallArguments):
                chunks.append(encode.arguments(part.index, part.text, tokens, choice))
            else:
                continue
            tokens = ()  # told once, with the first piece
        if tokens:
            chunks.append(encode.content("", tokens, choice))
        return b"".join(chunks)

    def end(self, reason: FinishReason) -> bytes:
        """The chunks that close the reply: of an only choice, its finish."""
        return b"".join(self._end(choice, reason) for choice in sorted(self._unended))

    def _open(self, choice: int) -> bytes:
        if choice not in self._unopened:
            return b""
        self._unopened.discard(choice)
        return self._encoder.role(choice)

    def _end(self, choice: int, reason: FinishReason) -> bytes:
        self._unended.discard(choice)
        return self._open(choice) + self._encoder.finish(self._finishes[choice].reason(reason), choice)


@dataclass(slots=True)
class _Gathered:
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[CallStarted, list[str]]] = field(default_factory=list)
    tokens: list[TokenLogprob] = field(default_factory=list)
    finish: Finish = field(default_factory=Finish)
    reason: FinishReason = FinishReason.STOP


class Whole:
    """Gathers a reply of `n` choices that is not streamed."""

    def __init__(self, n: int) -> None:
        self._choices = [_Gathered() for _ in range(n)]

    def take(self, event: Delta | Said | Ended) -> None:
        """Add what one event says."""
        if isinstance(event, Delta):
            self._choices[0].text.append(event.text)
            self._choices[0].tokens += event.tokens
            return
        choice = self._choices[event.choice]
        if isinstance(event, Ended):
            choice.reason = event.reason
            return
        choice.finish.look(event.parts)
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
                finish_reason=choice.finish.reason(choice.reason),
                reasoning="".join(choice.reasoning) if choice.reasoning else None,
                calls=tuple(Call(call.id, call.name, "".join(pieces)) for call, pieces in choice.calls),
                tokens=choice.tokens if logprobs else None,
            )
            for choice in self._choices
        ]
