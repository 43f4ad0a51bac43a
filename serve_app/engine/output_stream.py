"""The output of one request: guesses its next tokens, accepts the sampled tokens and turns them into text."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.contracts.generation import Delta, Finished, FinishReason
from serve_app.engine.delivery import LoopSink
from serve_app.engine.grammar.compiler import GrammarState
from serve_app.engine.sampling.draw import DEAD_END
from serve_app.engine.sampling.sampler import SampledToken, SamplerState
from serve_app.engine.scheduling.lookup import PromptLookup
from serve_app.engine.scheduling.sequence import TokenSequence
from serve_app.engine.text.detokenizer import Vocabulary
from serve_app.engine.text.prompt_scores import PromptScores
from serve_app.engine.text.reply_text import ReplyText

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The result of a step: the number of tokens added, their text, and the reason if the request ends."""

    produced: int
    delta: Delta | None
    reason: FinishReason | None


class OutputStream:
    """Decides after each token which text to release and whether the request ends.

    `eos_token_ids` end the request unless it ignores them. At most `guess_tokens` tokens are guessed at a time. The
    request's `said` tokens advance the sampling state, the grammar and the text as if they had been sampled here.

    Raises ValueError if the `said` tokens already end the reply.
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
        self._text = ReplyText(vocabulary, params, sequence.max_output)
        self.scores: PromptScores | None = None
        if params.prompt_logprobs is not None:
            self.scores = PromptScores(vocabulary, sequence.request.prompt_token_ids)
        for token in sequence.request.said:
            self.sampling.advance(token)
        if self.sampling.complete:
            raise ValueError("the reply to continue has already completed the grammar")
        self.said_text = self._text.replay(sequence.request.said)
        self._eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self._lookup = PromptLookup(sequence.tokens, guess_tokens)
        self._guess_tokens = guess_tokens
        self._forced: tuple[int, ...] = ()

    @property
    def ready(self) -> bool:
        """Whether the next token can be chosen: False only while the grammar is being recompiled."""
        return self.sampling.grammar is None or self.sampling.grammar.ready

    def was_interrupted(self, sampled: Sequence[SampledToken]) -> bool:
        """Whether a step chose no token because the grammar must be recompiled first."""
        grammar = self.sampling.grammar
        return grammar is not None and sampled[-1].token == DEAD_END and grammar.interrupted

    def guess(self, limit: int) -> tuple[int, ...]:
        """At most `limit` tokens that may come next: tokens forced by the grammar, or else a guess that it allows."""
        grammar = self.sampling.grammar
        if grammar is None or not self._guess_tokens:
            return self._lookup.guess(limit)
        self._forced = grammar.forced()[: min(limit, self._guess_tokens)]
        return self._forced or grammar.allowed_part(self._lookup.guess(limit))

    def verify(self, guess: tuple[int, ...], sampled: Sequence[SampledToken]) -> int:
        """Compare a verified guess with the sampled tokens; return how many guessed tokens were right."""
        right = sum(token == entry.token for token, entry in zip(guess, sampled, strict=False))
        if not self._forced:
            self._lookup.learn(guess, right)
        return right

    def prepare(self, draft: tuple[int, ...]) -> None:
        """Start the part of sampling that needs no logits; called before the model runs."""
        if self.sampling.grammar is not None:
            self.sampling.grammar.prepare(draft)

    def accept(self, sampled: Sequence[SampledToken]) -> Accepted:
        """Add a step's tokens, one or more, up to the token that ends the request; the tokens after it are dropped.

        An end-of-sequence token is not added: it appears in neither the text nor the count. The same is true for a stop
        token, unless the request keeps it (`include_stop_str_in_output`).
        """
        before = self.sequence.num_output
        reason = None
        for entry in sampled:
            reason = self._push(entry)
            if reason is not None or not self.ready:
                break
        return Accepted(self.sequence.num_output - before, self._text.take(), reason)

    def finished(self, reason: FinishReason) -> Finished:
        return self._text.finished(reason, self.sequence.num_prompt, self.sequence.cached_tokens)

    def _push(self, entry: SampledToken) -> FinishReason | None:
        token = entry.token
        if token < 0:  # no token could be chosen
            grammar = self.sampling.grammar if token == DEAD_END else None
            why = None if grammar is None else grammar.error
            if grammar is not None and grammar.too_large:
                # The request itself is the cause. So the reply keeps its text and is billed, as at the length limit.
                logger.warning("The reply of request %s ends early: %s.", self.sequence.request_id, why)
                return self._text.end(FinishReason.LENGTH)
            logger.error("No token for request %s: %s.", self.sequence.request_id, why or "the logits are not numbers")
            return FinishReason.ERROR
        if not self._text.has_room:  # the request asks for no output tokens
            return self._text.end(FinishReason.LENGTH)
        if token in self._eos_token_ids and (self.sampling.grammar is None or self.sampling.grammar.may_end):
            return self._text.end_with(token, entry.logprob, entry.top)
        if self._text.ends_before(token):
            return self._text.end(FinishReason.STOP)
        self.sequence.tokens.append(token)
        self.sampling.advance(token)
        reason = self._text.push(token, entry.logprob, entry.top)
        if not self.sampling.complete:  # if complete, only an end-of-sequence token could follow
            return reason
        return self._text.end(FinishReason.STOP) if reason is None else FinishReason.STOP
