"""Roll-outs at length, over a service of its own on PostgreSQL: shares, gateways that start anew, changed args."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import yaml
from openai import AsyncOpenAI

from tests.service.chaos.database import Postgres
from tests.service.harness import Account, Service, until
from tests.service.started import started

pytestmark = [pytest.mark.service, pytest.mark.slow, pytest.mark.long]

CONVERSATIONS = 240
AT_ONCE = 6
STREAM_TOKENS = 150
SIGMAS = 5.0  # a share of a few hundred conversations is outside of this once in a million times by chance
PATIENCE_S = 300.0
CANARY = {
    "name": "canary",
    "args": {"model": "bundled", "dtype": "int8", "kv_cache_memory": "512MiB", "max_running": 32, "max_waiting": 64},
    "options": {"ray_actor_options": {"num_cpus": 0.5}},
}


@pytest.fixture(scope="module")
def service(model_path: Path) -> Iterator[Service]:
    database = Postgres()
    database.start()
    try:
        config = "tests/service/lifecycle.yaml"
        with started(model_path, config, dashboard=True, SERVE_APP_DATABASE_URL=database.url) as running:
            yield running
    finally:
        database.stop()


@pytest.fixture(scope="module")
def account(service: Service) -> Account:
    return service.account("lifecycle", credit="100")


def backend_of(fingerprint: str | None) -> str:
    assert fingerprint is not None
    return fingerprint.removeprefix("fp_").partition("_")[0]


def sdk(service: Service, account: Account) -> AsyncOpenAI:
    return service.async_client(account.key, max_retries=2)  # the SDK's default


async def ask(client: AsyncOpenAI, number: int, model: str = "svc-chat") -> str:
    """The backend that replied to a conversation."""
    messages: Any = [{"role": "user", "content": f"Question {number}"}]
    reply = await client.chat.completions.create(model=model, messages=messages, max_tokens=1, temperature=0)
    return backend_of(reply.system_fingerprint)


async def survey(client: AsyncOpenAI) -> list[str]:
    """The backend of each conversation, by its number. Fails with the first request that does."""
    found: dict[int, str] = {}
    waiting = iter(range(CONVERSATIONS))

    async def send() -> None:
        for number in waiting:
            found[number] = await ask(client, number)

    await asyncio.gather(*(send() for _ in range(AT_ONCE)))
    return [found[number] for number in range(CONVERSATIONS)]


class Streams:
    """Long replies, one after the other, while something is changed: each must be whole, and of one backend."""

    def __init__(self) -> None:
        self.backends: list[str] = []
        self.is_over = False

    async def run(self, client: AsyncOpenAI, first: int) -> None:
        number = first
        while not self.is_over:
            number += 1000
            stream = await client.chat.completions.create(
                model="svc-chat",
                messages=[{"role": "user", "content": f"Tell a story about the number {number}."}],
                stream=True,
                stream_options={"include_usage": True},
                max_tokens=STREAM_TOKENS,
                extra_body={"ignore_eos": True},
            )
            fingerprints, usage = set(), None
            async for chunk in stream:
                fingerprints.add(chunk.system_fingerprint)
                usage = chunk.usage or usage
            assert usage is not None, "a stream was cut"
            assert usage.completion_tokens == STREAM_TOKENS
            [fingerprint] = fingerprints
            self.backends.append(backend_of(fingerprint))


@asynccontextmanager
async def streaming(client: AsyncOpenAI, count: int = 2) -> AsyncIterator[Streams]:
    """Meanwhile `count` clients stream; at the end, all that they began has ended well."""
    streams = Streams()
    tasks = [asyncio.create_task(streams.run(client, number)) for number in range(count)]
    try:
        yield streams
    finally:
        streams.is_over = True
        await asyncio.gather(*tasks)


async def admin(service: Service, method: str, path: str, body: Any = None) -> dict[str, Any]:
    return await asyncio.to_thread(service.admin, method, path, body)


async def shift(service: Service, kind: str, **body: Any) -> None:
    """Changes the traffic of svc-chat. The gateway hears of it by itself."""
    await admin(service, "POST", f"/admin/models/svc-chat/{kind}", body)


async def survey_until(client: AsyncOpenAI, look: Callable[[list[str]], bool]) -> list[str]:
    """The survey after the first one that is as it is to be: the gateway may have heard of the change during that."""
    async with asyncio.timeout(PATIENCE_S):
        while not look(await survey(client)):
            pass
    found = await survey(client)
    assert look(found)
    return found


async def healthy(service: Service, backend: str) -> None:
    def look() -> bool:
        return bool(service.admin("GET", f"/admin/backends/{backend}")["healthy"])

    await asyncio.to_thread(until, look, PATIENCE_S)


async def deploy_canary(service: Service) -> None:
    """Repeated, it changes nothing."""
    await admin(service, "POST", "/admin/backends", CANARY)
    await healthy(service, "canary")


def has_share(backends: list[str], name: str, share: float) -> bool:
    count, mean = backends.count(name), len(backends) * share
    return abs(count - mean) <= SIGMAS * sqrt(mean * (1 - share)) + 1


def staying(before: list[str], after: list[str]) -> float:
    return sum(one == other for one, other in zip(before, after, strict=True)) / len(before)


async def test_a_backend_that_loads_gets_no_traffic_until_it_is_ready(service: Service, account: Account) -> None:
    async with service.async_client(account.key, timeout=300) as client:  # repeats nothing
        assert {await ask(client, number, "svc-coder") for number in range(20)} == {"smollm2"}
        (service.home / "loaded").touch()
        await healthy(service, "loading")
        async with asyncio.timeout(PATIENCE_S):
            while {await ask(client, number, "svc-coder") for number in range(20)} != {"smollm2", "loading"}:
                pass


async def test_a_canary_grows_to_all_and_is_rolled_back_without_a_failure(service: Service, account: Account) -> None:
    async with sdk(service, account) as client, streaming(client) as streams:
        assert set(await survey(client)) == {"smollm2"}
        await deploy_canary(service)

        await shift(service, "canary", backend="canary", share=5)
        few = await survey_until(client, lambda found: "canary" in found)
        assert has_share(few, "canary", 0.05), Counter(few)
        assert staying(few, await survey(client)) >= 0.99

        await shift(service, "canary", backend="canary", share=50)
        half = await survey_until(client, lambda found: has_share(found, "canary", 0.5))
        assert all(new == "canary" for old, new in zip(few, half, strict=True) if old == "canary")
        assert staying(half, await survey(client)) >= 0.99

        await shift(service, "promote", backend="canary")
        await survey_until(client, lambda found: set(found) == {"canary"})
        await shift(service, "rollback")
        await survey_until(client, lambda found: set(found) == {"smollm2"})
    assert {"smollm2", "canary"} == set(streams.backends)


async def test_a_gateway_that_starts_anew_knows_the_weights(service: Service, account: Account) -> None:
    await deploy_canary(service)
    async with sdk(service, account) as client:
        await shift(service, "canary", backend="canary", share=50)
        before = await survey_until(client, lambda found: has_share(found, "canary", 0.5))
        victims = service.pids("gateway:Gateway")
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(until, lambda: service.pids("gateway:Gateway") not in (victims, []), PATIENCE_S)
        await asyncio.to_thread(until, service.answers, PATIENCE_S)
        assert staying(before, await survey(client)) >= 0.99
        await shift(service, "rollback")


def redeploy(service: Service, **args: Any) -> None:
    """`serve deploy` with other args of smollm2."""
    config = yaml.safe_load((service.home / "run" / "config.yaml").read_text())
    [application] = [one for one in config["applications"] if one["name"] == "smollm2"]
    application["args"] |= args
    changed = service.home / "run" / "changed.yaml"
    changed.write_text(yaml.safe_dump(config))
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(service.home / "secrets" / "ray-token")}
    command = [
        str(Path(sys.executable).with_name("serve")),
        "deploy",
        str(changed),
        "--address",
        str(service.dashboard_url),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, **token}, check=False
    )
    assert done.returncode == 0, done.stderr


async def test_changed_args_and_serve_deploy_leave_replicas_weights_and_backends(
    service: Service, account: Account
) -> None:
    await deploy_canary(service)
    async with sdk(service, account) as client:
        await shift(service, "canary", backend="canary", share=20)
        before = await survey_until(client, lambda found: has_share(found, "canary", 0.2))
        old = service.pids("smollm2:Model")
        async with streaming(client):
            await asyncio.to_thread(redeploy, service, max_waiting=63)
            deadline = time.monotonic() + PATIENCE_S
            while not (now := await asyncio.to_thread(service.pids, "smollm2:Model")) or set(now) <= set(old):
                await survey(client)
                assert time.monotonic() < deadline
            for _ in range(3):
                assert staying(before, await survey(client)) >= 0.99
        await shift(service, "rollback")


async def test_args_that_do_not_load_leave_the_old_replica(service: Service, account: Account) -> None:
    async with sdk(service, account) as client:
        await asyncio.to_thread(until, lambda: len(service.pids("smollm2:Model")) == 1, PATIENCE_S)
        await asyncio.to_thread(redeploy, service, model="/nowhere")

        def failed() -> bool:
            return service.admin("GET", "/admin/backends/smollm2")["status"] == "DEPLOY_FAILED"

        waiting = asyncio.create_task(asyncio.to_thread(until, failed, PATIENCE_S))
        while not waiting.done():
            assert set(await survey(client)) == {"smollm2"}
        await waiting
        assert set(await survey(client)) == {"smollm2"}
        await asyncio.to_thread(redeploy, service)
        await healthy(service, "smollm2")
