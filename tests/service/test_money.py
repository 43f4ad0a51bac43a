"""Money with many requests at once: nothing is overspent, and operators' changes reach each gateway in a second."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.service.chaos import revocation
from tests.service.chaos.books import read_rows
from tests.service.chaos.stand import Shape, Stand
from tests.service.chaos.stub import cached_tokens, prompt_tokens
from tests.service.harness import FRANCE, NANO, PRICE_CACHED, PRICE_IN, PRICE_OUT, Account, Service, nano

pytestmark = pytest.mark.service

CROWD = 200
PAID = 50
LOOKS = 50  # at the balance; a key may ask 60 times a minute


def shape(database: str, shards: int) -> Shape:
    return Shape(database, limiter_shards=shards, accounting_shards=shards, gateways=3, stub=True)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(shape("postgresql", 3), id="postgresql-3", marks=pytest.mark.slow),
        pytest.param(shape("sqlite", 3), id="sqlite-3", marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
def stand(request: pytest.FixtureRequest) -> Iterator[Stand]:
    """A service with three gateways, each request on a connection of its own."""
    with Stand(request.param) as running:
        yield running


def service_of(stand: Stand) -> Service:
    assert stand.tree is not None
    return Service(stand.document, stand.tree.root)


def cost(prompt: int, cached: int, completion: int) -> int:
    return (prompt - cached) * PRICE_IN + cached * PRICE_CACHED + completion * PRICE_OUT


async def crowd(
    service: Service, account: Account, messages: list[dict[str, str]], max_tokens: int
) -> tuple[Counter[int], int]:
    """Everybody asks at once, half of them streamed: answers by status, and what the usages cost that were received.

    Meanwhile what is shown of the balance is looked at again and again, with another key of the account: the crowd's is
    refused so often that its requests wait.
    """
    looks = (await asyncio.to_thread(service.cli, "keys", "create", account.id))["key"]
    over = asyncio.Event()
    shown: list[int] = []

    async def ask(http: httpx.AsyncClient, number: int) -> tuple[int, int]:
        body: dict[str, Any] = {
            "model": "svc-chat",
            "messages": messages,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        if number % 2:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        answer = await http.post("/v1/chat/completions", json=body)
        if answer.status_code != 200:
            assert answer.json()["error"]["type"] == "insufficient_balance", answer.text
            return answer.status_code, 0
        if number % 2:
            *_, event, done = [line for line in answer.text.splitlines() if line.startswith("data: ")]
            assert done == "data: [DONE]"
            usage = httpx.Response(200, text=event.removeprefix("data: ")).json()["usage"]
        else:
            usage = answer.json()["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return answer.status_code, cost(usage["prompt_tokens"], cached, usage["completion_tokens"])

    async def look(http: httpx.AsyncClient) -> None:
        answer = await http.get("/user/balance", headers={"authorization": f"Bearer {looks}"})
        assert answer.status_code == 200, answer.text
        (info,) = answer.json()["balance_infos"]
        assert not info["total_balance"].startswith("-")
        shown.append(nano(info["total_balance"]))
        view = await asyncio.to_thread(account.show)
        assert not view["balance"].startswith("-")
        assert not view["held"].startswith("-")

    async def watch(http: httpx.AsyncClient) -> None:
        while not over.is_set() and len(shown) < LOOKS:
            await look(http)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), 0.1)

    async with httpx.AsyncClient(
        base_url=service.base_url,
        headers={"authorization": f"Bearer {account.key}"},
        timeout=120,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        trust_env=False,
    ) as http:
        watching = asyncio.create_task(watch(http))
        answers = await asyncio.gather(*(ask(http, number) for number in range(CROWD)))
        over.set()
        await watching
        await look(http)
    assert all(earlier >= later for earlier, later in itertools.pairwise(shown))
    return Counter(status for status, _ in answers), sum(charged for _, charged in answers)


async def buy(service: Service, account: Account, credit: int, messages: list[dict[str, str]], tokens: int) -> None:
    """The crowd, and what must hold after it."""
    answers, received = await crowd(service, account, messages, tokens)
    assert set(answers) == {200, 402}
    assert answers[200] >= PAID - 1
    view = await asyncio.to_thread(account.settled, answers[200])
    charged = nano(view["usage"]["charged"])
    # Every usage was received, so what was billed is exactly the sum of them.
    assert charged == received <= credit
    assert nano(view["balance"]) == credit - charged
    report = await asyncio.to_thread(service.cli, "ledger", "check")
    assert report["ok"], report


async def test_200_at_once_on_a_balance_for_50_spend_it_and_no_more(stand: Stand) -> None:
    service = service_of(stand)
    messages = [{"role": "user", "content": "one two three four"}]
    prompt, tokens = prompt_tokens(messages), 200
    credit = PAID * cost(prompt, cached_tokens(prompt), tokens)
    limits = {"rpm": 10**6, "tpm": 10**9, "concurrency": 10**4}
    account = await asyncio.to_thread(service.account, "crowd", f"{credit // NANO}.{credit % NANO:09d}", **limits)
    await buy(service, account, credit, messages, tokens)
    rows = await asyncio.to_thread(read_rows, stand.database_url, [account.id])
    assert sum(row.charged for row in rows) <= credit
    assert sum(row.uncollected for row in rows) == 0


async def test_200_at_once_spend_no_more_with_a_real_model_on_sqlite(service: Service) -> None:
    # The first prompt of an account is not cached; later ones are, in part, and cost less.
    tokens = 40
    credit = PAID * cost(service.prompt_tokens(FRANCE), 0, tokens)
    account = await asyncio.to_thread(service.account, "crowd", f"{credit // NANO}.{credit % NANO:09d}")
    await buy(service, account, credit, FRANCE, tokens)


async def test_three_gateways_receive_revocations_and_top_ups_within_a_second(stand: Stand) -> None:
    revoked, usable, wrong = await revocation.measure(stand, times=3)
    assert wrong == []
    assert max(revoked) <= revocation.PROMISED_S
    assert max(usable) <= revocation.PROMISED_S
