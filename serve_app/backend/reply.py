"""The reply of one call as it is told: what the engine says of each choice, read into parts and counted together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from serve_app.backend.messages import BackendEvent, Ended, GenerateCall, Said
from serve_app.backend.told import ToldTokens
from serve_app.engine.request import Delta, Event, Finished, FinishReason, Started
from serve_app.tools import Part, Reasoning, ReplyReader, Text

_GIVEN_UP = (FinishReason.ABORT, FinishReason.DEADLINE, FinishReason.ERROR)


class Reply:
    """Turns the engine's events into those that leave the replica.

    `readers` belong to the choices; None says that all of it is text. `produced` is what there is to bill so far, over
    all choices, the prompt once. `is_over`: Finished was the last event taken.
    """

    def __init__(self, call: GenerateCall, prompt_tokens: int, readers: Sequence[ReplyReader | None]) -> None:
        self.produced = Finished(FinishReason.ABORT, prompt_tokens, 0, 0)
        self.is_over = False
        tells = call.sampling.logprobs is not None
        self._choices = [_Choice(number, reader, tells) for number, reader in enumerate(readers)]
        self._left = len(readers)

    def take(self, number: int, event: Event) -> Iterator[BackendEvent]:
        """What to tell when a choice has come so far. Every event that is yielded is part of `produced` already."""
        choice = self._choices[number]
        if isinstance(event, Delta):
            choice.completion_tokens = event.completion_tokens
            self._count()
            if (told := self._told(choice, event)) is not None:
                yield told
        elif isinstance(event, Started):
            if number == 0:  # the others find the prompt in the cache, and nobody pays for it twice
                self.produced = replace(self.produced, cached_tokens=event.cached_tokens)
                yield event
        else:
            yield from self._finished(choice, event)

    def _told(self, choice: _Choice, event: Delta) -> Delta | Said | None:
        tokens = choice.told.take(event.text, event.tokens) if choice.told is not None else ()
        total = self.produced.completion_tokens
        if choice.reader is None:
            if len(self._choices) == 1:
                return replace(event, tokens=tokens) if choice.told is not None else event
            return Said((Text(event.text),), total, tokens, choice.number)
        parts = choice.read(event.text)
        return Said(parts, total, tokens, choice.number) if parts or tokens else None

    def _finished(self, choice: _Choice, event: Finished) -> Iterator[BackendEvent]:
        choice.completion_tokens = event.completion_tokens
        choice.finish(event)
        if event.reason in _GIVEN_UP:
            self._end(event.reason, event)
            yield self.produced
            return
        self._count()
        if choice.last:
            yield Said(choice.last, self.produced.completion_tokens, (), choice.number)
        self._left -= 1
        if len(self._choices) > 1:
            yield Ended(choice.number, event.reason)
        if not self._left:
            self._end(event.reason if len(self._choices) == 1 else FinishReason.STOP, event)
            yield self.produced

    def _count(self) -> None:
        self.produced = replace(self.produced, completion_tokens=sum(c.completion_tokens for c in self._choices))

    def _end(self, reason: FinishReason, last: Finished) -> None:
        self.is_over = True
        cached = last.cached_tokens if len(self._choices) == 1 else self.produced.cached_tokens
        self.produced = replace(
            self.produced,
            reason=reason,
            cached_tokens=cached,
            completion_tokens=sum(choice.completion_tokens for choice in self._choices),
            marked_tokens=sum(choice.reasoning_tokens for choice in self._choices) or None,
        )


class _Choice:
    """How far one choice is."""

    __slots__ = ("completion_tokens", "last", "number", "reader", "reasoned", "reasoning_tokens", "told")

    def __init__(self, number: int, reader: ReplyReader | None, tells: bool) -> None:
        self.number = number
        self.reader = reader
        self.told = ToldTokens() if tells else None
        self.completion_tokens = 0
        self.reasoned = False
        self.reasoning_tokens = 0
        self.last: tuple[Part, ...] = ()  # parts that were held back until the end

    def read(self, text: str) -> tuple[Part, ...]:
        assert self.reader is not None
        return self._seen(tuple(self.reader.push(text)))

    def finish(self, event: Finished) -> None:
        if self.reader is not None:
            self.last = self._seen(tuple(self.reader.finish(event.reason.value)))
        if self.reasoned:
            # Without the mark that ends it, the reply was reasoning to its end.
            marked = event.marked_tokens
            self.reasoning_tokens = event.completion_tokens if marked is None else marked

    def _seen(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        self.reasoned = self.reasoned or any(isinstance(part, Reasoning) for part in parts)
        return parts
