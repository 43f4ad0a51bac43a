"""A service with TLS, on PostgreSQL, two of each part: who is served, and what is billed while parts come and go.

The tests of this file share one service, which the last one ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import APIConnectionError

from serve_app.launch import laptop_tls
from tests.service.chaos import session
from tests.service.chaos.books import read_rows
from tests.service.chaos.counts import cached_tokens, prompt_tokens
from tests.service.chaos.session import Session
from tests.service.chaos.stand import Customer, Shape, Stand
from tests.service.crowd import Crowd
from tests.service.harness import FRANCE, Service

pytestmark = [pytest.mark.service, pytest.mark.slow]

IN_A_ROW = 20  # requests, each on a connection of its own: one of them goes to each gateway
SHORT: dict[str, Any] = {"model": "svc-chat", "messages": FRANCE, "max_tokens": 1}
FUNDS = 10**10  # nano-units: what is held while the database is away counts against the balance


@pytest.fixture(scope="module")
def stand() -> Iterator[Stand]:
    """It waits for PostgreSQL for as long as the test needs."""
    shape = Shape(
        "postgresql",
        limiter_shards=2,
        accounting_shards=2,
        gateways=2,
        stub=True,
        tls=True,
        settings={"settle_timeout_s": 1.0},
        args={"key_staleness_s": 600, "outage_grace_s": 600},
    )
    with Stand(shape) as running:
        yield running


@pytest.fixture(scope="module")
def service(stand: Stand) -> Service:
    assert stand.tree is not None
    return Service(stand.document, stand.tree.root)


def test_a_client_that_trusts_the_authority_is_served_whole_and_streamed(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert service.base_url.startswith("https://127.0.0.1:")
    monkeypatch.setenv("SSL_CERT_FILE", str(laptop_tls.authority_file(service.home)))
    chat: Any = {"model": "svc-chat", "messages": FRANCE, "max_tokens": 8}
    whole = service.client().chat.completions.create(**chat)
    stream = service.client().chat.completions.create(**chat, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == whole.choices[0].message.content == "word " * 8


def test_the_command_line_trusts_its_own_machines_authority(service: Service) -> None:
    assert service.cli("doctor")["ok"]


def test_plain_http_gets_no_reply(service: Service) -> None:
    with pytest.raises(httpx.RemoteProtocolError), httpx.Client(trust_env=False, timeout=60) as plain:
        plain.get(service.base_url.replace("https://", "http://") + "/health")


def test_another_authority_is_refused(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(laptop_tls.prepare(tmp_path, datetime.now(UTC)).authority))
    with pytest.raises(APIConnectionError) as error:
        service.client().models.list()
    assert "certificate verify failed" in str(error.value.__cause__)


async def test_200_at_once_on_a_balance_for_50_spend_it_and_no_more(stand: Stand, service: Service) -> None:
    messages = [{"role": "user", "content": "one two three four"}]
    prompt = prompt_tokens(messages)
    crowd = Crowd("svc-chat", messages, prompt, cached_tokens(prompt), tokens=200, requests=200, paid=50)
    account = await crowd.buy(service)
    rows = await asyncio.to_thread(read_rows, stand.database_url, [account.id])
    assert sum(row.charged for row in rows) <= crowd.credit
    assert sum(row.uncollected for row in rows) == 0


async def test_every_gateway_receives_revocations_and_top_ups(stand: Stand) -> None:
    async def until_all(key: str, status: int, before: int) -> None:
        headers, seen = {"authorization": f"Bearer {key}"}, 0
        async with (
            asyncio.timeout(session.PATIENCE_S),
            httpx.AsyncClient(
                base_url=stand.base_url,
                timeout=60,
                limits=httpx.Limits(max_keepalive_connections=0),
                trust_env=False,
                verify=stand.verify,
            ) as http,
        ):
            while seen < IN_A_ROW:
                answer = await http.post("/v1/chat/completions", json=SHORT, headers=headers)
                assert answer.status_code in (before, status), answer.text
                seen = seen + 1 if answer.status_code == status else 0

    customer = await asyncio.to_thread(Customer, stand, "revocation", 10**9)
    await until_all(customer.key, 200, before=200)
    await asyncio.to_thread(stand.admin, "DELETE", f"/admin/keys/{customer.key_id}")
    await until_all(customer.key, 401, before=200)
    poor = await asyncio.to_thread(Customer, stand, "poor", 0)
    await until_all(poor.key, 402, before=402)
    await asyncio.to_thread(poor.top_up, 10**7)
    await until_all(poor.key, 200, before=402)


async def test_while_postgresql_is_away_nothing_is_lost_or_doubled(stand: Stand) -> None:
    postgres = stand.postgres
    assert postgres is not None

    async def outage(running: Session) -> None:
        await running.more(20)
        await asyncio.to_thread(postgres.kill)
        await running.more(40)
        await asyncio.to_thread(postgres.start)
        await running.more(40)

    report = await session.run(stand, outage, mode="outage", seed=1, clients=12, credit=FUNDS, top_up=0, settled_s=300)
    assert report.problems == [], report.text()
    assert set(report.answers) <= {"200", "402", "503", "hung up"}, report.text()


def spooling(stand: Stand) -> set[str]:
    """The gateways with usage in their spools."""
    files = [path for path in (stand.home / "spool").glob("*.spool") if path.stat().st_size]
    return {path.stem.partition("+")[0] for path in files}


def served(stand: Stand) -> set[str]:
    """The gateways that have replied, by their logs."""
    files = (stand.home / "logs").glob("gateway-*.jsonl")
    return {path.stem for path in files if b'"outcome":"completed"' in path.read_bytes()}


async def test_gateways_that_come_and_go_under_load_bill_every_reply_once(stand: Stand) -> None:
    """One of two is killed, one is scaled away while PostgreSQL is away, and the load brings another one."""
    postgres = stand.postgres
    assert postgres is not None

    async def come_and_go(running: Session) -> None:
        def gateways() -> set[int]:
            return set(stand.pids("gateway"))

        await running.until(lambda: len(served(stand)) >= 2)
        before, [killed, *_] = served(stand), gateways()
        os.kill(killed, signal.SIGKILL)
        await running.until(lambda: len(gateways() - {killed}) == 2 and served(stand) - before)

        await asyncio.to_thread(postgres.kill)
        await running.until(lambda: len(spooling(stand)) == 2)
        await asyncio.to_thread(stand.scale_gateways, num_replicas=1)
        await running.until(lambda: len(gateways()) == 1)
        assert len(spooling(stand)) == 1, "the gateway that left has handed its usage over"
        await running.more(20)
        await asyncio.to_thread(postgres.start)
        await running.more(20)

        by_load = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 3, "upscale_delay_s": 0}
        await asyncio.to_thread(
            stand.scale_gateways, autoscaling_config={**by_load, "look_back_period_s": 2, "metrics_interval_s": 0.5}
        )
        await running.until(lambda: len(gateways()) == 2)
        await running.more(20)

    report = await session.run(
        stand, come_and_go, mode="gateways", seed=2, clients=12, credit=FUNDS, top_up=0, settled_s=300
    )
    assert report.problems == [], report.text()


def test_ctrl_c_leaves_nothing(service: Service) -> None:
    family = psutil.Process(service.process.pid).children(recursive=True)
    service.process.send_signal(signal.SIGINT)
    assert service.process.wait(120) == 0
    _, alive = psutil.wait_procs(family, timeout=0)
    assert not alive
