"""`kill -9` of one of two replicas under streams: no call fails, and resumed streams go on where they were."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3

import openai
import pytest

from tests.service.harness import HELD, Hold, Service, nano, until
from tests.service.replies import reply
from tests.service.test_crashes import written_ahead

pytestmark = [pytest.mark.service, pytest.mark.slow]

CLIENTS = 8  # of each kind: all fit on one replica
TOKENS = 60


async def whole(client: openai.AsyncOpenAI, hold: Hold) -> tuple[str, int]:
    answer = await client.chat.completions.create(model=HELD, messages=hold.messages, max_tokens=TOKENS)
    assert answer.usage is not None
    return answer.choices[0].message.content or "", answer.usage.completion_tokens


async def streamed(client: openai.AsyncOpenAI, hold: Hold) -> tuple[str, int]:
    stream = await client.chat.completions.create(
        model=HELD,
        messages=hold.messages,
        max_tokens=TOKENS,
        stream=True,
        extra_body={"stream_options": {"include_usage": True, "resume": True}},
    )
    text, tokens = "", 0
    async for chunk in stream:
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
    return text, tokens


async def test_streams_and_calls_outlive_one_of_two_replicas_and_are_billed_once(breakable: Service) -> None:
    service = breakable
    account = await asyncio.to_thread(service.account, "lost replica")
    with service.hold(after=10) as hold:
        async with service.async_client(account.key) as client:
            asked = [asyncio.create_task(ask(client, hold)) for ask in (whole, streamed) for _ in range(CLIENTS)]
            await asyncio.to_thread(hold.reached, 2 * CLIENTS)
            victim, *_ = service.pids("held:Model")
            os.kill(victim, signal.SIGKILL)
            await asyncio.to_thread(hold.reached, 2 * CLIENTS + 1)  # a request runs again
            hold.release()
            assert await asyncio.gather(*asked) == [(reply(TOKENS), TOKENS)] * (2 * CLIENTS)

    def rows() -> list[tuple[str, int, int]]:
        with sqlite3.connect(f"file:{service.home / 'ledger.db'}?mode=ro", uri=True) as database:
            return database.execute(
                "select outcome, count(*), sum(completion_tokens) from usage where account_id = ? "
                "group by outcome order by outcome",
                (account.id,),
            ).fetchall()

    await asyncio.to_thread(account.settled, 2 * CLIENTS)
    # What the lost replica has left behind finds its requests settled.
    await asyncio.to_thread(until, lambda: not written_ahead(service, account.id))
    billed = [row for row in rows() if row[0] != "failed"]
    # A replica whose gateway is slower than `orphan_delay_s` settles first, as cancelled, with the same counts.
    assert {outcome for outcome, _, _ in billed} <= {"completed", "cancelled"}
    assert sum(count for _, count, _ in billed) == 2 * CLIENTS
    assert sum(tokens for _, _, tokens in billed) == 2 * CLIENTS * TOKENS
    [failed] = [row for row in rows() if row[0] == "failed"]
    assert failed[2] == 0
    view = await asyncio.to_thread(account.show)
    assert nano("5") - nano(view["balance"]) == nano(view["usage"]["charged"])
    report = service.cli("ledger", "check")
    assert report["ok"], report
