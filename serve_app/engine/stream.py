"""The output of one request: guesses its tokens, takes them as they are sampled, and gives text."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from serve_app.engine.delivery import Sink
from serve_app.engine.request import Delta, Finished, FinishReason, TokenLogprob
from serve_app.engine.sampling.detokenizer import Detokenizer, Vocabulary
from serve_app.engine.sampling.grammar import GrammarState
from serve_app.engine.sampling.logprobs import describe
from serve_app.engine.sampling.sampler import DEAD_END, SampledToken, SamplerState
from serve_app.engine.scheduling.lookup import PromptLookup
from serve_app.engine.scheduling.sequence import Sequence

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Accepted:
    """What a step's tokens came to: those that were kept, their text, and why the request ends, if it does."""

    produced: int
    delta: Delta | None
    reason: FinishReason | None


class Stream:
    """Decides after each token what text leaves and whether the request ends.

    `eos_token_ids` end it, unless it ignores them; `vocabulary` turns its tokens into text. At most `guess_tokens` are
    guessed at a time. `grammar` is what the request's own was compiled to.
    """

    def __init__(
        self,
        sequence: Sequence,
        vocabulary: Vocabulary,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        sink: Sink,
        guess_tokens: int = 0,
        grammar: GrammarState | None = None,
    ) -> None:
        params = sequence.request.sampling
        self.sequence = sequence
        self.sink = sink
        self.sampling = SamplerState(params, sequence.request.prompt_token_ids, eos_token_ids, vocab_size, grammar)
        self._vocabulary = vocabulary
        self._untold: list[TokenLogprob] = []  # of tokens whose text is held back
        self._detokenizer = Detokenizer(vocabulary, params.stop, params.min_tokens, params.shown, params.mark)
        self._eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self._lookup = PromptLookup(sequence.tokens, guess_tokens)
        self._guess_tokens = guess_tokens
        self._forced: tuple[int, ...] = ()

    def guess(self, limit: int) -> tuple[int, ...]:
        """At most `limit` tokens that may come next: those that the grammar forces, else what it allows of a guess."""
        grammar = self.sampling.grammar
        if grammar is None or not self._guess_tokens:
            return self._lookup.guess(limit)
        self._forced = grammar.forced()[: min(limit, self._guess_tokens)]
        return self._forced or grammar.allowed_part(self._lookup.guess(limit))

    def judge(self, guess: tuple[int, ...], sampled: Seq[SampledToken]) -> int:
        """Learn what was sampled where `guess` had been put; how many of its tokens were right."""
        right = sum(token == entry.token for token, entry in zip(guess, sampled, strict=False))
        if not self._forced:
            self._lookup.judge(guess, right)
        return right

    def prepare(self, draft: tuple[int, ...]) -> None:
        """Begin what sampling needs and the model's logits do not: call it before the model runs."""
        if self.sampling.grammar is not None:
            self.sampling.grammar.prepare(draft)

    def accept(self, sampled: Seq[SampledToken]) -> Accepted:
        """Add a step's tokens, one or more, up to the one that ends the request; those after it never were.

        An end-of-sequence token is not added: neither text nor count knows it.
        """
        before = self.sequence.num_output
        text, reason = "", None
        for entry in sampled:
            more, reason = self._push(entry)
            text += more
            if reason is not None:
                break
        delta = None
        if text:
            delta = Delta(text, self.sequence.num_output, tuple(self._untold))
            self._untold.clear()
        return Accepted(self.sequence.num_output - before, delta, reason)

    def finished(self, reason: FinishReason) -> Finished:
        """The last event."""
        sequence = self.sequence
        return Finished(
            reason,
            sequence.num_prompt,
            sequence.cached_tokens,
            completion_tokens=sequence.num_output,
            marked_tokens=self._detokenizer.marked_tokens,
        )

    def _push(self, entry: SampledToken) -> tuple[str, FinishReason | None]:
        token = entry.token
        if token < 0:  # no token could be chosen
            why = self.sampling.grammar.error if token == DEAD_END and self.sampling.grammar is not None else None
            logger.error("No token for request %s: %s.", self.sequence.request_id, why or "the logits are no numbers")
            return "", FinishReason.ERROR
        if token in self._eos_token_ids:
            return self._detokenizer.finish(), FinishReason.STOP
        self.sequence.tokens.append(token)
        self.sampling.advance(token)
        if entry.logprob is not None:
            self._untold.append(describe(self._vocabulary, token, entry.logprob, entry.top))
        text = self._detokenizer.push(token)
        if self._detokenizer.stopped:
            return text, FinishReason.STOP
        if self.sampling.complete:  # only an end-of-sequence token could follow
            return text + self._detokenizer.finish(), FinishReason.STOP
        if self.sequence.num_output < self.sequence.max_output:
            return text, None
        text += self._detokenizer.finish()
        return text, FinishReason.STOP if self._detokenizer.stopped else FinishReason.LENGTH
