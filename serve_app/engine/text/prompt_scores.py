"""Collects the log-probabilities of a prompt's tokens while the prompt is computed in chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from serve_app.contracts.generation import PromptScored, TokenLogprob
from serve_app.engine.text.detokenizer import Vocabulary
from serve_app.engine.text.reply_text import describe

_PIECE = 256  # tokens per event, so that encoding a long prompt does not delay other replies

Score = tuple[float, Sequence[tuple[int, float]]]
"""The log-probability of a token, and the most likely tokens with theirs, most likely first."""


class PromptScores:
    """The log-probabilities of one prompt. They are sent with the first output, because the prompt is billed then."""

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._prompt = prompt
        self._scored = [describe(vocabulary, prompt[0], 0.0)]
        self.has_nan = False

    def add(self, first: int, scores: Sequence[Score]) -> None:
        """Adds the scores of the prompt's tokens from index `first` on.

        Skips scores that are already known: after a preemption, a prompt is computed again.
        """
        known = len(self._scored)
        for at, (logprob, top) in enumerate(scores[known - first :], known):
            self.has_nan = self.has_nan or math.isnan(logprob)
            self._scored.append(describe(self._vocabulary, self._prompt[at], logprob, top))

    def take(self) -> Iterator[PromptScored]:
        """Yields the events for all scores. Yields nothing when it is called again."""
        scored: list[TokenLogprob] = self._scored
        self._scored = []
        for start in range(0, len(scored), _PIECE):
            yield PromptScored(tuple(scored[start : start + _PIECE]))
