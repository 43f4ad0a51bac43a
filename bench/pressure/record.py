"""Records a simulated backend by time window: goodput, shares, refusals, waits, and the multiplier of the limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

from bench.simulation.replica import Job
from serve_app.contracts.limiting import Refusal
from serve_app.contracts.limits import Contract

SHARE = "429 share"  # the account is above its share of a backend under pressure
CONTRACT = "429 contract"  # the account is above the requests, tokens or concurrency of its contract
WAIT = "503 wait"  # the expected wait is too long
FULL = "503 queue full"
LOST = "503 replica lost"
LATE = "late"  # admitted, but not started by the deadline
KINDS = (SHARE, CONTRACT, WAIT, FULL, LOST, LATE)


@dataclass(slots=True)
class Window:
    """Sums over one window."""

    offered: int = 0  # tokens of new requests, without retries
    done: int = 0  # prompt and output tokens of completed requests
    by_account: Counter[str] = field(default_factory=Counter)  # `done` by account
    refusals: Counter[str] = field(default_factory=Counter)
    limited: Counter[str] = field(default_factory=Counter)  # SHARE refusals by account
    longest_wait_s: float = 0.0
    samples: int = 0  # number of values in the sums below
    multiplier: float = 0.0
    least_multiplier: float = 1.0
    pressure: float = 0.0
    replicas: float = 0.0

    def mean(self, total: float) -> float:
        return total / self.samples if self.samples else 0.0


class Record:
    """The windows, by number."""

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self.windows: dict[int, Window] = {}

    def at(self, now: float) -> Window:
        number = int(now // self.window_s)
        window = self.windows.get(number)
        if window is None:
            window = self.windows[number] = Window()
        return window

    def offered(self, now: float, tokens: int) -> None:
        self.at(now).offered += tokens

    def refused(self, now: float, account_id: str, refusal: Refusal, contract: Contract) -> None:
        window = self.at(now)
        if refusal.status == 503:
            window.refusals[WAIT] += 1
        elif refusal.code == "tokens" and refusal.tokens is not None and refusal.tokens.limit < contract.tpm:
            window.refusals[SHARE] += 1
            window.limited[account_id] += 1
        else:
            window.refusals[CONTRACT] += 1

    def ended(self, now: float, job: Job, kind: str) -> None:
        window = self.at(now)
        if kind == "done":
            window.done += job.prompt + job.output
            window.by_account[job.tenant] += job.prompt + job.output
        else:
            window.refusals[{"late": LATE, "lost": LOST, "full": FULL}[kind]] += 1
        if job.started_at < inf:
            window.longest_wait_s = max(window.longest_wait_s, job.started_at - job.arrived_at)

    def saw(self, now: float, multiplier: float, pressure: float, replicas: int) -> None:
        window = self.at(now)
        window.samples += 1
        window.multiplier += multiplier
        window.least_multiplier = min(window.least_multiplier, multiplier)
        window.pressure += pressure
        window.replicas += replicas

    def between(self, start_s: float, end_s: float) -> list[Window]:
        """The windows from `start_s` to `end_s`, including empty ones."""
        first, last = round(start_s / self.window_s), round(end_s / self.window_s)
        return [self.windows.get(number, Window()) for number in range(first, last)]

    def tokens(self, start_s: float, end_s: float) -> Counter[str]:
        """Completed tokens by account."""
        total: Counter[str] = Counter()
        for window in self.between(start_s, end_s):
            total.update(window.by_account)
        return total

    def refusals(self, start_s: float = 0.0, end_s: float = inf) -> Counter[str]:
        """Refusals by kind."""
        total: Counter[str] = Counter()
        for number, window in self.windows.items():
            if start_s <= number * self.window_s < end_s:
                total.update(window.refusals)
        return total


def jain(values: Iterable[float]) -> float:
    """Jain's fairness index, 1/n to 1 (Jain, Chiu, Hawe 1984): 1 if all values are equal, or without values."""
    found = list(values)
    squares = sum(value * value for value in found)
    return sum(found) ** 2 / (len(found) * squares) if squares else 1.0


def weighted(tokens: Mapping[str, int], weights: Mapping[str, float]) -> list[float]:
    """Tokens per unit of weight, for each account in `weights`."""
    return [tokens.get(account_id, 0) / weight for account_id, weight in weights.items()]
