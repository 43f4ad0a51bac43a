"""Two whole services on one ledger, and traffic that is switched between them."""

from __future__ import annotations

import asyncio
import os

import httpx
import pytest

from tests.service.chaos import session
from tests.service.chaos.session import Session
from tests.service.chaos.stand import Customer, Shape, Stand

pytestmark = [pytest.mark.service, pytest.mark.slow, pytest.mark.long]

SWITCHES = int(os.environ.get("SERVE_APP_TEST_SWITCHES", "4"))
SMALL = 2 * 10**6  # nano-units: the balances are nearly spent all the time
BODY = {"model": "svc-chat", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20, "ignore_eos": True}


async def ask(stand: Stand, customer: Customer, key: str) -> httpx.Response:
    """One request under an idempotency key, repeated while the service is not ready for it."""
    headers = {"authorization": f"Bearer {customer.key}", "idempotency-key": key}
    async with asyncio.timeout(300), httpx.AsyncClient(base_url=stand.base_url, timeout=300, trust_env=False) as http:
        while (answer := await http.post("/v1/chat/completions", json=BODY, headers=headers)).status_code in (409, 503):
            await asyncio.sleep(0.2)
    return answer


async def test_traffic_that_is_switched_back_and_forth_loses_and_doubles_nothing() -> None:
    with Stand(Shape("postgresql", stub=True)) as one, Stand(Shape("postgresql", stub=True), beside=one) as other:
        careful = await asyncio.to_thread(Customer, one, "repeats itself", 10**9)

        async def switch(running: Session) -> None:
            for turn in range(SWITCHES):
                here, there = (one, other) if turn % 2 == 0 else (other, one)
                await running.more(40)
                first = await ask(here, careful, f"4d1f0c0e-61c5-{turn:04}")
                running.load.move(there.base_url)
                again = await ask(there, careful, f"4d1f0c0e-61c5-{turn:04}")
                assert (first.status_code, again.status_code) == (200, 200)
                assert again.headers["idempotency-replayed"] == "true"
                assert again.json()["id"] == first.json()["id"]
            await running.more(40)

        report = await session.run(one, switch, mode="switch", seed=5, clients=12, credit=SMALL, top_up=SMALL)
        one.keep = other.keep = bool(report.problems)
        view = await asyncio.to_thread(careful.show)
    assert report.problems == [], report.text()
    assert report.figures["uncollected, nano-units"] == 0
    assert view["usage"]["requests"] == SWITCHES
