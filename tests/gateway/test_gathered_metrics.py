"""What requests count reaches Ray's metrics: every count, under its tags, and without a call for each."""

from __future__ import annotations

import asyncio
from collections import Counter as Counts

import pytest

from deployments import gathered
from deployments.gathered import Gathered

MODEL, OTHER = ("model", "svc-chat"), ("model", "svc-coder")


class Told:
    """A counter and a histogram that remember what they were told."""

    def __init__(self) -> None:
        self.calls = 0
        self.counted: Counts[tuple[tuple[str, str], ...]] = Counts()
        self.observed: list[tuple[float, dict[str, str]]] = []

    def inc(self, value: float = 1.0, tags: dict[str, str] | None = None) -> None:
        assert value > 0
        self.calls += 1
        self.counted[tuple((tags or {}).items())] += int(value)

    def observe(self, value: float, tags: dict[str, str] | None = None) -> None:
        self.observed.append((value, {} if tags is None else tags))


async def test_counts_are_summed_by_counter_and_tags() -> None:
    of, first, second = Gathered(), Told(), Told()
    for number in range(100):
        of.inc(first, 2, MODEL if number % 4 else OTHER)
        of.inc(second, 1)
    assert not first.counted
    of.flush()
    assert first.counted == {(MODEL,): 150, (OTHER,): 50}
    assert second.counted == {(): 100}
    assert (first.calls, second.calls) == (2, 1)
    of.flush()
    assert (first.calls, second.calls) == (2, 1)


async def test_a_histogram_gets_every_value() -> None:
    of, times = Gathered(), Told()
    values = [number / 10 for number in range(50)]
    for value in values:
        of.observe(times, value, MODEL)
    of.observe(times, 7.0)
    of.flush()
    assert times.observed == [(value, dict([MODEL])) for value in values] + [(7.0, {})]


async def test_it_flushes_by_itself_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered, "FLUSH_S", 0.01)
    of, told = Gathered(), Told()
    for turn in (1, 2, 3):
        of.inc(told, 1, MODEL)
        of.observe(told, 0.5)
        async with asyncio.timeout(30):
            while len(told.observed) < turn:
                await asyncio.sleep(0.001)
        assert told.counted == {(MODEL,): turn}


async def test_what_comes_while_it_flushes_is_not_lost() -> None:
    of, late = Gathered(), Told()

    class Counting(Told):
        def inc(self, value: float = 1.0, tags: dict[str, str] | None = None) -> None:
            super().inc(value, tags)
            of.inc(late, 1)

    of.inc(Counting(), 1)
    of.flush()
    of.flush()
    assert late.counted == {(): 1}
