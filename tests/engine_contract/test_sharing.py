"""Several requests at once: turns, places, memory, and what ends one of them early."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable

import pytest

from serve_app.contracts.generation import Delta, FinishReason
from serve_app.engine.errors import QueueFull
from serve_app.engine.port import Promise

from .conftest import MAX_RUNNING, MAX_WAITING
from .replies import Asker, Reply

pytestmark = pytest.mark.model


async def test_a_cancelled_request_leaves_before_its_end_and_its_neighbour_goes_on(asker: Asker) -> None:
    alone = await asker.ask(max_tokens=40, ignore_eos=True)
    before = asker.engine.stats().tokens_produced
    neighbour = asyncio.create_task(asker.ask(max_tokens=40, ignore_eos=True))
    async with contextlib.aclosing(asker.engine.generate(asker.request(max_tokens=300, ignore_eos=True))) as events:
        async for event in events:
            if isinstance(event, Delta):
                break
    assert (await neighbour).text == alone.text
    await asker.until_idle()
    assert asker.engine.stats().tokens_produced - before < 40 + 300
    assert asker.engine.stats().kv_blocks_used == 0


async def test_a_request_without_a_token_by_its_deadline_ends_and_costs_nothing(asker: Asker) -> None:
    reply = await asker.ask(deadline=time.monotonic() - 1)
    assert (reply.end.reason, reply.end.completion_tokens, reply.text) == (FinishReason.DEADLINE, 0, "")


async def test_an_account_with_one_request_does_not_wait_for_all_of_anothers(asker: Asker) -> None:
    order: list[str] = []
    flood = [asker.request(f"{n} rivers", tenant="flood", max_tokens=16, ignore_eos=True) for n in range(11)]
    single = asker.request("One lake", tenant="single", max_tokens=16, ignore_eos=True)
    replies = await asyncio.gather(*(asker.run(request, order) for request in [*flood, single]))
    assert all(reply.end.completion_tokens == 16 for reply in replies)
    assert order.index(single.request_id) < len(flood)


async def test_a_full_queue_refuses_at_once_and_keeps_what_it_has(asker: Asker) -> None:
    places = MAX_RUNNING + MAX_WAITING
    requests = [asker.request(f"{n} hills", tenant="many", max_tokens=24, ignore_eos=True) for n in range(places + 6)]
    replies = await asyncio.gather(*map(asker.run, requests), return_exceptions=True)
    refused = [reply for reply in replies if isinstance(reply, QueueFull)]
    served = [reply for reply in replies if isinstance(reply, Reply)]
    assert len(refused) + len(served) == len(requests)
    assert 0 < len(refused) <= 6
    assert all(reply.end.completion_tokens == 24 for reply in served)
    assert (await asker.ask(max_tokens=4, ignore_eos=True)).end.completion_tokens == 4


async def write_about_rivers(asker: Asker, numbers: Iterable[int]) -> list[str]:
    """Three of these replies are more than fits into memory at a time.

    They are drawn, and so hardly repeat themselves: none is much faster than the others because its text is guessed.
    """
    length = asker.engine.max_context // 3
    asked = (
        asker.ask(f"Write about river {number}.", max_tokens=length, ignore_eos=True, temperature=1.0, seed=number)
        for number in numbers
    )
    replies = await asyncio.gather(*asked)
    assert all(reply.end.completion_tokens == length for reply in replies)
    return [reply.text for reply in replies]


async def test_replies_that_do_not_fit_into_memory_together_are_complete_and_as_alone(asker: Asker) -> None:
    before = asker.engine.stats().preemptions
    together = await write_about_rivers(asker, range(3))
    assert asker.engine.stats().preemptions > before
    if Promise.SAME_IN_ANY_BATCH not in asker.engine.lacks:
        assert await write_about_rivers(asker, [2]) == [together[2]]


async def test_a_wrong_request_is_refused_and_harms_no_other(asker: Asker) -> None:
    with pytest.raises(ValueError, match="empty"):
        await asker.ask(())
    with pytest.raises(ValueError, match="vocabulary"):
        await asker.ask((10**7,))
    request = asker.request(max_tokens=60, ignore_eos=True)
    first = asyncio.create_task(asker.run(request))
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="running already"):
        await asker.run(request)
    assert (await first).end.completion_tokens == 60


async def test_a_healthy_engine_says_so(asker: Asker) -> None:
    asker.engine.check_health()
