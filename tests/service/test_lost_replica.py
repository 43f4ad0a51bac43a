"""`kill -9` of one of two replicas under load: no call fails, and resumed streams are the unbroken ones."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.service.harness import Service, nano, until
from tests.service.started import started

pytestmark = [pytest.mark.service, pytest.mark.slow]

CLIENTS = 16
TOKENS = 120


@pytest.fixture(scope="module")
def pair(model_path: Path) -> Iterator[Service]:
    with started(model_path, "tests/service/two_replicas.yaml") as running:
        until(lambda: len(running.pids("smollm2:Model")) == 2, 120)
        yield running


def question(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Tell a story about {number} rivers and their bridges."}]


async def whole(client: openai.AsyncOpenAI, number: int) -> tuple[str, int]:
    reply = await client.chat.completions.create(
        model="svc-chat",
        messages=question(number),  # type: ignore[arg-type]
        max_tokens=TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert reply.usage is not None
    return reply.choices[0].message.content or "", reply.usage.completion_tokens


async def streamed(client: openai.AsyncOpenAI, number: int, begun: asyncio.Semaphore) -> tuple[str, int]:
    stream = await client.chat.completions.create(
        model="svc-chat",
        messages=question(number),  # type: ignore[arg-type]
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "stream_options": {"include_usage": True, "resume": True}},
    )
    text, tokens, pieces = "", 0, 0
    async for chunk in stream:
        if chunk.choices and (piece := chunk.choices[0].delta.content):
            text, pieces = text + piece, pieces + 1
            if pieces == 3:
                begun.release()
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
    return text, tokens


async def test_streams_and_calls_outlive_one_of_two_replicas_and_are_billed_once(pair: Service) -> None:
    account = await asyncio.to_thread(pair.account, "lost replica")
    async with pair.async_client(account.key, timeout=120, max_retries=0) as client:
        unbroken = await asyncio.gather(*(whole(client, number) for number in range(CLIENTS)))
        assert {tokens for _, tokens in unbroken} == {TOKENS}
        victim, *_ = await asyncio.to_thread(pair.pids, "smollm2:Model")
        begun = asyncio.Semaphore(0)
        calls = [asyncio.create_task(whole(client, number)) for number in range(CLIENTS)]
        streams = [asyncio.create_task(streamed(client, number, begun)) for number in range(CLIENTS)]
        async with asyncio.timeout(90):
            for _ in range(CLIENTS // 2):  # when all have begun, a replica may be done with its own
                await begun.acquire()
        os.kill(victim, signal.SIGKILL)
        assert await asyncio.gather(*calls) == unbroken
        assert await asyncio.gather(*streams) == unbroken

    def rows() -> list[tuple[str, int, int]]:
        with sqlite3.connect(f"file:{pair.home / 'ledger.db'}?mode=ro", uri=True) as database:
            return database.execute(
                "select outcome, count(*), sum(completion_tokens) from usage where account_id = ? "
                "group by outcome order by outcome",
                (account.id,),
            ).fetchall()

    await asyncio.sleep(5)  # longer than a replica waits before it settles what it believes to be cut
    completed, failed = rows()
    assert completed == ("completed", 3 * CLIENTS, 3 * CLIENTS * TOKENS)
    assert failed[0] == "failed"
    assert failed[2] == 0
    view = await asyncio.to_thread(account.show)
    assert nano("5") - nano(view["balance"]) == nano(view["usage"]["charged"])
    report = await asyncio.to_thread(pair.cli, "ledger", "check")
    assert report["ok"], report
