"""Random days of requests, modelled on published traces. A day is determined by its seed.

- `conversation` and `code`: lengths and rates per minute as in Azure's traces of 2023 (Patel et al., Splitwise, ISCA
  2024; github.com/Azure/AzurePublicDataset, data/AzureLLMInferenceTrace_{conv,code}.csv, CC-BY). The quantiles below
  are those of the files. In the files, the coefficients of variation (conversation, code) are 0.25 and 1.03 for
  requests per minute, and 1.09 and 13 for gaps between requests. The daily curve is our assumption: the busiest hour
  has 1.7 times the mean rate and 3.3 times that of the quietest hour (conversation), or 2.8 and 34.6 times (code).
- `bursts`: gaps with a gamma distribution, as in BurstGPT's model of its trace (Wang et al., arXiv 2401.17644), with a
  shape of 0.25 (a coefficient of variation of 2). The daily curve is that of `conversation`, with surges to three times
  the rate.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import cos, exp, log, pi, sqrt
from random import Random

from bench.simulation.cluster import Arrival

DAY_S = 86_400.0
ACCOUNTS = tuple(f"account-{number}" for number in range(40))
_WEIGHTS = list(accumulate(1.0 / (number + 1) for number in range(len(ACCOUNTS))))  # Zipf
_STEP_S = 10.0  # the rate is constant within steps of this length

Quantiles = tuple[tuple[float, float], ...]  # share of the requests, tokens

CONVERSATION = (
    ((0, 2), (0.1, 207), (0.25, 396), (0.5, 1020), (0.75, 1189), (0.9, 2734), (0.95, 4083), (1, 4142)),
    ((0, 8), (0.1, 54), (0.25, 85), (0.5, 129), (0.75, 395), (0.9, 424), (0.95, 451), (0.99, 601), (1, 1000)),
)
CODE = (
    ((0, 3), (0.1, 147), (0.25, 578), (0.5, 1469), (0.75, 2744), (0.9, 5187), (0.95, 7303), (1, 7437)),
    ((0, 1), (0.1, 7), (0.25, 9), (0.5, 13), (0.75, 24), (0.9, 55), (0.95, 90), (0.99, 251), (1, 1000)),
)


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of day. `mean_per_s` is the day's mean rate, in requests per second."""

    name: str
    title: str
    mean_per_s: float
    peak: float  # rate of the busiest hour, as a multiple of the mean
    quietest: float  # rate of the quietest hour, as a multiple of the mean
    lengths: tuple[Quantiles, Quantiles]
    gap_shape: float  # shape of the gamma distribution of the gaps between requests; 1: a Poisson process
    variation: float  # coefficient of variation of the rate, besides the daily curve
    lasts_s: float  # time constant of that variation
    surges: int = 0  # number per day; each lasts ten minutes and triples the rate
    # Targets for the choice of settings: maximum share of refused or late requests, and p95 of the first token.
    most_refused: float = 0.01
    first_token_s: float = 5.0


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("conversation", "conversation (Azure)", 1.3, 1.7, 1.7 / 3.3, CONVERSATION, 1.0, 0.25, 600.0),
        Shape(
            "code", "code (Azure)", 1.3, 2.8, 2.8 / 34.6, CODE, 1.0, 1.0, 60.0, most_refused=0.05, first_token_s=15.0
        ),
        Shape("bursts", "bursts (BurstGPT)", 1.1, 1.7, 1.7 / 3.3, CONVERSATION, 0.25, 0.25, 600.0, surges=6),
    )
}


def arrivals(shape: Shape, seed: int, seconds: float = DAY_S, since_s: float = 0.0) -> Iterator[Arrival]:
    """Yields the requests of a day, or of a part of it that begins at `since_s`, in the order of time."""
    rng = Random(f"{shape.name}-{seed}")
    rate = _rate(shape, rng)
    at = left = 0.0
    step_ends, now_per_s = 0.0, 0.0
    while True:
        # A renewal process with gaps of mean 1, on a clock whose speed is the rate.
        left += rng.gammavariate(shape.gap_shape, 1.0 / shape.gap_shape)
        while left > (step_ends - at) * now_per_s:
            left -= (step_ends - at) * now_per_s
            at = step_ends
            if at >= seconds:
                return
            now_per_s = rate(since_s + at)
            step_ends += _STEP_S
        at += left / now_per_s
        left = 0.0
        account_id = ACCOUNTS[bisect_right(_WEIGHTS, rng.random() * _WEIGHTS[-1])]
        prompt, output = (draw(quantiles, rng.random()) for quantiles in shape.lengths)
        yield Arrival(at, account_id, prompt, output)


def draw(quantiles: Quantiles, share: float) -> int:
    """Number of tokens at the quantile `share`, interpolated linearly between the given quantiles."""
    index = min(bisect_right(quantiles, (share, 1e9)), len(quantiles) - 1)
    (low, fewer), (high, more) = quantiles[index - 1], quantiles[index]
    return max(1, round(fewer + (more - fewer) * (share - low) / (high - low)))


def hours(shape: Shape, at: float) -> float:
    """Daily curve at a time, as a multiple of the mean rate: a power of a cosine wave from `quietest` to `peak`."""
    wave = (1.0 - cos(2.0 * pi * (at / DAY_S - 0.125))) / 2.0  # minimum at three o'clock
    return shape.quietest + (shape.peak - shape.quietest) * wave ** _power(shape)


@cache
def _power(shape: Shape) -> float:
    """Finds, by bisection, the power of the wave for which `hours` has a mean of 1."""
    wanted = (1.0 - shape.quietest) / (shape.peak - shape.quietest)
    low, high = 0.05, 20.0
    for _ in range(40):
        middle = (low + high) / 2.0
        mean = sum(((1.0 - cos(2.0 * pi * (n + 0.5) / 200.0)) / 2.0) ** middle for n in range(200)) / 200.0
        low, high = (middle, high) if mean > wanted else (low, middle)
    return low


def _rate(shape: Shape, rng: Random) -> Callable[[float], float]:
    """Returns a function for the rate at a time. Each call advances its log-normal variation by one `_STEP_S`."""
    sigma = sqrt(log(1.0 + shape.variation**2))
    kept = exp(-_STEP_S / shape.lasts_s)
    surges = [rng.uniform(0.0, DAY_S) for _ in range(shape.surges)]
    power_curve = [hours(shape, (n + 0.5) * 300.0) for n in range(int(DAY_S / 300.0))]
    level = rng.gauss(0.0, 1.0)

    def rate(at: float) -> float:
        nonlocal level
        level = kept * level + sqrt(1.0 - kept * kept) * rng.gauss(0.0, 1.0)
        surge = 3.0 if any(0.0 <= at - start < 600.0 for start in surges) else 1.0
        base = shape.mean_per_s * power_curve[int(at % DAY_S / 300.0)]
        return base * surge * exp(sigma * level - sigma * sigma / 2.0)

    return rate
