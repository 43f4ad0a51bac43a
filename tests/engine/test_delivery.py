"""Events reach the coroutine that waits for them: all of them, at once, and in order."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from serve_app.contracts.generation import Delta, Event, Finished, FinishReason, Started
from serve_app.engine.delivery import LoopSink, Outbox


class Delivered:
    """One outbox, and the sinks of two requests."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self.outbox = Outbox(self.lost.append)
        self.sinks = {name: LoopSink(asyncio.get_running_loop()) for name in ("a", "b")}

    async def step(self, **events: list[Event]) -> dict[str, list[Event]]:
        """Delivers the events of each request as the engine does, and returns what the receivers get."""
        for name, ones in events.items():
            for event in ones:
                self.outbox.put(name, self.sinks[name], event)
        self.outbox.deliver()
        await asyncio.sleep(0)  # what `call_soon_threadsafe` has put before this
        got: dict[str, list[Event]] = {}
        for name, sink in self.sinks.items():
            got[name] = list(sink.events.items)
            sink.events.items.clear()
        return got


async def test_each_step_delivers_its_events_at_once() -> None:
    made = Delivered()
    assert await made.step(a=[Started(3, 0)]) == {"a": [Started(3, 0)], "b": []}
    for count in range(1, 4):
        assert await made.step(a=[Delta("x", count)]) == {"a": [Delta("x", count)], "b": []}
    assert await made.step() == {"a": [], "b": []}


async def test_events_of_a_step_arrive_in_order_each_at_its_own_request() -> None:
    made, drawn = Delivered(), random.Random(1)
    for _ in range(50):
        events: dict[str, list[Event]] = {
            name: [Delta(str(drawn.random()), number) for number in range(drawn.randrange(4))] for name in made.sinks
        }
        events["a"].append(Finished(FinishReason.STOP, 1, 0, 3))
        assert await made.step(**events) == events


def test_a_receiver_whose_loop_is_closed_is_reported_as_lost_once() -> None:
    async def begin() -> Any:
        return Delivered()

    loop = asyncio.new_event_loop()
    made = loop.run_until_complete(begin())
    loop.close()
    for count in (1, 2):
        made.outbox.put("a", made.sinks["a"], Delta("x", count))
    made.outbox.deliver()
    assert made.lost == ["a"]
