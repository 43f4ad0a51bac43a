"""Chooses the next tokens of all requests in one vectorised pass, and verifies drafts with them.

The random number of a token is a hash of the request's seed and the token's position. So a request gets the same tokens
alone and in any batch, with and without drafts.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from serve_app.contracts.generation import SamplingParams
from serve_app.engine.grammar.compiler import GrammarState
from serve_app.engine.sampling import logits_processing, ranges
from serve_app.engine.sampling.draw import Native, as_blocks, choose, top_blocks
from serve_app.engine.text.prompt_scores import Score


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A chosen token. `logprob` and `top`, most likely first, are from the raw logits and set only on request."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class SamplerState:
    """The sampling state of one request: its parameters, its seed and its output so far.

    Below `min_tokens`, `eos_token_ids` and stop tokens are banned; with `ignore_eos`, `eos_token_ids` are always
    banned. `grammar` takes precedence: if it allows only banned tokens, one of them is chosen. `vocab` is the width of
    the logits.

    Raises:
        ValueError: a bias is for a token outside the vocabulary, or `logprobs` is out of range.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        eos_token_ids: frozenset[int],
        vocab: int,
        grammar: GrammarState | None = None,
    ) -> None:
        ranges.check_sampling(params, vocab)
        self.params = params
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.grammar = grammar
        self.position = 0
        self.tally: logits_processing.Tally | None = None
        if params.repetition_penalty != 1.0:
            self.tally = logits_processing.Tally(prompt)
        elif params.frequency_penalty or params.presence_penalty:
            self.tally = logits_processing.Tally()
        eos = [(t, logits_processing.BAN) for t in sorted(eos_token_ids) if t < vocab]
        stops = [(t, logits_processing.BAN) for t in params.stop_token_ids]
        self._biases = logits_processing.biases([*params.logit_bias, *(eos if params.ignore_eos else ())])
        self._biases_below_minimum = logits_processing.biases([*params.logit_bias, *eos, *stops])

    @property
    def complete(self) -> bool:
        """Whether the grammar is complete. The reply then ends, even below `min_tokens`."""
        return self.grammar is not None and self.grammar.finished

    def biases(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens whose logits change at that position of the output, and the amounts to add."""
        return self._biases_below_minimum if position < self.params.min_tokens else self._biases

    def uniform(self, position: int, attempt: int = 0) -> float:
        """The request's random number in [0, 1) for the token at that position of the output."""
        key = f"{self.seed}:{position}:{attempt}".encode()
        return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) >> 11) / 2**53

    def advance(self, token: int) -> None:
        self.position += 1
        if self.tally is not None:
            self.tally.add(token)
        if self.grammar is not None:
            self.grammar.accept(token)


class _Row(NamedTuple):
    """One row of logits: a state, and the draft tokens that count as accepted before the row."""

    state: SamplerState
    draft: tuple[int, ...]

    @property
    def position(self) -> int:
        return self.state.position + len(self.draft)


