"""Starts of requests: a few in each turn of the event loop, accounts in turn."""

from __future__ import annotations

import asyncio

from serve_app.gateway.starts import PER_TURN, Starts


class CountedTurns:
    """Counts the turns of the event loop, and records which requests start in which turn."""

    def __init__(self) -> None:
        self.number = 0
        self.started: list[tuple[int, str]] = []
        self._starts = Starts()
        self._counting = asyncio.get_running_loop().call_soon(self._count)

    def _count(self) -> None:
        self.number += 1
        self._counting = asyncio.get_running_loop().call_soon(self._count)

    def request(self, account: str) -> asyncio.Task[None]:
        async def start() -> None:
            await self._starts.wait(account)
            self.started.append((self.number, account))

        return asyncio.ensure_future(start())

    def stop(self) -> None:
        self._counting.cancel()


async def test_a_single_request_starts_in_the_turn_in_which_it_arrives() -> None:
    turns = CountedTurns()
    for _ in range(3):
        await asyncio.sleep(0)
        arrived = turns.number
        await turns.request("acct_a")
        assert turns.started[-1][0] <= arrived + 1
    turns.stop()


async def test_a_burst_starts_a_few_requests_a_turn_in_their_order() -> None:
    turns = CountedTurns()
    await asyncio.gather(*(turns.request("acct_a") for _ in range(10 * PER_TURN)))
    turns.stop()
    in_turn = [number for number, _ in turns.started]
    assert len(in_turn) == 10 * PER_TURN
    assert max(in_turn.count(number) for number in in_turn) == PER_TURN


async def test_a_burst_of_one_account_does_not_delay_another() -> None:
    turns = CountedTurns()
    burst = [turns.request("acct_a") for _ in range(50 * PER_TURN)]
    others = [turns.request("acct_b"), turns.request("acct_c")]
    await asyncio.gather(*burst, *others)
    turns.stop()
    order = [account for _, account in turns.started]
    assert order.index("acct_b") <= 2 * PER_TURN
    assert order.index("acct_c") <= 2 * PER_TURN


async def test_a_request_whose_client_hangs_up_takes_no_turn() -> None:
    turns = CountedTurns()
    gone = [turns.request("acct_a") for _ in range(50 * PER_TURN)]
    await asyncio.sleep(0)
    last = turns.request("acct_a")
    for request in gone[PER_TURN:]:
        request.cancel()
    began = turns.number
    await last
    turns.stop()
    assert turns.started[-1][0] - began <= 3
    assert len(turns.started) <= 2 * PER_TURN + 1
