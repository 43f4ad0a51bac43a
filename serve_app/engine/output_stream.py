"""The output of one request: guesses its next tokens, accepts the sampled ones and turns them into text."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.contracts.generation import Delta, Finished, FinishReason, TokenLogprob
from serve_app.engine.delivery import LoopSink
from serve_app.engine.grammar.compiler import GrammarState
from serve_app.engine.sampling.draw import DEAD_END
from serve_app.engine.sampling.sampler import SampledToken, SamplerState
from serve_app.engine.scheduling.lookup import PromptLookup
from serve_app.engine.scheduling.sequence import TokenSequence
from serve_app.engine.text.detokenizer import Detokenizer, Vocabulary

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The result of a step's tokens: the number kept, their text, and why the request ends, if it does."""

    produced: int
    delta: Delta | None
    reason: FinishReason | None


class OutputStream:
    """Decides after each token which text leaves and whether the request ends.

    `eos_token_ids` end the request unless it ignores them. At most `guess_tokens` are guessed at a time.
    """

    def __init__(
        self,
        sequence: TokenSequence,
        vocabulary: Vocabulary,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        sink: LoopSink,
        guess_tokens: int = 0,
        grammar: GrammarState | None = None,
    ) -> None:
        params = sequence.request.sampling
        self.sequence = sequence
        self.sink = sink
        self.sampling = SamplerState(params, sequence.request.prompt_token_ids, eos_token_ids, vocab_size, grammar)
        self._vocabulary = vocabulary
        self._pending: list[TokenLogprob] = []  # of tokens whose text is held back
        self._detokenizer = Detokenizer(vocabulary, params.stop, params.min_tokens, params.shown, params.mark)
        self._eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self._lookup = PromptLookup(sequence.tokens, guess_tokens)
        self._guess_tokens = guess_tokens
        self._forced: tuple[int, ...] = ()

    def guess(self, limit: int) -> tuple[int, ...]:
        """At most `limit` tokens that may come next: forced by the grammar, else a guess that it allows."""
        grammar = self.sampling.grammar
        if grammar is None or not self._guess_tokens:
            return self._lookup.guess(limit)
        self._forced = grammar.forced()[: min(limit, self._guess_tokens)]
        return self._forced or grammar.allowed_part(self._lookup.guess(limit))

    def verify(self, guess: tuple[int, ...], sampled: Sequence[SampledToken]) -> int:
        """Compare a verified guess with the sampled tokens; return how many of its tokens were right."""
        right = sum(token == entry.token for token, entry in zip(guess, sampled, strict=False))
        if not self._forced:
            self._lookup.learn(guess, right)
        return right

    def prepare(self, draft: tuple[int, ...]) -> None:
        """Start the work of sampling that needs no logits; called before the model runs."""
        if self.sampling.grammar is not None:
            self.sampling.grammar.prepare(draft)

    def accept(self, sampled: Sequence[SampledToken]) -> Accepted:
        """Add a step's tokens, one or more, up to the one that ends the request; those after it are dropped.

        An end-of-sequence token is not added: it is in neither the text nor the count. The first token is reported even
        if its text is held back, because from then on the request is billed.
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
            delta = Delta(text, self.sequence.num_output, tuple(self._pending))
            self._pending.clear()
        elif not before and self.sequence.num_output:
            delta = Delta("", self.sequence.num_output)
        return Accepted(self.sequence.num_output - before, delta, reason)

    def finished(self, reason: FinishReason) -> Finished:
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
            grammar = self.sampling.grammar if token == DEAD_END else None
            why = None if grammar is None else grammar.error
            if grammar is not None and grammar.too_large:
                # The request's own doing: like a reply that is cut at its length, it has its text and is billed.
                logger.warning("The reply of request %s ends early: %s.", self.sequence.request_id, why)
                return self._detokenizer.finish(), FinishReason.LENGTH
            logger.error("No token for request %s: %s.", self.sequence.request_id, why or "the logits are not numbers")
            return "", FinishReason.ERROR
        if token in self._eos_token_ids:
            return self._detokenizer.finish(), FinishReason.STOP
        self.sequence.tokens.append(token)
        self.sampling.advance(token)
        if entry.logprob is not None:
            self._pending.append(_describe(self._vocabulary, token, entry.logprob, entry.top))
        text = self._detokenizer.push(token)
        if self._detokenizer.stopped:
            return text, FinishReason.STOP
        if self.sampling.complete:  # only an end-of-sequence token could follow
            return text + self._detokenizer.finish(), FinishReason.STOP
        if self.sequence.num_output < self.sequence.max_output:
            return text, None
        text += self._detokenizer.finish()
        return text, FinishReason.STOP if self._detokenizer.stopped else FinishReason.LENGTH


def _describe(
    vocabulary: Vocabulary, token: int, logprob: float, top: Sequence[tuple[int, float]] = ()
) -> TokenLogprob:
    raw = vocabulary.spelling(token)
    alternatives = tuple(_describe(vocabulary, other, value) for other, value in top)
    return TokenLogprob(token, raw.decode(errors="replace"), raw, logprob, alternatives)
