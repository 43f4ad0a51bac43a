"""Accounts' behaviour: a crowd that sends now and then, workers that always have a next request, and steady streams."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from math import exp, inf, log

from bench.pressure.world import World

SDK_RETRIES = 2  # automatic retries of client libraries


@dataclass(frozen=True, slots=True)
class Shape:
    """Log-normal lengths of prompts and replies, in tokens."""

    prompt: float = 700.0  # median, like `output`
    output: float = 200.0
    prompt_sigma: float = 0.8
    output_sigma: float = 0.7
    most_prompt: int = 8_000
    most_output: int = 1_000

    def draw(self, world: World) -> tuple[int, int]:
        rng = world.rng
        prompt = rng.lognormvariate(log(self.prompt), self.prompt_sigma)
        output = rng.lognormvariate(log(self.output), self.output_sigma)
        return max(1, min(self.most_prompt, int(prompt))), max(1, min(self.most_output, int(output)))

    def mean(self, world: World, draws: int = 20_000) -> float:
        """Mean tokens of a request."""
        return sum(sum(self.draw(world)) for _ in range(draws)) / draws


class Crowd:
    """Many accounts that send requests at random times. A refused or failed request is retried twice, then given up.

    `rates` has each account's requests per second while `curve` is 1. `curve(t)` is at most `most`.
    """

    def __init__(
        self, world: World, rates: dict[str, float], shape: Shape, curve: Callable[[float], float], most: float
    ) -> None:
        self._world = world
        self._accounts = list(rates)
        self._sums = list(accumulate(rates.values()))
        self._shape = shape
        self._curve = curve
        self._most = most
        self.sent = self.given_up = 0
        self._next()

    def _next(self) -> None:
        # A Poisson process with a changing rate, by thinning a process with the maximum rate.
        self._world.after(self._world.rng.expovariate(self._sums[-1] * self._most), self._arrive)

    def _arrive(self) -> None:
        world = self._world
        self._next()
        if world.rng.random() * self._most > self._curve(world.now):
            return
        account_id = self._accounts[bisect(self._sums, world.rng.random() * self._sums[-1])]
        prompt, output = self._shape.draw(world)
        world.record.offered(world.now, prompt + output)
        self.sent += 1
        self._try(account_id, prompt, output, SDK_RETRIES)

    def _try(self, account_id: str, prompt: int, output: int, retries: int) -> None:
        def again(wait_s: float) -> None:
            if retries:
                self._world.after(wait_s, lambda: self._try(account_id, prompt, output, retries - 1))
            else:
                self.given_up += 1

        refusal = self._world.submit(account_id, prompt, output, lambda kind: None if kind == "done" else again(2.0))
        if refusal is not None:
            again(refusal.retry_after_s or 1.0)


class Workers:
    """One account with `at_once` open requests while it is active. With `retry_s` None, it obeys retry-after."""

    def __init__(
        self,
        world: World,
        account_id: str,
        shape: Shape,
        at_once: int,
        *,
        start_s: float = 0.0,
        end_s: float = inf,
        retry_s: float | None = None,
    ) -> None:
        self._world = world
        self._account_id = account_id
        self._shape = shape
        self._end_s = end_s
        self._retry_s = retry_s
        for _ in range(at_once):
            world.at(start_s + world.rng.random(), self._work)

    def _work(self) -> None:
        if self._world.now < self._end_s:
            self._try(*self._shape.draw(self._world))

    def _try(self, prompt: int, output: int) -> None:
        world = self._world
        if world.now >= self._end_s:
            return

        def again(wait_s: float) -> None:
            world.after(wait_s if self._retry_s is None else self._retry_s, lambda: self._try(prompt, output))

        refusal = world.submit(
            self._account_id, prompt, output, lambda kind: self._work() if kind == "done" else again(2.0)
        )
        if refusal is not None:
            again(refusal.retry_after_s or 1.0)


class Stream:
    """One account that sends `per_s` requests per second at random times, and does not retry refused ones."""

    def __init__(
        self, world: World, account_id: str, shape: Shape, per_s: float, *, start_s: float = 0.0, end_s: float = inf
    ) -> None:
        self._world = world
        self._account_id = account_id
        self._shape = shape
        self._per_s = per_s
        self._end_s = end_s
        self.sent = self.refused = 0
        world.at(start_s, self._next)

    def _next(self) -> None:
        world = self._world
        world.after(world.rng.expovariate(self._per_s), self._arrive)

    def _arrive(self) -> None:
        world = self._world
        if world.now >= self._end_s:
            return
        self._next()
        prompt, output = self._shape.draw(world)
        world.record.offered(world.now, prompt + output)
        self.sent += 1
        self.refused += world.submit(self._account_id, prompt, output, lambda kind: None) is not None


def daily(now: float) -> float:
    """The crowd's rate over a day, relative to its peak: 0.2 at night, and two maxima, the higher in the afternoon."""
    hour = now / 3600.0 % 24.0
    return 0.2 + 0.55 * exp(-(((hour - 10.5) / 2.0) ** 2)) + 0.8 * exp(-(((hour - 16.0) / 2.5) ** 2))
