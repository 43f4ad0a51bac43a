"""Draws one token per row of logits by temperature, top-k, top-p and min-p, without sorting any row.

A row is divided into blocks. The drawn token is the token at which the cumulative weight passes a random number, first
over the blocks and then within one block. Top-p and min-p are checked only after a token was drawn, because the check
only needs the weight of the more likely tokens, which are in few blocks. A rejected token is excluded together with all
tokens that are not more likely, and the row draws again from the rest. Each draw is weighted and from a set that
contains all admissible tokens. The first drawn token that is admissible is therefore distributed exactly by the
admissible tokens' weights.

No result of a row depends on the other rows, not even through rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 -- torch's own convention

from serve_app.contracts.generation import SamplingParams

INVALID = -1  # returned instead of a token if the logits hold NaN or +inf
DEAD_END = -2  # returned instead of a token if every logit is -inf: no token is allowed

BLOCK = 128  # tokens of the vocabulary per block
_BELOW_ONE = 1 - 1e-12  # factor that keeps a drawn target below the sum of the weights despite rounding
_MIN_EXPONENT = -80.0
MIN_WEIGHT = 1e-34  # above exp(-80); a whole vocabulary of smaller weights does not change a double near 1
_MIN_TEMPERATURE = 1e-5  # keeps 1 / temperature finite; at this value, the most likely token has all the weight


class Native(Protocol):
    """Makes all passes over the logits in one call, on machines with the compiled library."""

    def draw(self, blocks: torch.Tensor, steepness: list[float], uniform: list[float]) -> FirstDraw:
        """Draw from each row of contiguous float32 `blocks` (rows, blocks, `BLOCK`) by its random number in [0, 1).

        Logits are replaced by weights, exp((logit - maximum) * steepness); weights up to `MIN_WEIGHT` become 0. Rows
        with a steepness of 0 stay unchanged; their token is the first of the most likely tokens.
        """


class FirstDraw(NamedTuple):
    """The first draw of each row, and the maximum and sum of the weights in each block.

    `tokens` (rows,) holds a token, `INVALID` or `DEAD_END`; `drawn` (rows,) holds its weight. `peaks` (maxima) and
    `sums` are (rows, blocks). In a row that has logits instead of weights, `peaks` are of logits, and `sums` are 0.
    """

    tokens: torch.Tensor
    drawn: torch.Tensor
    peaks: torch.Tensor
    sums: torch.Tensor


def choose(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    uniform: Callable[[int, int], float],
    native: Native | None = None,
) -> list[int]:
    """A token, `INVALID` or `DEAD_END` per row of float32 `logits` (rows, vocabulary), which change in place.

    Filters apply in the order of transformers: temperature, top-k, top-p, min-p. Tokens as likely as the last token
    that a filter keeps are kept too. Greedy rows use the first of equally likely tokens. `uniform(row, attempt)`
    returns the row's random number in [0, 1) for that attempt.
    """
    blocks = as_blocks(logits)
    if native is not None:
        tokens, peaks = _choose_natively(blocks, params, uniform, native)
        return _choose_rest(blocks, peaks, params, uniform, tokens, [p.top_k > 0 for p in params])
    peaks = blocks.amax(-1)
    best, block = peaks.max(-1)
    best_blocks = blocks[torch.arange(len(blocks), device=logits.device), block]
    likeliest = block * BLOCK + best_blocks.argmax(-1)
    tokens = torch.where(best == -torch.inf, DEAD_END, torch.where(best.isfinite(), likeliest, INVALID)).tolist()
    return _choose_rest(blocks, peaks, params, uniform, tokens, [True] * len(params))


def _choose_natively(
    blocks: torch.Tensor, params: Sequence[SamplingParams], uniform: Callable[[int, int], float], native: Native
) -> tuple[list[int], torch.Tensor]:
    """A token per row, and the peaks of the blocks.

    Rows with top-k get their most likely token for now: `_choose_rest` then draws for those that are not greedy.
    """
    drawing = [p.temperature > 0 and p.top_k <= 0 for p in params]
    steepness = [s if draws else 0.0 for s, draws in zip(steepness_of(params), drawing, strict=True)]
    numbers = [uniform(row, 0) if draws else 0.0 for row, draws in enumerate(drawing)]
    first = native.draw(blocks, steepness, numbers)
    tokens = first.tokens.tolist()
    filtered = [i for i, p in enumerate(params) if drawing[i] and tokens[i] >= 0 and (p.top_p < 1 or p.min_p > 0)]
    if filtered:
        _redraw(blocks, first.sums, first.peaks, first.tokens, first.drawn[:, None], params, filtered, uniform)
        tokens = first.tokens.tolist()
    return tokens, first.peaks


def _choose_rest(
    blocks: torch.Tensor,
    peaks: torch.Tensor,
    params: Sequence[SamplingParams],
    uniform: Callable[[int, int], float],
    tokens: list[int],
    undrawn: list[bool],
) -> list[int]:
    """Replaces the entry of `tokens` with a drawn token for each `undrawn` row that is not greedy; returns `tokens`."""
    groups: dict[int, list[int]] = {}
    for row, (p, token) in enumerate(zip(params, tokens, strict=True)):
        if undrawn[row] and p.temperature > 0 and token >= 0:
            groups.setdefault(_bucket(p.top_k, peaks.shape[1]), []).append(row)
    for bucket, rows in groups.items():
        part, part_peaks = (blocks, peaks) if len(rows) == len(tokens) else (blocks[rows], peaks[rows])
        chosen = [params[row] for row in rows]
        numbers = None
        if bucket:
            part, part_peaks, numbers = _top_k(part, part_peaks, [p.top_k for p in chosen], bucket)
        weights, weight_peaks = _weigh(part, part_peaks, chosen)
        drawn = _draw(weights, weight_peaks, chosen, lambda i, attempt, rows=rows: uniform(rows[i], attempt))  # type: ignore[misc]
        if numbers is not None:
            drawn = numbers.gather(1, (drawn // BLOCK)[:, None])[:, 0] * BLOCK + drawn % BLOCK
        for row, token in zip(rows, drawn.tolist(), strict=True):
            tokens[row] = token
    return tokens


def as_blocks(logits: torch.Tensor) -> torch.Tensor:
    """Reshape (rows, vocabulary) to (rows, blocks, `BLOCK`), padded with -inf to a multiple of `BLOCK`."""
    if padding := -logits.shape[-1] % BLOCK:
        logits = F.pad(logits, (0, padding), value=-torch.inf)
    return logits.unflatten(-1, (-1, BLOCK))


def top_blocks(blocks: torch.Tensor, peaks: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` blocks with the highest peaks, (rows, count, `BLOCK`), and their numbers, ascending.

    These blocks contain each row's `count` most likely tokens.
    """
    numbers = peaks.topk(count, sorted=False).indices.sort().values
    return blocks[torch.arange(len(blocks), device=blocks.device)[:, None], numbers], numbers


