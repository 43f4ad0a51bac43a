"""Many callers, one call at a time: order, isolation of failures, and cancelled callers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from serve_app.contracts.calls import Coalescer, Unavailable


class Other:
    """The other side: returns n * 10 for n; `plan` lists what its calls do, in order."""

    def __init__(self, *plan: Callable[[], Any]) -> None:
        self.plan = list(plan)
        self.calls: list[list[int]] = []
        self.in_flight = self.most_in_flight = 0
        self.called = asyncio.Event()

    async def __call__(self, asks: list[int]) -> list[int]:
        self.calls.append(asks)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self.called.set()
        try:
            if self.plan and (step := self.plan.pop(0)()) is not None:
                await step
            return [ask * 10 for ask in asks]
        finally:
            self.in_flight -= 1


def raising(error: BaseException) -> Callable[[], Any]:
    def plan() -> None:
        raise error

    return plan


def fine() -> None:
    return None


async def test_items_that_arrive_during_a_call_go_into_the_next_call_in_order() -> None:
    gate = asyncio.Event()
    other = Other(gate.wait)
    calls: Coalescer[int, int] = Coalescer(other, timeout_s=60)
    first = calls.submit(0)
    await other.called.wait()
    rest = [calls.submit(number) for number in range(1, 50)]
    gate.set()
    assert await asyncio.gather(first, *rest) == [number * 10 for number in range(50)]
    assert other.calls == [[0], list(range(1, 50))]
    assert other.most_in_flight == 1


async def test_a_list_has_a_bound() -> None:
    gate = asyncio.Event()
    other = Other(gate.wait)
    calls: Coalescer[int, int] = Coalescer(other, timeout_s=60, most=4)
    first = calls.submit(0)
    await other.called.wait()
    rest = [calls.submit(number) for number in range(1, 11)]
    gate.set()
    await asyncio.gather(first, *rest)
    assert [len(call) for call in other.calls] == [1, 4, 4, 2]


@pytest.mark.parametrize(
    "error", [RuntimeError("no"), asyncio.CancelledError(), TimeoutError("late"), KeyError("x")], ids=repr
)
async def test_a_failing_call_fails_its_own_list_and_no_other(error: BaseException) -> None:
    other = Other(raising(error))
    calls: Coalescer[int, int] = Coalescer(other, timeout_s=60)
    lost = [calls.submit(1), calls.submit(2)]
    results = await asyncio.gather(*lost, return_exceptions=True)
    assert all(isinstance(result, Unavailable) for result in results)
    assert results[0] is not results[1]
    assert await calls.submit(3) == 30


async def test_items_that_wait_behind_a_failing_call_get_their_results() -> None:
    gate = asyncio.Event()

    async def late_failure() -> None:
        await gate.wait()
        raise asyncio.CancelledError

    other = Other(late_failure)
    calls: Coalescer[int, int] = Coalescer(other, timeout_s=60)
    first = calls.submit(1)
    await other.called.wait()
    second = calls.submit(2)
    gate.set()
    with pytest.raises(Unavailable):
        await first
    assert await second == 20


async def test_a_call_that_never_answers_fails_its_own_list_after_the_timeout() -> None:
    other = Other(asyncio.Event().wait)
    calls: Coalescer[int, int] = Coalescer(other, timeout_s=0.02)
    with pytest.raises(Unavailable):
        await calls.submit(1)
    assert other.in_flight == 0
    calls.timeout_s = 60
    assert await calls.submit(2) == 20


async def test_a_list_of_results_of_the_wrong_length_raises_unavailable() -> None:
    async def short(asks: list[int]) -> list[int]:
        return asks[1:]

    calls: Coalescer[int, int] = Coalescer(short, timeout_s=60)
    with pytest.raises(Unavailable):
        await calls.submit(1)


async def test_a_cancelled_caller_does_not_cancel_the_others() -> None:
    gate = asyncio.Event()
    other = Other(gate.wait)
    calls: Coalescer[int, int] = Coalescer(other, timeout_s=60)

    async def ask(number: int) -> int:
        return await calls.submit(number)

    callers = [asyncio.create_task(ask(number)) for number in range(3)]
    await other.called.wait()
    for caller in callers[:2]:  # one of them has started the call
        caller.cancel()
    late = asyncio.create_task(ask(9))
    gate.set()
    assert await callers[2] == 20
    assert await late == 90
    assert callers[0].cancelled()


async def test_the_call_does_not_run_in_the_context_of_the_first_caller() -> None:
    # Ray Serve cancels the calls that are made in a request's context together with the request.
    import contextvars

    request: contextvars.ContextVar[str] = contextvars.ContextVar("request")
    seen: list[str | None] = []

    async def send(asks: list[int]) -> list[int]:
        seen.append(request.get(None))
        return asks

    request.set("the first one's")
    calls: Coalescer[int, int] = Coalescer(send, timeout_s=60)
    await calls.submit(1)
    assert seen == [None]


async def test_an_ask_that_its_caller_has_given_up_is_not_sent() -> None:
    gate = asyncio.Event()
    other = Other(gate.wait)
    calls: Coalescer[int, int] = Coalescer(other, timeout_s=60)
    first = calls.submit(0)
    await other.called.wait()
    for number in range(1, 50):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await calls.submit(number)
    late = calls.submit(99)
    gate.set()
    assert (await first, await late) == (0, 990)
    assert other.calls == [[0], [99]]


async def test_what_waits_can_be_failed_at_once() -> None:
    gate = asyncio.Event()
    other = Other(gate.wait)
    calls: Coalescer[int, int] = Coalescer(other, timeout_s=60)
    first = calls.submit(0)
    await other.called.wait()
    waiting = [calls.submit(number) for number in range(1, 5)]
    calls.fail_waiting("the database is away")
    assert all(isinstance(result, Unavailable) for result in await asyncio.gather(*waiting, return_exceptions=True))
    last = calls.submit(7)
    gate.set()
    assert (await first, await last) == (0, 70)
    assert other.calls == [[0], [7]]
