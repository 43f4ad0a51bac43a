"""Chooses the next token of every row in one vectorised pass.

The random number of a token is a hash of the request's seed and the token's position, and the token is the one where
the cumulative distribution, in the vocabulary's order, passes it. So a request gets the same tokens alone and in any
batch, and a step costs one hash per row instead of noise for every token of the vocabulary.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 -- torch's own convention

from serve_app.engine.request import SamplingParams

_BLOCK = 256  # tokens per step of the coarse search
_BELOW_ONE = 1 - 1e-12  # keeps a target inside its sum whatever rounding does

INVALID = -1  # instead of a token where the logits hold NaN


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A chosen token. `logprob` and `top`, likeliest first, are of the raw logits and only there when asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class SamplerState:
    """One request's sampling: its parameters, its seed and what it has produced.

    `eos_token_ids` are banned below `min_tokens`, and always under `ignore_eos`.
    """

    def __init__(self, params: SamplingParams, prompt: Seq[int], eos_token_ids: frozenset[int], vocab: int) -> None:
        self.params = params
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.position = 0
        self._eos = sorted(t for t in eos_token_ids if t < vocab)
        self.counts: torch.Tensor | None = None  # of output, (vocabulary,)
        self.seen: torch.Tensor | None = None  # in prompt or output, (vocabulary,)
        if params.frequency_penalty or params.presence_penalty:
            self.counts = torch.zeros(vocab)
        if params.repetition_penalty != 1.0:
            self.seen = torch.zeros(vocab, dtype=torch.bool)
            self.seen[torch.tensor(prompt, dtype=torch.long)] = True

    @property
    def banned(self) -> list[int]:
        """Tokens that may not come next."""
        return self._eos if self.params.ignore_eos or self.position < self.params.min_tokens else []

    def uniform(self) -> float:
        """The request's random number in [0, 1) for the next token."""
        key = f"{self.seed}:{self.position}".encode()
        return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) >> 11) / 2**53

    def advance(self, token: int) -> None:
        """Take note of a token of output."""
        self.position += 1
        if self.counts is not None:
            self.counts[token] += 1
        if self.seen is not None:
            self.seen[token] = True


def sample(logits: torch.Tensor, states: Seq[SamplerState], drafts: Seq[tuple[int, ...]]) -> list[list[SampledToken]]:
    """Choose the tokens that follow each state's output, from float32 `logits` (rows, vocabulary), changed in place.

    State i owns the next 1 + len(drafts[i]) rows; row j was computed, and is sampled, as if draft[:j] had been
    accepted. Its entry holds the sampled tokens up to and including the first that differs from the draft. Nothing is
    advanced.
    """
    assert not any(drafts), "drafts are not verified yet"
    return [[SampledToken(token)] for token in _choose(logits, states)]


@torch.inference_mode()
def _choose(logits: torch.Tensor, states: Seq[SamplerState]) -> list[int]:
    """Choose a token per row.

    Order: penalties, temperature, top-k, top-p, min-p, as in transformers. `INVALID` marks rows with NaN.
    """
    _ban(logits, states)
    _penalise(logits, states)
    best, tokens = logits.max(dim=-1)
    chosen = torch.where(best.isnan(), INVALID, tokens).tolist()
    rows = [i for i, s in enumerate(states) if s.params.temperature > 0 and chosen[i] != INVALID]
    if rows:
        picked = _draw(logits if len(rows) == len(states) else logits[rows], [states[i] for i in rows])
        for row, token in zip(rows, picked, strict=True):
            chosen[row] = token
    return chosen


def _ban(logits: torch.Tensor, states: Seq[SamplerState]) -> None:
    pairs = [(row, token) for row, state in enumerate(states) for token in state.banned]
    if pairs:
        rows, tokens = zip(*pairs, strict=True)
        logits[list(rows), list(tokens)] = -torch.inf


