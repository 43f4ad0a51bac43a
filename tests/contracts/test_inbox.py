"""Items that stream through an event loop arrive in order, and leave room for its other work."""

from __future__ import annotations

import asyncio

from serve_app.contracts.inbox import KEYS_PER_TURN, Inbox, Turns


async def test_a_reader_gets_each_item_in_order_whether_it_waits_or_not() -> None:
    inbox: Inbox[int] = Inbox(asyncio.get_running_loop())
    inbox.put(1)
    assert await inbox.get() == 1
    reading = asyncio.ensure_future(inbox.get())
    await asyncio.sleep(0)
    for item in (2, 3):
        inbox.put(item)
    assert await reading == 2
    assert await inbox.get() == 3


async def test_waiting_ends_without_an_item_when_its_time_is_over() -> None:
    inbox: Inbox[int] = Inbox(asyncio.get_running_loop())
    await inbox.wait(0)
    await inbox.wait(0.001)
    assert not inbox.items


async def test_a_reader_that_was_cancelled_loses_no_item() -> None:
    inbox: Inbox[int] = Inbox(asyncio.get_running_loop())
    reading = asyncio.ensure_future(inbox.get())
    await asyncio.sleep(0)
    inbox.put(1)
    reading.cancel()
    await asyncio.wait([reading])
    assert await inbox.get() == 1


class HandedOut:
    def __init__(self) -> None:
        self.pieces: list[tuple[int, list[str]]] = []
        self.turns = Turns(asyncio.get_running_loop(), lambda key, items: self.pieces.append((key, items)))


async def test_a_few_keys_are_handed_out_at_once() -> None:
    made = HandedOut()
    made.turns.add([(1, "a"), (2, "b"), (1, "c")])
    assert made.pieces == [(1, ["a", "c"]), (2, ["b"])]


async def test_other_work_runs_between_turns() -> None:
    made = HandedOut()
    made.turns.add([(key, "a") for key in range(3 * KEYS_PER_TURN)])
    counts = [len(made.pieces)]
    while len(made.pieces) < 3 * KEYS_PER_TURN:
        await asyncio.sleep(0)
        counts.append(len(made.pieces))
    assert counts == [KEYS_PER_TURN, 2 * KEYS_PER_TURN, 3 * KEYS_PER_TURN]


async def test_a_loop_that_falls_behind_joins_what_waits_and_keeps_the_order() -> None:
    made, last = HandedOut(), KEYS_PER_TURN  # this key waits for the second turn
    for item in "abc":
        made.turns.add([(key, item) for key in range(last + 1)])
    while sum(len(items) for _, items in made.pieces) < 3 * (last + 1):
        await asyncio.sleep(0)
    assert [items for key, items in made.pieces if key == last] == [["a", "b", "c"]]
    for key in range(last):
        assert [item for one, items in made.pieces if one == key for item in items] == ["a", "b", "c"]


async def test_at_the_end_all_that_waits_is_handed_out() -> None:
    made = HandedOut()
    made.turns.add([(key, "a") for key in range(3 * KEYS_PER_TURN)])
    made.turns.finish()
    assert len(made.pieces) == 3 * KEYS_PER_TURN
    await asyncio.sleep(0)
    made.turns.add([(1, "b")])
    assert made.pieces[-1] == (1, ["b"])