class _RawRows:
    """The log-probabilities of some rows of `logits`, computed before sampling changes the logits.

    `wanted` maps these rows to the number of most likely tokens to return with the chosen token.
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
        # Every row gets the same count. Otherwise, the choice among equally likely tokens could depend on the batch.
        part, numbers = top_blocks(blocks, peaks, min(ranges.MAX_TOP_LOGPROBS, peaks.shape[1]))
        names = numbers[..., None] * blocks.shape[-1] + torch.arange(blocks.shape[-1], device=numbers.device)
        top = part.flatten(1).topk(min(ranges.MAX_TOP_LOGPROBS, part[0].numel()))
        values, tokens = top.values.tolist(), names.flatten(1).gather(1, top.indices).tolist()
        return [
            tuple(sorted(zip(t, v, strict=True), key=lambda pair: (-pair[1], pair[0])))[:n]
            for t, v, n in zip(tokens, values, counts, strict=True)
        ]

    def of(self, tokens: Sequence[int]) -> dict[int, tuple[float, tuple[tuple[int, float], ...]]]:
        """By row: the log-probability of the chosen token, and the most likely tokens with their log-probabilities.

        `tokens` has the chosen token of every row of `logits`. The result for a negative token has no meaning.
        """
        chosen = torch.tensor([[max(tokens[row], 0)] for row in self._rows], device=self._raw.device)
        values = self._raw.gather(1, chosen)[:, 0].tolist()
        return {row: (value, top) for row, value, top in zip(self._rows, values, self._tops, strict=True)}


@torch.inference_mode()
def score(logits: torch.Tensor, rows: Sequence[int], targets: Sequence[int], counts: Sequence[int]) -> list[Score]:
    """Return the log-probabilities of `targets[i]` and of the `counts[i]` most likely tokens, from row `rows[i]`.

    `logits` (n, vocabulary) are float32 and are not changed.
    """
    raw = _RawRows(logits, dict(zip(rows, counts, strict=True)))
    chosen = dict(zip(rows, targets, strict=True))
    found = raw.of([chosen.get(row, 0) for row in range(len(logits))])
    return [found[row] for row in rows]


@torch.inference_mode()
def sample(
    logits: torch.Tensor,
    states: Sequence[SamplerState],
    drafts: Sequence[tuple[int, ...]],
    native: Native | None = None,
) -> list[list[SampledToken]]:
    """Choose the tokens that follow each state's output, from float32 `logits` (rows, vocabulary), changed in place.

    State i owns the next 1 + len(drafts[i]) rows; row j is sampled as if draft[:j] had been accepted. The result for a
    state holds the sampled tokens up to and including the first that differs from the draft. These are exactly the
    tokens that sampling one token per step would give. States are not advanced.

    Order: repetition, frequency and presence penalty, biases and bans, grammar, then the order of `draw.choose`. A
    result ends at `draw.INVALID` (the logits hold NaN) and at `draw.DEAD_END` (the grammar allows no token, because its
    engine failed).
    """
    logits = logits.contiguous()
    rows = [_Row(s, d[:j]) for s, d in zip(states, drafts, strict=True) for j in range(1 + len(d))]
    wanted = {i: row.state.params.logprobs for i, row in enumerate(rows) if row.state.params.logprobs is not None}
    raw = _RawRows(logits, wanted) if wanted else None
    _penalise_and_bias(logits, rows)
    _mask(logits, states, drafts)
    params = [row.state.params for row in rows]
    tokens = choose(logits, params, lambda i, attempt: rows[i].state.uniform(rows[i].position, attempt), native)
    logprobs = raw.of(tokens) if raw is not None else {}
    sampled: list[list[SampledToken]] = []
    start = 0
    for draft in drafts:
        entry = []
        for i, expected in enumerate((*draft, None), start):
            entry.append(SampledToken(tokens[i], *logprobs.get(i, ())))
            if tokens[i] != expected:
                break
        sampled.append(entry)
        start += 1 + len(draft)
    return sampled


def _penalise_and_bias(logits: torch.Tensor, rows: Sequence[_Row]) -> None:
    penalised = []
    biased = []
    for i, row in enumerate(rows):
        if row.state.tally is not None:
            penalised.append((i, row.state.params, *row.state.tally.with_draft(row.draft)))
        tokens, amounts = row.state.biases(row.position)
        if len(tokens):
            biased.append((i, tokens, amounts))
    logits_processing.penalise(logits, penalised)
    logits_processing.add(logits, biased)


def _mask(logits: torch.Tensor, states: Sequence[SamplerState], drafts: Sequence[tuple[int, ...]]) -> None:
    rows: list[int] = []
    masks = []
    start = 0
    for state, draft in zip(states, drafts, strict=True):
        if state.grammar is not None:
            rows += range(start, start + 1 + len(draft))
            masks.append(state.grammar.masks(draft))
        start += 1 + len(draft)
    if masks:
        logits_processing.mask(logits, rows, torch.cat(masks))
