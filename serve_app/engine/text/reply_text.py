"""Turns one reply's tokens into deltas and decides where the reply ends. Every engine uses it."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace as changed

from serve_app.contracts.generation import Delta, Finished, FinishReason, SamplingParams, TokenLogprob
from serve_app.engine.text.detokenizer import Detokenizer, Vocabulary


class ReplyText:
    """Detokenizes, finds stop strings and counts tokens; the caller pushes at most `max_output` tokens."""

    def __init__(self, vocabulary: Vocabulary, params: SamplingParams, max_output: int) -> None:
        self.num_tokens = 0
        self._vocabulary = vocabulary
        self._max_output = max_output
        self._detokenizer = Detokenizer(
            vocabulary,
            params.stop,
            params.min_tokens,
            params.shown,
            params.mark,
            keeps_stop=params.include_stop_str_in_output,
        )
        self._stop_tokens = frozenset(params.stop_token_ids)
        self._keeps_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._text = ""  # since the last delta
        self._logprobs: list[TokenLogprob] = []  # since the last delta, including tokens whose text is held back
        self._is_reported = False  # whether the first token was reported
        self._ids: list[int] | None = [] if params.token_ids else None  # since the last delta
        self._has_ended = False
        self._has_end_logprob = params.end_logprob
        self._end_token: TokenLogprob | None = None  # the end-of-sequence token, until it is reported

    @property
    def has_room(self) -> bool:
        """Whether the reply may have another token."""
        return self.num_tokens < self._max_output

    def ends_before(self, token: int) -> bool:
        """Whether the reply ends with this token and does not include it."""
        return token in self._stop_tokens and not self._keeps_stop and self.num_tokens >= self._min_tokens

    def push(
        self, token: int, logprob: float | None = None, top: Sequence[tuple[int, float]] = ()
    ) -> FinishReason | None:
        """Add a token that is not an end-of-sequence token; return the reason if the reply ends with it.

        `logprob` and `top`, most likely first, are reported if they are given.
        """
        self.num_tokens += 1
        if logprob is not None:
            self._logprobs.append(describe(self._vocabulary, token, logprob, top))
        if self._ids is not None:
            self._ids.append(token)
        self._text += self._detokenizer.push(token)
        if self._detokenizer.stopped:
            self._has_ended = True
            return FinishReason.STOP
        if token in self._stop_tokens and self.num_tokens > self._min_tokens:
            return self.end(FinishReason.STOP)
        return None if self.num_tokens < self._max_output else self.end(FinishReason.LENGTH)

    def end(self, reason: FinishReason) -> FinishReason:
        """End the reply for this reason and release the held text. Returns STOP if a stop string is in that text."""
        self._has_ended = True
        self._text += self._detokenizer.finish()
        return FinishReason.STOP if self._detokenizer.stopped else reason

    def end_with(self, token: int, logprob: float | None, top: Sequence[tuple[int, float]] = ()) -> FinishReason:
        """End the reply with an end-of-sequence token. The log-probabilities are as in `push`."""
        reason = self.end(FinishReason.STOP)
        if self._has_end_logprob and logprob is not None and not self._detokenizer.stopped:
            self._end_token = changed(describe(self._vocabulary, token, logprob, top), raw=b"")
        return reason

    def replay(self, said: Sequence[int]) -> str:
        """Add the reply's tokens that were generated elsewhere; return their text, which no delta contains.

        Raises ValueError if these tokens already end the reply.
        """
        for token in said:
            if self.push(token) is not None:
                raise ValueError("the reply to continue has already ended")
        delta = self.take()
        return "" if delta is None else delta.text

    def take(self) -> Delta | None:
        """The delta since the last call; None if there is nothing new.

        The first token is reported even if its text is held back, because the request is billed from then on.
        """
        end = self._end_token
        is_due = bool(self._text) or end is not None or (self._has_ended and bool(self._ids))
        if not is_due and (self._is_reported or not self.num_tokens):
            return None
        tokens = tuple(self._logprobs) if self._text or end is not None else ()
        if end is not None:
            tokens, self._end_token = (*tokens, end), None
        if self._ids is None:
            delta = Delta(self._text, self.num_tokens, tokens)
        else:
            delta = Delta(self._text, self.num_tokens, tokens, tuple(self._ids), self._has_ended)
            self._ids.clear()
        if tokens:
            self._logprobs.clear()
        self._text, self._is_reported = "", True
        return delta

    def finished(self, reason: FinishReason, prompt_tokens: int, cached_tokens: int) -> Finished:
        """The last event."""
        return Finished(
            reason,
            prompt_tokens,
            cached_tokens,
            completion_tokens=self.num_tokens,
            marked_tokens=self._detokenizer.marked_tokens,
            stop=self._detokenizer.stop,
        )


def describe(vocabulary: Vocabulary, token: int, logprob: float, top: Sequence[tuple[int, float]] = ()) -> TokenLogprob:
    """Returns a token with its text and log-probability. `top` are the most likely tokens."""
    raw = vocabulary.spelling(token)
    alternatives = tuple(describe(vocabulary, other, value) for other, value in top)
    return TokenLogprob(token, raw.decode(errors="replace"), raw, logprob, alternatives)
