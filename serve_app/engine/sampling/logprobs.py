"""Log-probabilities by the model's raw logits, for the rows that ask for them, and how they are told."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from serve_app.engine.request import MAX_TOP_LOGPROBS, TokenLogprob
from serve_app.engine.sampling.detokenizer import Vocabulary
from serve_app.engine.sampling.draw import as_blocks, top_blocks


class RawRows:
    """Keeps the rows of `logits` that ask for log-probabilities as they are before sampling changes them.

    `wanted` maps such rows to how many of the likeliest tokens they ask for, beside the chosen one.
    """

    def __init__(self, logits: torch.Tensor, wanted: dict[int, int]) -> None:
        self._rows = list(wanted)
        self._raw = logits[self._rows].log_softmax(-1)
        self._tops = self._find_tops(list(wanted.values()))

    def _find_tops(self, counts: list[int]) -> list[tuple[tuple[int, float], ...]]:
        if not any(counts):
            return [()] * len(counts)
        blocks = as_blocks(self._raw)
        peaks = blocks.amax(-1)
        # As many for everybody, so that of equals each row gets the same ones in any batch.
        part, numbers = top_blocks(blocks, peaks, min(MAX_TOP_LOGPROBS, peaks.shape[1]))
        names = numbers[..., None] * blocks.shape[-1] + torch.arange(blocks.shape[-1], device=numbers.device)
        top = part.flatten(1).topk(min(MAX_TOP_LOGPROBS, part[0].numel()))
        values, tokens = top.values.tolist(), names.flatten(1).gather(1, top.indices).tolist()
        return [
            tuple(sorted(zip(t, v, strict=True), key=lambda pair: (-pair[1], pair[0])))[:n]
            for t, v, n in zip(tokens, values, counts, strict=True)
        ]

    def of(self, tokens: Seq[int]) -> dict[int, tuple[float, tuple[tuple[int, float], ...]]]:
        """By row: the chosen token's log-probability and the likeliest tokens with theirs.

        `tokens` are those of all rows; one below 0 is no token and has no meaning here.
        """
        chosen = torch.tensor([[max(tokens[row], 0)] for row in self._rows], device=self._raw.device)
        values = self._raw.gather(1, chosen)[:, 0].tolist()
        return {row: (value, top) for row, value, top in zip(self._rows, values, self._tops, strict=True)}


def describe(vocabulary: Vocabulary, token: int, logprob: float, top: Seq[tuple[int, float]] = ()) -> TokenLogprob:
    """A token and the likeliest ones at its place, in the words that callers are told."""
    raw = vocabulary.spelling(token)
    alternatives = tuple(describe(vocabulary, other, value) for other, value in top)
    return TokenLogprob(token, raw.decode(errors="replace"), raw, logprob, alternatives)
