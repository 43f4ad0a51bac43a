"""Chooses the next tokens of all requests in one vectorised pass and verifies drafts with them.

The random number of a token is a hash of the request's seed and the token's position. So a request gets the same
tokens alone and in any batch, with drafts and without.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from serve_app.engine.request import MAX_TOP_LOGPROBS, SamplingParams
from serve_app.engine.sampling import adjust
from serve_app.engine.sampling.draw import DEAD_END, INVALID, Native, choose
from serve_app.engine.sampling.grammar import GrammarState
from serve_app.engine.sampling.logprobs import RawRows

__all__ = ["DEAD_END", "INVALID", "SampledToken", "SamplerState", "sample"]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A chosen token. `logprob` and `top`, likeliest first, are of the raw logits and only there when asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class SamplerState:
    """One request's sampling: its parameters, its seed and what it has produced.

    `eos_token_ids` are banned below `min_tokens`, and always under `ignore_eos`. `vocab` is the width of the logits.
    `grammar` is stronger than all else: where it allows banned tokens alone, one of them is taken.

    Raises:
        ValueError: a bias is for a token outside the vocabulary, or too many log-probabilities are asked for.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Seq[int],
        eos_token_ids: frozenset[int],
        vocab: int,
        grammar: GrammarState | None = None,
    ) -> None:
        if any(not 0 <= token < vocab for token, _ in params.logit_bias):
            raise ValueError("logit_bias holds ids outside the vocabulary")
        if params.logprobs is not None and not 0 <= params.logprobs <= MAX_TOP_LOGPROBS:
            raise ValueError(f"logprobs must be from 0 to {MAX_TOP_LOGPROBS}")
        self.params = params
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.grammar = grammar
        self.position = 0
        self.tally: adjust.Tally | None = None
        if params.repetition_penalty != 1.0:
            self.tally = adjust.Tally(prompt)
        elif params.frequency_penalty or params.presence_penalty:
            self.tally = adjust.Tally()
        eos = [(t, adjust.BAN) for t in sorted(eos_token_ids) if t < vocab]
        self._free = adjust.biases(params.logit_bias)
        self._held = adjust.biases([*params.logit_bias, *eos])

    @property
    def complete(self) -> bool:
        """Whether the grammar is complete: the reply ends here, whatever `min_tokens` says."""
        return self.grammar is not None and self.grammar.finished

    def biases(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens whose logits change at that position of the output, and by how much; bans are `adjust.BAN`."""
        return self._held if self.params.ignore_eos or position < self.params.min_tokens else self._free

    def uniform(self, position: int, attempt: int = 0) -> float:
        """The request's random number in [0, 1) for the token at that position of the output."""
        key = f"{self.seed}:{position}:{attempt}".encode()
        return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) >> 11) / 2**53

    def advance(self, token: int) -> None:
        """Take note of a token of output."""
        self.position += 1
        if self.tally is not None:
            self.tally.add(token)
        if self.grammar is not None:
            self.grammar.accept(token)


class _Row(NamedTuple):
    """One row of logits: a state, and the draft tokens that are taken to have been accepted before."""

    state: SamplerState
    draft: tuple[int, ...]

    @property
    def position(self) -> int:
        return self.state.position + len(self.draft)


@torch.inference_mode()
def sample(
    logits: torch.Tensor, states: Seq[SamplerState], drafts: Seq[tuple[int, ...]], native: Native | None = None
) -> list[list[SampledToken]]:
    """Choose the tokens that follow each state's output, from float32 `logits` (rows, vocabulary), changed in place.

    State i owns the next 1 + len(drafts[i]) rows; row j was computed, and is sampled, as if draft[:j] had been
    accepted. Its entry holds the sampled tokens up to and including the first that differs from the draft: exactly
    what sampling one token a step would have given. Nothing is advanced.

    Order: repetition, frequency and presence penalty, biases and bans, grammar, then as `draw.choose` has it. An
    entry ends at `INVALID`, where the logits hold NaN, and at `DEAD_END`, where the grammar allows nothing because its
    engine failed.
    """
    logits = logits.contiguous()
    rows = [_Row(s, d[:j]) for s, d in zip(states, drafts, strict=True) for j in range(1 + len(d))]
    wanted = {i: row.state.params.logprobs for i, row in enumerate(rows) if row.state.params.logprobs is not None}
    raw = RawRows(logits, wanted) if wanted else None
    _adjust(logits, rows)
    _constrain(logits, states, drafts)
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


def _adjust(logits: torch.Tensor, rows: Seq[_Row]) -> None:
    penalised = []
    biased = []
    for i, row in enumerate(rows):
        if row.state.tally is not None:
            penalised.append((i, row.state.params, *row.state.tally.with_draft(row.draft)))
        tokens, amounts = row.state.biases(row.position)
        if len(tokens):
            biased.append((i, tokens, amounts))
    adjust.penalise(logits, penalised)
    adjust.add(logits, biased)


def _constrain(logits: torch.Tensor, states: Seq[SamplerState], drafts: Seq[tuple[int, ...]]) -> None:
    rows: list[int] = []
    masks = []
    start = 0
    for state, draft in zip(states, drafts, strict=True):
        if state.grammar is not None:
            rows += range(start, start + 1 + len(draft))
            masks.append(state.grammar.masks(draft))
        start += 1 + len(draft)
    if masks:
        adjust.mask(logits, rows, torch.cat(masks))
