"""`kill -9` of any part under load: the service answers again by itself, and the books stay exact."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sqlite3

import httpx
import openai
import pytest

from serve_app.storage.settlement_lines import from_line
from tests.service.harness import FRANCE, HELD, Service, nano, until
from tests.service.replies import reply

pytestmark = [pytest.mark.service, pytest.mark.slow]

CLIENTS = 6
PATIENCE_S = 300.0
ALL = ("gateway:Gateway", "gateway:Limiter", "gateway:Accounting", "held:Model")
KILLS = int(os.environ.get("SERVE_APP_TEST_KILLS", "1"))

Seen = dict[str, tuple[int, int]]


class Load:
    """Clients that call again and again, and note the usage of every reply that they received completely."""

    def __init__(self, service: Service, key: str, seen: Seen) -> None:
        self.seen = seen
        self._service = service
        self._key = key
        self._over = asyncio.Event()
        self._clients: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Load:
        self._clients = [asyncio.create_task(self._ask()) for _ in range(CLIENTS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over.set()
        await asyncio.gather(*self._clients)

    async def more(self, replies: int) -> None:
        wanted = len(self.seen) + replies
        async with asyncio.timeout(PATIENCE_S):
            while len(self.seen) < wanted:
                for client in self._clients:
                    if client.done():
                        client.result()
                await asyncio.sleep(0.02)

    async def _ask(self) -> None:
        async with self._service.async_client(self._key) as client:
            while not self._over.is_set():
                try:
                    answer = await client.chat.completions.create(model=HELD, messages=FRANCE, max_tokens=6)
                except (openai.InternalServerError, openai.APIConnectionError):
                    await asyncio.sleep(0.2)  # what clients of a part that was killed may see
                else:
                    assert answer.usage is not None
                    self.seen[answer.id] = (answer.usage.prompt_tokens, answer.usage.completion_tokens)


def kill(service: Service, *parts: str) -> set[int]:
    pids = {pid for part in parts for pid in service.pids(part)}
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return pids


def recorded(service: Service, account_id: str) -> dict[str, tuple[str, int, int]]:
    """Outcome and counts of an account's requests, read from the database itself."""
    with sqlite3.connect(f"file:{service.home / 'ledger.db'}?mode=ro", uri=True) as database:
        rows = database.execute(
            "select request_id, outcome, prompt_tokens, completion_tokens from usage where account_id = ?",
            (account_id,),
        ).fetchall()
    assert len(rows) == len({row[0] for row in rows})
    return {request_id: (outcome, prompt, completion) for request_id, outcome, prompt, completion in rows}


@pytest.mark.parametrize("part", ALL)
async def test_after_kill_9_the_service_answers_and_no_usage_is_missing_or_doubled(
    breakable: Service, part: str
) -> None:
    service, seen = breakable, Seen()
    account = await asyncio.to_thread(service.account, f"crash {part}")
    async with Load(service, account.key, seen) as load:
        await load.more(CLIENTS)
        victims = kill(service, part)
        await load.more(3 * CLIENTS)
        assert not victims & set(service.pids(part))
    view = await asyncio.to_thread(account.settled, len(seen))
    ledger = recorded(service, account.id)
    assert {request_id: ledger.get(request_id) for request_id in seen} == {
        request_id: ("completed", *counts) for request_id, counts in seen.items()
    }
    assert nano(view["balance"]) >= 0
    assert nano("5") - nano(view["balance"]) == nano(view["usage"]["charged"])
    report = service.cli("ledger", "check")
    assert report["ok"], report


async def test_a_stream_whose_gateway_is_killed_is_billed_by_its_replica(breakable: Service) -> None:
    service, trace = breakable, secrets.token_hex(16)
    account = await asyncio.to_thread(service.account, "orphan")
    with service.hold(after=5) as hold:
        async with service.async_client(account.key) as client:
            stream = await client.chat.completions.create(
                model=HELD,
                messages=hold.messages,
                stream=True,
                max_tokens=100,
                extra_headers={"traceparent": f"00-{trace}-{secrets.token_hex(8)}-00"},
            )
            received = ""
            # Some clients report a cut stream, others leave a missing finish reason to their caller.
            with contextlib.suppress(openai.APIError, httpx.HTTPError):
                async for chunk in stream:
                    received += chunk.choices[0].delta.content or ""
                    if received == reply(5):
                        kill(service, "gateway:Gateway")
        assert received == reply(5)
        await asyncio.to_thread(until, service.answers, PATIENCE_S)
        view = await asyncio.to_thread(account.settled, 1)
    assert view["usage"]["completion_tokens"] == 5
    assert nano("5") - nano(view["balance"]) == nano(view["usage"]["charged"]) > 0
    # The gateway that is gone wrote no line: the replica tells what it has seen.
    summary = service.cli("requests", "show", trace)["summary"]
    assert (summary["trace_id"], summary["account_id"]) == (trace, account.id)
    assert summary["replica"]
    assert all(summary["timings"][f"{phase}_ms"] is not None for phase in ("queue", "prefill", "decode"))


def written_ahead(service: Service, account_id: str) -> set[str]:
    """The requests of an account in all spools."""
    found = set()
    for path in (service.home / "spool").glob("*"):
        with contextlib.suppress(FileNotFoundError):
            lines = [line for raw in path.read_bytes().splitlines() if (line := from_line(raw))]
            found |= {line.request_id for line in lines if line.account_id == account_id}
    return found


async def test_after_kill_9_of_all_parts_at_once_every_finished_reply_is_billed_once(breakable: Service) -> None:
    """No process is left that could have kept a finished reply in memory."""
    service, seen = breakable, Seen()
    account = await asyncio.to_thread(service.account, "crash of all", "50")
    ahead: set[str] = set()
    for number in range(KILLS):
        async with Load(service, account.key, seen) as load:
            await load.more(2 * CLIENTS + number)  # each time in another moment
            await asyncio.to_thread(kill, service, *ALL)  # while the clients go on
            ahead |= written_ahead(service, account.id)
        await asyncio.to_thread(service.ready)
    assert ahead, "replicas write ahead"
    # Replicas leave the spools of gateways as much time as the ledger was away for, as they see it.
    await asyncio.to_thread(until, lambda: not written_ahead(service, account.id) & ahead, 4 * PATIENCE_S)
    view = await asyncio.to_thread(account.settled, len(seen))
    ledger = recorded(service, account.id)
    # Some as cancelled: a replica was back before the gateway, whose spool had them too. The charge is the same.
    assert {ledger[request_id][0] for request_id in seen} <= {"completed", "cancelled"}
    assert {request_id: ledger[request_id][1:] for request_id in seen} == seen
    assert ahead <= ledger.keys()
    assert nano("50") - nano(view["balance"]) == nano(view["usage"]["charged"])
    assert service.cli("ledger", "check")["ok"]
    assert service.cli("ledger", "stuck")["data"] == []
