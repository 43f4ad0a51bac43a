"""A backend's replicas follow the load with pressure control on, down to none and back, and no reply is cut."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from openai import APIStatusError, AsyncOpenAI

from tests.service.harness import FRANCE, Account, Service, until
from tests.service.started import started

pytestmark = [pytest.mark.service, pytest.mark.slow, pytest.mark.long]

MODEL = "smollm2:Model"
CLIENTS = 40
PATIENCE_S = 900.0


@pytest.fixture(scope="module")
def scaled(model_path: Path) -> Iterator[Service]:
    with started(model_path, config="tests/service/autoscaling.yaml") as running:
        yield running


@dataclass
class Load:
    """Clients that always have one streamed request, and wait as refusals say."""

    account: Account
    whole: int = 0
    refused: int = 0
    cut: list[str] = field(default_factory=list)
    replicas: int = 0  # seen last
    most: int = 0  # of them

    async def run(self, clients: int, is_over: Callable[[], bool], tokens: int = 60) -> None:
        """Until then; what has begun ends."""
        over = asyncio.Event()
        async with self.account.service.async_client(self.account.key) as client, asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(self._client(client, f"client {number}", over, tokens))
            async with asyncio.timeout(PATIENCE_S):
                while not is_over():
                    self.replicas = len(await asyncio.to_thread(self.account.service.pids, MODEL))
                    self.most = max(self.most, self.replicas)
                    await asyncio.sleep(0.5)
            over.set()

    async def _client(self, client: AsyncOpenAI, name: str, over: asyncio.Event, tokens: int) -> None:
        number = 0
        while not over.is_set():
            number += 1
            messages = [{"role": "user", "content": f"{name} asks its question {number}."}]
            try:
                stream = await client.chat.completions.create(
                    model="svc-chat", messages=messages, max_tokens=tokens, stream=True, extra_body={"ignore_eos": True}
                )
            except APIStatusError as error:
                if error.status_code not in (429, 503):
                    raise
                self.refused += 1
                await asyncio.sleep(min(10.0, float(error.response.headers["retry-after"])))
                continue
            reason = None
            try:
                async for chunk in stream:
                    reason = chunk.choices[0].finish_reason if chunk.choices else reason
            except Exception as error:
                self.cut.append(repr(error))
            else:
                self.whole += reason == "length"
                self.cut += [] if reason == "length" else [f"ended as {reason}"]


async def test_replicas_follow_the_load_up_and_down_and_no_reply_is_cut(scaled: Service) -> None:
    account = await asyncio.to_thread(scaled.account, "load", "50")
    load = Load(account)
    await load.run(1, lambda: load.whole >= 10)
    assert load.most == 1
    await load.run(CLIENTS, lambda: load.replicas == 2)
    # A long reply that begins while there are two replicas ends whole, wherever it runs.
    before = load.whole
    await load.run(2, lambda: load.whole > before, tokens=400)
    await load.run(1, lambda: load.replicas == 1)
    assert load.cut == []
    assert load.whole > CLIENTS
    settled = await asyncio.to_thread(account.settled, load.whole)
    assert settled["usage"]["requests"] == load.whole


async def test_from_no_replica_a_request_gets_its_answer_or_a_refusal_that_says_when_to_come_back(
    scaled: Service,
) -> None:
    account = await asyncio.to_thread(scaled.account, "early bird")
    await asyncio.to_thread(until, lambda: not scaled.pids(MODEL), PATIENCE_S, 0.5)
    statuses = []
    async with asyncio.timeout(PATIENCE_S):
        while True:
            answer = await asyncio.to_thread(scaled.chat, account.key, FRANCE, 300, max_tokens=10)
            statuses.append(answer.status_code)
            if answer.is_success:
                break
            assert answer.status_code == 503, answer.text
            await asyncio.sleep(float(answer.headers["retry-after"]))
    assert len(scaled.pids(MODEL)) == 1, statuses
    await asyncio.to_thread(account.settled, 1)
