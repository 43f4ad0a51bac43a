"""Builds the reply to one call: parses the engine's events of each choice, counts them together and sends them on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from serve_app.contracts.generation import (
    BackendEvent,
    ChoiceEnded,
    Delta,
    Event,
    Finished,
    FinishReason,
    GenerateCall,
    Part,
    Reasoning,
    ReplyParts,
    Started,
    Text,
    TokenLogprob,
)
from serve_app.model.token_alignment import TokenAligner
from serve_app.model.tools.parser import ReplyParser

_GIVEN_UP = (FinishReason.ABORT, FinishReason.DEADLINE, FinishReason.ERROR)


class Reply:
    """Turns the engine's events into the events that the replica sends.

    `parsers` has one parser per choice. A choice whose parser is None is only text.
    """

    def __init__(self, call: GenerateCall, prompt_tokens: int, parsers: Sequence[ReplyParser | None]) -> None:
        self.is_over = False  # whether the events include Finished
        self._prompt_tokens = prompt_tokens
        self._cached_tokens = 0
        self._reason = FinishReason.ABORT
        self._stop: str | None = None
        has_logprobs = call.sampling.logprobs is not None
        self._choices = [_Choice(parser, has_logprobs) for parser in parsers]
        self._unfinished = len(parsers)
        self._has_ids = call.sampling.token_ids

    @property
    def produced(self) -> Finished:
        """The billable usage so far: the prompt once, and the output of all choices."""
        return Finished(
            self._reason,
            self._prompt_tokens,
            self._cached_tokens,
            self._completion_tokens(),
            sum(choice.reasoning_tokens for choice in self._choices) or None,
            self._stop,
        )

    def _completion_tokens(self) -> int:
        return sum(choice.completion_tokens for choice in self._choices)

    def events(self, number: int, event: Event) -> Iterator[BackendEvent]:
        """Yields the events to send for an event of a choice. `produced` includes each event before it is yielded."""
        choice = self._choices[number]
        if isinstance(event, Started):
            if number == 0:  # the other choices find the prompt in the cache, and are not charged for it
                self._cached_tokens = event.cached_tokens
                choice.replay(event)
                yield event if not event.said else replace(event, said_text="")
            return
        is_first = not self._completion_tokens()
        choice.completion_tokens = event.completion_tokens
        if isinstance(event, Finished):
            yield from self._end_choice(number, event)
        elif len(self._choices) == 1 and choice.parser is None:
            yield event if choice.aligner is None else replace(event, tokens=choice.tokens(event))
        else:
            parts, tokens = choice.parts(event.text), choice.tokens(event)
            choice.unsent_ids += event.token_ids
            if parts or tokens or is_first:  # the request is billed from the first token on
                ids, choice.unsent_ids = choice.unsent_ids, ()
                yield ReplyParts(parts, self._completion_tokens(), tokens, number, ids, event.is_last)

    def _end_choice(self, number: int, event: Finished) -> Iterator[BackendEvent]:
        several = len(self._choices) > 1
        if not several:
            self._cached_tokens, self._stop = event.cached_tokens, event.stop
        last_parts = self._choices[number].last_parts(event)
        if event.reason in _GIVEN_UP:  # all choices end with this one
            self._unfinished = 0
            self._reason = event.reason
        else:
            if last_parts:
                yield ReplyParts(last_parts, self._completion_tokens(), (), number, is_last=self._has_ids)
            self._unfinished -= 1
            if several:
                yield ChoiceEnded(number, event.reason)
            if not self._unfinished:
                self._reason = FinishReason.STOP if several else event.reason
        if not self._unfinished:
            self.is_over = True
            yield self.produced


class _Choice:
    """The progress of one choice."""

    __slots__ = ("_has_reasoning", "aligner", "completion_tokens", "parser", "reasoning_tokens", "unsent_ids")

    def __init__(self, parser: ReplyParser | None, has_logprobs: bool) -> None:
        self.parser = parser
        self.aligner = TokenAligner() if has_logprobs else None
        self.completion_tokens = 0
        self.reasoning_tokens = 0  # counted at the end
        self.unsent_ids: tuple[int, ...] = ()  # ids of tokens whose text is held back
        self._has_reasoning = False

    def replay(self, started: Started) -> None:
        """Takes over the part of the reply that another replica has sent."""
        self.completion_tokens = started.said
        self.parts(started.said_text)

    def parts(self, text: str) -> tuple[Part, ...]:
        if not text:
            return ()
        return (Text(text),) if self.parser is None else self._noting_reasoning(self.parser.feed(text))

    def tokens(self, event: Delta) -> tuple[TokenLogprob, ...]:
        return () if self.aligner is None else self.aligner.align(event.text, event.tokens)

    def last_parts(self, event: Finished) -> tuple[Part, ...]:
        """Returns the parts that were held back until the end."""
        parts = self._noting_reasoning(self.parser.feed_end(event.reason)) if self.parser is not None else ()
        if self._has_reasoning:
            # Without an end marker, the whole reply was reasoning.
            marked = event.marked_tokens
            self.reasoning_tokens = event.completion_tokens if marked is None else marked
        return parts

    def _noting_reasoning(self, parts: list[Part]) -> tuple[Part, ...]:
        self._has_reasoning = self._has_reasoning or any(isinstance(part, Reasoning) for part in parts)
        return tuple(parts)
