"""Chooses the next token of every row in one vectorised pass.

The random number of a token is a hash of the request's seed and the token's position, and the token is the one where
the cumulative distribution, in the vocabulary's order, passes it. So a request gets the same tokens alone and in any
batch, and a step costs one hash per row instead of noise for every token of the vocabulary.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence as Seq

import torch

from serve_app.engine.request import SamplingParams

# Enough for the nucleus of nearly every distribution; where it is not, the row is sorted in full.
_CANDIDATES = 256

INVALID = -1  # instead of a token where the logits hold NaN


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


@torch.inference_mode()
def sample(logits: torch.Tensor, states: Seq[SamplerState]) -> list[int]:
    """Choose a token per row of float32 `logits` (rows, vocabulary), which may be changed in place.

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
    params = [s.params for s in states]
    # Below 1e-5 the division would overflow; the distribution is a single token by then.
    logits = logits / _column([max(p.temperature, 1e-5) for p in params], logits)
    logits = logits - logits.amax(dim=-1, keepdim=True)
    if any(p.min_p > 0 or p.top_p < 1 or p.top_k > 0 for p in params):
        logits = logits.masked_fill(logits < _cutoffs(logits, params), -torch.inf)
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)
    uniform = torch.tensor([[s.uniform()] for s in states], dtype=torch.double, device=logits.device)
    # Rounding may leave the total below 1; the factor keeps the target inside it.
    target = uniform * cumulative[:, -1:] * (1 - 1e-12)
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1).tolist()


def _cutoffs(logits: torch.Tensor, params: Seq[SamplingParams]) -> torch.Tensor:
    """The least logit that top-k, top-p and min-p keep, (rows, 1); `logits` have their maximum at 0."""
    vocab = logits.shape[-1]
    cutoff = _column([p.min_p for p in params], logits).log()  # log(0) = -inf keeps everything
    top_k = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    limited = [k for k in top_k if k < vocab]
    if not limited and all(p.top_p >= 1 for p in params):
        return cutoff
    top_p = _column([p.top_p for p in params], logits)
    k = torch.tensor(top_k, device=logits.device)[:, None]
    width = min(vocab, max([_CANDIDATES, *limited]))
    cut, complete = _sorted_cutoff(logits, logits.topk(width).values, k, top_p)
    rest = (~complete).nonzero().squeeze(-1)
    if len(rest):
        full, _ = _sorted_cutoff(logits[rest], logits[rest].sort(descending=True).values, k[rest], top_p[rest])
        cut[rest] = full
    return torch.maximum(cutoff, cut)


def _sorted_cutoff(
    logits: torch.Tensor, ordered: torch.Tensor, k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut-off by top-k then top-p from the `ordered` head of each row; and whether that head was long enough."""
    width, vocab = ordered.shape[-1], logits.shape[-1]
    ordered = ordered.masked_fill(torch.arange(width, device=logits.device) >= k, -torch.inf)
    total = torch.where(k < vocab, ordered.logsumexp(-1, keepdim=True), logits.logsumexp(-1, keepdim=True))
    probabilities = (ordered - total).exp()
    before = probabilities.cumsum(-1) - probabilities
    # A token stays while those before it have less than top_p; the first always stays.
    kept = (before < top_p) & (ordered > -torch.inf)
    kept[:, 0] = True
    complete = (k <= width) | ~kept[:, -1:] | (width == vocab)
    cut = ordered.gather(-1, kept.sum(-1, keepdim=True) - 1)
    # Without top-k and top-p the whole row stays.
    everything = (k >= vocab) & (top_p >= 1)
    return cut.masked_fill(everything, -torch.inf), (complete | everything).squeeze(-1)


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float, device=like.device)[:, None]