def _penalise(logits: torch.Tensor, states: Seq[SamplerState]) -> None:
    """Repetition penalty of CTRL (arXiv 1909.05858) over prompt and output; OpenAI's other two over the output."""
    rows = [i for i, s in enumerate(states) if s.seen is not None]
    if rows:
        seen = torch.stack([s.seen for s in states if s.seen is not None]).to(logits.device)
        factor = _column([states[i].params.repetition_penalty for i in rows], logits)
        part = logits[rows]
        logits[rows] = torch.where(seen, torch.where(part > 0, part / factor, part * factor), part)
    rows = [i for i, s in enumerate(states) if s.counts is not None]
    if rows:
        counts = torch.stack([s.counts for s in states if s.counts is not None]).to(logits.device)
        frequency = _column([states[i].params.frequency_penalty for i in rows], logits)
        presence = _column([states[i].params.presence_penalty for i in rows], logits)
        logits[rows] -= frequency * counts + presence * (counts > 0)


def _draw(logits: torch.Tensor, states: Seq[SamplerState]) -> list[int]:
    weights = _weights(logits, [s.params for s in states])
    uniform = torch.tensor([[s.uniform()] for s in states], dtype=torch.double, device=logits.device)
    # In two levels, since a running sum over the whole vocabulary costs more than all the rest.
    if padding := -weights.shape[-1] % _BLOCK:
        weights = F.pad(weights, (0, padding))
    blocks = weights.unflatten(-1, (-1, _BLOCK))
    coarse = blocks.sum(-1).double().cumsum(-1)
    target = uniform * coarse[:, -1:] * _BELOW_ONE
    block = torch.searchsorted(coarse, target, right=True)
    before = torch.where(block > 0, coarse.gather(-1, (block - 1).clamp(min=0)), 0.0)
    fine = blocks[torch.arange(len(states), device=logits.device), block.squeeze(-1)].double().cumsum(-1)
    target = torch.minimum(target - before, fine[:, -1:] * _BELOW_ONE)
    token = block * _BLOCK + torch.searchsorted(fine, target, right=True)
    return token.squeeze(-1).tolist()


def _weights(logits: torch.Tensor, params: Seq[SamplingParams]) -> torch.Tensor:
    """Each token's weight after temperature, top-k, top-p and min-p; the likeliest has 1, those left out 0."""
    # Below 1e-5 the division would overflow; the distribution is a single token by then.
    scaled = logits / _column([max(p.temperature, 1e-5) for p in params], logits)
    weights = scaled.sub_(scaled.amax(dim=-1, keepdim=True)).exp_()
    vocab = logits.shape[-1]
    cut = _column([p.min_p for p in params], logits)
    rows = [i for i, p in enumerate(params) if 0 < p.top_k < vocab]
    if rows:
        k = torch.tensor([[params[i].top_k] for i in rows], device=logits.device)
        part = weights[rows]
        least = part.topk(int(k.max())).values.gather(-1, k - 1)
        weights[rows] = part.masked_fill_(part < least, 0.0)
    rows = [i for i, p in enumerate(params) if p.top_p < 1]
    if rows:
        top_p = _column([params[i].top_p for i in rows], logits)
        cut[rows] = torch.maximum(cut[rows], _nucleus_cut(weights[rows], top_p))
    if bool((cut > 0).any()):
        weights.masked_fill_(weights < cut, 0.0)
    return weights


def _nucleus_cut(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The least weight in each row's nucleus, (rows, 1) (top-p, arXiv 1904.09751).

    Tokens below (1 - p) / vocabulary of the total hold less than 1 - p together, so none of them is in the nucleus
    and only the few above have to be sorted.
    """
    total = weights.sum(-1, keepdim=True)
    likely = weights >= torch.minimum((1 - top_p) * total / weights.shape[-1], weights.amax(-1, keepdim=True))
    counts = likely.sum(-1)
    rows = likely.nonzero()[:, 0]
    column = torch.arange(len(rows), device=weights.device) - (counts.cumsum(0) - counts)[rows]
    candidates = weights.new_zeros(len(weights), int(counts.max()))
    candidates[rows, column] = weights[likely]
    ordered = candidates.sort(descending=True).values
    # A token stays while those before it have less than p; the first always stays.
    kept = (ordered.cumsum(-1) - ordered < top_p * total) & (ordered > 0)
    kept[:, 0] = True
    return ordered.gather(-1, kept.sum(-1, keepdim=True) - 1)


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float, device=like.device)[:, None]
