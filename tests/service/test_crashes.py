"""`kill -9` of any part under load: the service answers again by itself, and the books stay exact."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sqlite3
import time

import httpx
import openai
import pytest

from serve_app.contracts.spool import from_line
from tests.service.harness import FRANCE, Service, nano, until

pytestmark = [pytest.mark.service, pytest.mark.slow]

CLIENTS = 6


async def load(service: Service, key: str, stop: asyncio.Event, seen: dict[str, tuple[int, int]]) -> None:
    """Calls again and again; notes the usage of every reply that it received completely."""
    async with service.async_client(key, timeout=60) as client:
        while not stop.is_set():
            try:
                reply = await client.chat.completions.create(
                    model="svc-chat", messages=FRANCE, max_tokens=6, temperature=0
                )
            except (openai.InternalServerError, openai.APIConnectionError):
                await asyncio.sleep(0.2)  # what clients of a part that was killed may see
            else:
                assert reply.usage is not None
                seen[reply.id] = (reply.usage.prompt_tokens, reply.usage.completion_tokens)


def settled_ids(service: Service, account_id: str) -> dict[str, tuple[int, int]]:
    """What the ledger has of an account, read from the database itself."""
    with sqlite3.connect(f"file:{service.home / 'ledger.db'}?mode=ro", uri=True) as database:
        rows = database.execute(
            "select request_id, prompt_tokens, completion_tokens from usage "
            "where account_id = ? and outcome = 'completed'",
            (account_id,),
        ).fetchall()
    assert len(rows) == len({row[0] for row in rows})
    return {request_id: (prompt, completion) for request_id, prompt, completion in rows}


@pytest.mark.parametrize("part", ["gateway:Accounting", "gateway:Limiter", "gateway:Gateway", "smollm2:Model"])
async def test_after_kill_9_the_service_answers_and_no_usage_is_missing_or_doubled(service: Service, part: str) -> None:
    await asyncio.to_thread(until, service.answers, 60)
    account = await asyncio.to_thread(service.account, f"crash {part}")
    stop, seen = asyncio.Event(), {}
    clients = [asyncio.create_task(load(service, account.key, stop, seen)) for _ in range(CLIENTS)]

    async def more(count: int) -> None:
        wanted = len(seen) + count
        async with asyncio.timeout(90):
            while len(seen) < wanted:
                done = [client for client in clients if client.done()]
                for client in done:
                    client.result()
                await asyncio.sleep(0.05)

    await more(CLIENTS)
    victims = service.pids(part)
    assert victims
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    await more(3 * CLIENTS)
    assert not set(victims) & set(service.pids(part))
    stop.set()
    await asyncio.gather(*clients)

    view = await asyncio.to_thread(account.settled, len(seen), 60)
    ledger = settled_ids(service, account.id)
    assert {request_id: ledger.get(request_id) for request_id in seen} == seen
    assert nano(view["balance"]) >= 0
    usage = view["usage"]
    assert nano("5") - nano(view["balance"]) == nano(usage["charged"])
    report = await asyncio.to_thread(service.cli, "ledger", "check")
    assert report["ok"], report


async def test_a_stream_whose_gateway_is_killed_is_billed_by_its_replica(service: Service) -> None:
    await asyncio.to_thread(until, service.answers, 60)
    account = await asyncio.to_thread(service.account, "orphan")
    trace = secrets.token_hex(16)
    async with service.async_client(account.key) as client:
        stream = await client.chat.completions.create(
            model="svc-chat",
            messages=FRANCE,
            stream=True,
            max_tokens=2000,
            extra_body={"ignore_eos": True},
            extra_headers={"traceparent": f"00-{trace}-{secrets.token_hex(8)}-00"},
        )
        pieces, ended = 0, False
        try:
            async for _ in stream:
                pieces += 1
                if pieces == 5:
                    for pid in service.pids("gateway:Gateway"):
                        os.kill(pid, signal.SIGKILL)
        except (openai.APIError, httpx.HTTPError):
            ended = True
        # Some clients report a cut stream, others leave a missing finish reason to their caller.
        assert ended or pieces < 2000
    await asyncio.to_thread(until, service.answers, 60)
    view = await asyncio.to_thread(account.settled, 1, 60)
    assert 3 <= view["usage"]["completion_tokens"] < 500
    assert nano("5") - nano(view["balance"]) == nano(view["usage"]["charged"]) > 0
    # The gateway that is gone wrote no line: the replica tells what it has seen.
    summary = (await asyncio.to_thread(service.cli, "requests", "show", trace))["summary"]
    assert (summary["trace_id"], summary["account_id"]) == (trace, account.id)
    assert summary["replica"]
    assert all(summary["timings"][f"{phase}_ms"] is not None for phase in ("queue", "prefill", "decode"))


ALL = ("gateway:Gateway", "gateway:Limiter", "gateway:Accounting", "smollm2:Model")
KILLS = int(os.environ.get("SERVE_APP_TEST_KILLS", "4"))


def written_ahead(service: Service) -> set[str]:
    """The requests in all spools."""
    found = set()
    for path in (service.home / "spool").glob("*"):
        with contextlib.suppress(FileNotFoundError):
            found |= {line.request_id for raw in path.read_bytes().splitlines() if (line := from_line(raw))}
    return found


async def test_after_kill_9_of_all_parts_at_once_every_finished_reply_is_billed_once(service: Service) -> None:
    """No process is left that could have kept a finished reply in memory."""
    account = await asyncio.to_thread(service.account, "crash of all", "50")
    seen: dict[str, tuple[int, int]] = {}
    ahead: set[str] = set()
    began = time.monotonic()
    for kill in range(KILLS):
        await asyncio.to_thread(until, service.answers, 120)
        stop = asyncio.Event()
        clients = [asyncio.create_task(load(service, account.key, stop, seen)) for _ in range(CLIENTS)]
        wanted = len(seen) + 2 * CLIENTS + kill  # each time in another moment
        async with asyncio.timeout(90):
            while len(seen) < wanted:
                await asyncio.sleep(0.01)
        for pid in [pid for part in ALL for pid in service.pids(part)]:
            os.kill(pid, signal.SIGKILL)
        ahead |= written_ahead(service)
        stop.set()
        await asyncio.gather(*clients)
    await asyncio.to_thread(until, service.answers, 120)
    assert ahead, "replicas write ahead"
    # Replicas leave the spools of gateways as much time as the ledger was away for, as they see it.
    patience_s = 120 + time.monotonic() - began
    await asyncio.to_thread(until, lambda: not written_ahead(service) & ahead, patience_s)
    view = await asyncio.to_thread(account.settled, len(seen), 60)
    with sqlite3.connect(f"file:{service.home / 'ledger.db'}?mode=ro", uri=True) as database:
        rows = database.execute("select request_id, prompt_tokens, completion_tokens, outcome from usage").fetchall()
    recorded = {row[0]: row[1:3] for row in rows}
    assert len(recorded) == len(rows)
    # Some as cancelled: a replica was back before the gateway, whose spool had them too. The charge is the same.
    assert {row[3] for row in rows if row[0] in seen} <= {"completed", "cancelled"}
    assert {request_id: recorded.get(request_id) for request_id in seen} == seen
    assert ahead <= recorded.keys()
    assert nano("50") - nano(view["balance"]) == nano(view["usage"]["charged"])
    assert service.cli("ledger", "check")["ok"]
    assert service.cli("ledger", "stuck")["data"] == []
