"""Builds the reply to one call: parses the engine's events of each choice and counts the usage of all choices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from serve_app.contracts.generation import (
    BackendEvent,
    ChoiceEnded,
    Delta,
    Event,
    Finished,
    FinishReason,
    GenerateCall,
    Part,
    PromptEcho,
    PromptScored,
    Reasoning,
    ReplyParts,
    Started,
    Text,
    TokenLogprob,
)
from serve_app.model.logprob_alignment import TokenAligner
from serve_app.model.tools.parser import ReplyParser

_ENDS_ALL = (FinishReason.ABORT, FinishReason.DEADLINE, FinishReason.ERROR)  # reasons that end all choices


class Reply:
    """Turns the engine's events into the events that the replica sends.

    `prompt_tokens` has the length of each prompt. `echoes` has the prompts to send back, if any. `parsers` has one
    parser per choice, in the order of the prompts; None for a choice that can only be text.
    """

    def __init__(
        self,
        call: GenerateCall,
        prompt_tokens: Sequence[int],
        parsers: Sequence[ReplyParser | None],
        echoes: Sequence[PromptEcho | None] = (),
    ) -> None:
        self.is_over = False  # whether the events include Finished
        self._prompts = [_Prompt(tokens) for tokens in prompt_tokens]
        self._prompts[0].is_billed = True
        for prompt, echo in zip(self._prompts, echoes, strict=False):
            prompt.echo = echo
        self._per_prompt = len(parsers) // len(prompt_tokens)
        self._has_echo = False  # whether a prompt was sent back
        self._reason = FinishReason.ABORT
        self._stop: str | None = None
        has_logprobs = call.sampling.logprobs is not None
        self._choices = [_Choice(parser, has_logprobs) for parser in parsers]
        self._unfinished = len(parsers)
        self._is_plain = len(parsers) == 1 and parsers[0] is None and not has_logprobs
        self._has_ids = call.sampling.token_ids

    @property
    def produced(self) -> Finished:
        """The billable usage so far: each prompt once, and the output of all choices.

        A prompt after the first one counts only when it has output.
        """
        return Finished(
            self._reason,
            *self._prompt_usage(),
            self._completion_tokens(),
            sum(choice.reasoning_tokens for choice in self._choices) or None,
            self._stop,
        )

    @property
    def has_output(self) -> bool:
        """Whether there is something to bill."""
        return self._has_echo or self._completion_tokens() > 0

    def _prompt_usage(self) -> tuple[int, int]:
        """Returns the tokens of the billed prompts, and how many of them were cached."""
        billed = [prompt for prompt in self._prompts if prompt.is_billed]
        return sum(prompt.tokens for prompt in billed), sum(prompt.cached_tokens for prompt in billed)

    def _completion_tokens(self) -> int:
        return sum(choice.completion_tokens for choice in self._choices)

    def events(self, number: int, event: Event) -> Iterator[BackendEvent]:
        """Yields the events to send for an event of a choice. `produced` includes each event before it is yielded."""
        choice = self._choices[number]
        if type(event) is Delta and self._is_plain and choice.completion_tokens:
            choice.completion_tokens = event.completion_tokens
            yield event
            return
        prompt = self._prompts[number // self._per_prompt]
        if isinstance(event, Started):
            if number % self._per_prompt == 0:  # the prompt's other choices find it in the cache, without charge
                prompt.cached_tokens = event.cached_tokens
            if number == 0:
                choice.replay(event)
                yield self._started(replace(event, said_text="") if event.said else event)
            return
        if isinstance(event, Finished) and event.reason in _ENDS_ALL:
            choice.completion_tokens = event.completion_tokens
            yield from self._end_choice(number, event)
            return
        if not prompt.is_billed:
            prompt.is_billed = True
            yield self._started(Started(0, 0))
        if isinstance(event, PromptScored):
            yield self._echo(prompt, number, event.tokens)
            return
        if prompt.echo is not None:
            yield self._echo(prompt, number)
        is_first = not self._completion_tokens()
        choice.completion_tokens = event.completion_tokens
        if isinstance(event, Finished):
            yield from self._end_choice(number, event)
        elif len(self._choices) == 1 and choice.parser is None:
            yield event if choice.aligner is None else replace(event, tokens=choice.tokens(event))
        else:
            parts, tokens = choice.parts(event.text), choice.tokens(event)
            choice.unsent_ids += event.token_ids
            if parts or tokens or is_first:  # the first token is reported even without text, because it is billed
                ids, choice.unsent_ids = choice.unsent_ids, ()
                yield ReplyParts(parts, self._completion_tokens(), tokens, number, ids, event.is_last)

    def _started(self, event: Started) -> Started:
        """Returns the event with the usage of all prompts that are billed."""
        if len(self._prompts) == 1:
            return event
        prompt_tokens, cached_tokens = self._prompt_usage()
        return replace(event, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)

    def _echo(self, prompt: _Prompt, number: int, tokens: tuple[TokenLogprob, ...] = ()) -> ReplyParts:
        """Returns the prompt with its first scored tokens. Later calls return only the next tokens."""
        echo, prompt.echo, self._has_echo = prompt.echo or PromptEcho(""), None, True
        return ReplyParts((echo,), self._completion_tokens(), tokens, number)

    def _end_choice(self, number: int, event: Finished) -> Iterator[BackendEvent]:
        several = len(self._choices) > 1
        if not several:
            self._prompts[0].cached_tokens, self._stop = event.cached_tokens, event.stop
        last_parts = self._choices[number].last_parts(event)
        if event.reason in _ENDS_ALL:
            self._unfinished = 0
            self._reason = event.reason
        else:
            ids = self._choices[number].unsent_ids
            if last_parts or ids:
                yield ReplyParts(last_parts, self._completion_tokens(), (), number, ids, is_last=self._has_ids)
            self._unfinished -= 1
            if several:
                yield ChoiceEnded(number, event.reason)
            if not self._unfinished:
                self._reason = FinishReason.STOP if several else event.reason
        if not self._unfinished:
            self.is_over = True
            yield self.produced


@dataclass(slots=True)
class _Prompt:
    """The usage of one prompt. `echo` is the prompt to send back; None if it was sent or not requested."""

    tokens: int
    cached_tokens: int = 0
    is_billed: bool = False
    echo: PromptEcho | None = None


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
        """Applies the part of the reply that another replica has already sent."""
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
