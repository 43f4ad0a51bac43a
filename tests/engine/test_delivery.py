"""Events reach the coroutine that waits for them: all of them, in order, in few pieces."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from serve_app.contracts.generation import Delta, Event, Finished, FinishReason, Started
from serve_app.engine.delivery import LoopSink, Outbox

STOP = FinishReason.STOP


class Delivered:
    """One request's outbox and sink under a clock of the test's own."""

    def __init__(self, interval_s: float) -> None:
        self.now = 100.0
        self.lost: list[str] = []
        self.outbox = Outbox(self.lost.append, clock=lambda: self.now)
        self.sink = LoopSink(asyncio.get_running_loop(), lambda: interval_s)

    async def step(self, *events: Event) -> list[Event]:
        """Delivers `events` as the engine does and returns what the receiver gets."""
        for event in events:
            self.outbox.put("r", self.sink, event)
        self.outbox.deliver()
        await asyncio.sleep(0)  # what `call_soon_threadsafe` has put before this
        got = []
        while not self.sink.events.empty():
            got.append(self.sink.events.get_nowait())
        return got


async def test_the_first_delta_does_not_wait_and_later_ones_come_together() -> None:
    made = Delivered(interval_s=0.02)
    assert await made.step(Started(3, 0)) == [Started(3, 0)]
    made.now += 0.001
    assert await made.step(Delta("first", 1)) == [Delta("first", 1)]
    for count in range(2, 6):
        made.now += 0.004
        assert await made.step(Delta("x", count)) == []
    made.now += 0.005
    assert await made.step(Delta("y", 6)) == [Delta("xxxxy", 6)]


async def test_a_waiting_delta_is_sent_after_the_interval_even_if_no_other_follows() -> None:
    made = Delivered(interval_s=0.02)
    await made.step(Delta("a", 1))
    made.now += 0.01
    assert await made.step(Delta("b", 2)) == []
    made.now += 0.01
    assert await made.step() == [Delta("b", 2)]
    assert await made.step() == []


async def test_the_end_sends_the_waiting_deltas_first() -> None:
    made = Delivered(interval_s=10.0)
    await made.step(Delta("a", 1))
    assert await made.step(Delta("b", 2), Delta("c", 3), Finished(STOP, 1, 0, 3)) == [
        Delta("bc", 3),
        Finished(STOP, 1, 0, 3),
    ]


@pytest.mark.parametrize("seed", range(20))
async def test_joining_loses_no_text_and_no_count(seed: int) -> None:
    rng = random.Random(seed)
    made = Delivered(interval_s=rng.choice([0.0, 0.001, 0.01]))
    pieces = [rng.choice(["", "a", "é", "xyz", "\n"]) for _ in range(60)]
    out = await made.step(Started(3, 1))
    for count, piece in enumerate(pieces, start=1):
        made.now += rng.choice([0.0, 0.0005, 0.004])
        out += await made.step(Delta(piece, count))
    out += await made.step(Finished(STOP, 3, 1, len(pieces)))
    assert out[0] == Started(3, 1)
    assert out[-1] == Finished(STOP, 3, 1, len(pieces))
    deltas = [event for event in out if isinstance(event, Delta)]
    assert len(deltas) == len(out) - 2
    assert "".join(delta.text for delta in deltas) == "".join(pieces)
    counts = [delta.completion_tokens for delta in deltas]
    assert counts == sorted(set(counts))
    assert counts[-1] == len(pieces)


async def test_requests_are_joined_each_for_itself() -> None:
    made = Delivered(interval_s=0.02)
    other = LoopSink(asyncio.get_running_loop(), lambda: 0.0)
    await made.step(Delta("a", 1))
    made.outbox.put("other", other, Delta("z", 1))
    assert await made.step(Delta("b", 2)) == []
    assert other.events.get_nowait() == Delta("z", 1)


def test_a_receiver_whose_loop_is_closed_is_reported_as_lost() -> None:
    async def begin() -> Any:
        return Delivered(interval_s=0.0)

    loop = asyncio.new_event_loop()
    made = loop.run_until_complete(begin())
    loop.close()
    made.outbox.put("r", made.sink, Delta("a", 1))
    made.outbox.deliver()
    assert made.lost == ["r"]
