"""Changes logits in place before a token is drawn: penalties, biases, bans and grammar masks.

All except the masks are sparse: a step only touches the logits of tokens that the requests penalise or bias.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from serve_app.contracts.generation import SamplingParams

BAN = -1e5  # added to a banned token's logit; the token is then chosen only if no other token is allowed
_MAX_PENALISED = 4e4  # a penalised logit is at most this far from 0, so no penalty undoes or exceeds a ban
_MIN_BIAS = -100.0  # this bias and lower biases are bans


class Tally:
    """The tokens that penalties affect, and the number of times that each occurs in the output.

    With a repetition penalty it also holds the prompt's tokens, with a count of 0.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        distinct = list(dict.fromkeys(tokens))
        self._slots = {token: slot for slot, token in enumerate(distinct)}
        self._tokens = np.zeros(max(64, 2 * len(distinct)), dtype=np.int64)
        self._counts = np.zeros(len(self._tokens), dtype=np.float32)
        self._tokens[: len(distinct)] = distinct

    def add(self, token: int) -> None:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._tokens[slot] = token
        self._counts[slot] += 1

    def with_draft(self, draft: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Distinct tokens (n,) and their counts (n,), as if the draft had been added."""
        size = len(self._slots)
        tokens, counts = self._tokens[:size], self._counts[:size]
        if draft:
            new = [token for token in dict.fromkeys(draft) if token not in self._slots]
            tokens = np.concatenate([tokens, np.array(new, dtype=np.int64)])
            counts = np.concatenate([counts, np.zeros(len(new), dtype=np.float32)])
            slots = {token: size + i for i, token in enumerate(new)}
            for token in draft:
                counts[slots[token] if token in slots else self._slots[token]] += 1
        return tokens, counts


def penalise(logits: torch.Tensor, rows: Sequence[tuple[int, SamplingParams, np.ndarray, np.ndarray]]) -> None:
    """Apply the repetition penalty of CTRL (arXiv 1909.05858), then OpenAI's frequency and presence penalties.

    `rows` are (row, parameters, distinct tokens, counts). Logits that are not finite stay as they are. All others
    stay finite.
    """
    if not rows:
        return
    vocab = logits.shape[1]
    sizes = [len(tokens) for _, _, tokens, _ in rows]
    index = _to(logits, np.concatenate([row * vocab + tokens for row, _, tokens, _ in rows]))
    counts = _to(logits, np.concatenate([counts for _, _, _, counts in rows]))

    def spread(values: list[float]) -> torch.Tensor:
        return _to(logits, np.repeat(np.array(values, dtype=np.float32), sizes))

    flat = logits.view(-1)
    part = raw = flat[index]
    if any(p.repetition_penalty != 1.0 for _, p, _, _ in rows):
        factor = spread([p.repetition_penalty for _, p, _, _ in rows])
        part = torch.where(part > 0, part / factor, part * factor)
    if any(p.frequency_penalty for _, p, _, _ in rows):
        part = part - spread([p.frequency_penalty for _, p, _, _ in rows]) * counts
    if any(p.presence_penalty for _, p, _, _ in rows):
        part = part - spread([p.presence_penalty for _, p, _, _ in rows]) * (counts > 0)
    flat[index] = torch.where(raw.isfinite(), part.clamp(-_MAX_PENALISED, _MAX_PENALISED), raw)


def biases(logit_bias: Iterable[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Distinct tokens (n,) and the amounts to add to their logits (n,). Of a token's biases, the last counts."""
    last = dict(logit_bias)
    amounts = [BAN if bias <= _MIN_BIAS else bias for bias in last.values()]
    return np.array(list(last), dtype=np.int64), np.array(amounts, dtype=np.float32)


def add(logits: torch.Tensor, rows: Sequence[tuple[int, np.ndarray, np.ndarray]]) -> None:
    """Add to logits; `rows` are (row, distinct tokens, amounts), with each row at most once."""
    if rows:
        vocab = logits.shape[1]
        index = _to(logits, np.concatenate([row * vocab + tokens for row, tokens, _ in rows]))
        logits.view(-1)[index] += _to(logits, np.concatenate([amounts for _, _, amounts in rows]))


def mask(logits: torch.Tensor, rows: list[int], bits: torch.Tensor) -> None:
    """Set to -inf the logits of all tokens that the rows' masks do not allow.

    `bits` (rows, ceil(vocabulary / 32)) int32 on the CPU: bit t % 32 of word t // 32 is 1 where token t is allowed.
    """
    if not rows:
        return
    vocab = logits.shape[1]
    forbidden = np.unpackbits(~bits.numpy().view(np.uint8), axis=-1, count=vocab, bitorder="little")
    refused = torch.from_numpy(forbidden.view(np.bool_)).to(logits.device)
    if len(rows) == len(logits):
        logits.masked_fill_(refused, -torch.inf)
    else:
        logits[rows] = logits[rows].masked_fill_(refused, -torch.inf)


def _to(logits: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values).to(logits.device)