def _bucket(top_k: int, num_blocks: int) -> int:
    """Number of blocks to search for the top k tokens, a power of two or all; 0 if k does not limit the choice.

    Depends only on the row, because other rows must not affect the choice among equally likely tokens.
    """
    if not 0 < top_k < num_blocks * BLOCK:
        return 0
    return min(1 << (top_k - 1).bit_length(), num_blocks)


def _top_k(
    blocks: torch.Tensor, peaks: torch.Tensor, top_k: list[int], bucket: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The blocks with each row's top k tokens, and the peaks and numbers of these blocks. Other tokens become -inf."""
    part, numbers = top_blocks(blocks, peaks, bucket)
    largest_k = min(max(top_k), part.shape[1] * BLOCK)
    k = torch.tensor(top_k, device=blocks.device)[:, None].clamp_(max=largest_k)
    lowest = part.flatten(1).topk(largest_k).values.gather(1, k - 1)
    return part.masked_fill_(part < lowest[..., None], -torch.inf), peaks.gather(1, numbers), numbers


def _weigh(
    blocks: torch.Tensor, peaks: torch.Tensor, params: Sequence[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace logits with exp((logit - maximum) / temperature) in place; return these weights and those of the peaks.

    The most likely token has weight 1. Weights up to `MIN_WEIGHT` become 0.
    """
    steepness = _column(steepness_of(params), blocks)
    best = peaks.amax(-1, keepdim=True)

    def exp(logits: torch.Tensor, best: torch.Tensor, steepness: torch.Tensor) -> torch.Tensor:
        # exp is an order of magnitude slower where it underflows, including for -inf.
        weights = logits.sub_(best).mul_(steepness).clamp_(min=_MIN_EXPONENT).exp_()
        return torch.threshold_(weights, MIN_WEIGHT, 0.0)

    return exp(blocks, best[..., None], steepness[..., None]), exp(peaks.clone(), best, steepness)


def steepness_of(params: Sequence[SamplingParams]) -> list[float]:
    """The factor for each row's logits: 1 / temperature."""
    return [1 / max(p.temperature, _MIN_TEMPERATURE) for p in params]


def _draw(
    weights: torch.Tensor, peaks: torch.Tensor, params: Sequence[SamplingParams], uniform: Callable[[int, int], float]
) -> torch.Tensor:
    """An admissible token of each row of `weights` (rows, blocks, `BLOCK`), drawn by weight; (rows,) int64."""
    sums = weights.sum(-1)
    rows = torch.arange(len(weights), device=weights.device)
    floor = _column([-1.0] * len(weights), weights)
    tokens, drawn = _invert(weights, rows, sums, floor, [uniform(i, 0) for i in range(len(weights))])
    filtered = [i for i, p in enumerate(params) if p.top_p < 1 or p.min_p > 0]
    if filtered:
        _redraw(weights, sums, peaks, tokens, drawn, params, filtered, uniform)
    return tokens


def _redraw(
    weights: torch.Tensor,
    sums: torch.Tensor,
    peaks: torch.Tensor,
    tokens: torch.Tensor,
    drawn: torch.Tensor,
    params: Sequence[SamplingParams],
    filtered: list[int],
    uniform: Callable[[int, int], float],
) -> None:
    """Draw again for the rows in `filtered` until every token is within top-p and min-p; changes `tokens` in place.

    `drawn` (rows, 1) are the tokens' weights.
    """
    rows = torch.tensor(filtered, device=weights.device)
    min_p = _column([params[i].min_p for i in filtered], weights)
    mass = _column([params[i].top_p if params[i].top_p < 1 else torch.inf for i in filtered], weights).double()
    mass = mass * sums[rows].double().sum(-1, keepdim=True)
    drawn, live = drawn[rows], filtered
    for attempt in itertools.count(1):
        rejected, bound, above = check_drawn(weights, peaks, rows, drawn, min_p, mass)
        again = rejected.nonzero()[:, 0]
        if not len(again):
            return
        rows, min_p, mass = rows[again], min_p[again], mass[again]
        live = [live[i] for i in again.tolist()]
        found, drawn = _invert(weights, rows, above[again], bound[again], [uniform(i, attempt) for i in live])
        tokens[rows] = found


def check_drawn(
    weights: torch.Tensor,
    peaks: torch.Tensor,
    rows: torch.Tensor,
    drawn: torch.Tensor,
    min_p: torch.Tensor,
    mass: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Check the drawn tokens of `rows` against min-p and top-p (nucleus sampling, arXiv 1904.09751).

    `drawn` (n, 1) are the tokens' weights. `mass` (n, 1) is p times the row's total weight; inf without top-p. Returns
    three tensors:

    - (n,): whether each token is rejected.
    - (n, 1): a bound. In a rejected row, every admissible token weighs more.
    - (n, blocks): for each block, the sum of the weights above the bound.
    """
    below_min_p = torch.nextafter(min_p, torch.full_like(min_p, -1.0))
    bound = torch.where(drawn < min_p, below_min_p, drawn)
    # The margin is needed because a peak may be rounded differently from the same token's weight.
    hot = peaks[rows] > bound * (1 - 1e-6)
    above = torch.zeros(hot.shape, device=weights.device)
    index, block = hot.nonzero(as_tuple=True)
    part = weights[rows[index], block]
    above[index, block] = part.mul_(part > bound[index]).sum(-1)
    heavier = above.double().sum(-1, keepdim=True)
    rejected = (drawn < min_p) | ((heavier >= mass) & (heavier > 0))
    return rejected[:, 0], bound, above


def _invert(
    weights: torch.Tensor, rows: torch.Tensor, sums: torch.Tensor, floor: torch.Tensor, uniform: list[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens (n,) of `rows` at which the cumulative weight passes the random numbers, and their weights (n, 1).

    Only weights above `floor` count; `sums` (n, blocks) has their sum per block. The search has two levels, because a
    running sum over the whole vocabulary would take longer than everything else.
    """
    edges = sums.double().cumsum(-1)
    target = torch.tensor(uniform, dtype=torch.double, device=weights.device)[:, None] * edges[:, -1:] * _BELOW_ONE
    block = torch.searchsorted(edges, target, right=True)
    target = target - torch.where(block > 0, edges.gather(-1, (block - 1).clamp(min=0)), 0.0)
    part = weights[rows, block[:, 0]]
    within = part.mul(part > floor).double().cumsum(-1)
    inside = torch.searchsorted(within, torch.minimum(target, within[:, -1:] * _BELOW_ONE), right=True)
    return (block * BLOCK + inside)[:, 0], part.gather(1, inside)


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float, device=like.device)[:, None]
