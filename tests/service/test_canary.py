"""A backend replaces another one: deployed, some of the traffic, all of it, back, retired; a failing one by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, InternalServerError

from tests.service.harness import Account, Hold, Service, until
from tests.service.replies import reply

pytestmark = [pytest.mark.service, pytest.mark.slow]

MOVES = "svc-moves"
CONVERSATIONS = 60  # all of them, or none, on one of two backends with half of the traffic each: one in 10^17
AT_ONCE = 6
FAILED = "failed"
PATIENCE_S = 300.0


@pytest.fixture
def account(service: Service) -> Account:
    return service.account("moves", credit="100")


def backend_of(fingerprint: str | None) -> str:
    assert fingerprint is not None
    return fingerprint.removeprefix("fp_").partition("_")[0]


def backends(service: Service) -> dict[str, Any]:
    return {one["name"]: one for one in service.admin("GET", "/admin/backends")["data"]}


async def survey(*clients: AsyncOpenAI) -> list[str]:
    """The backend of each conversation, by its number; `FAILED` of a request that fails. Clients take turns."""

    async def send(numbers: range) -> dict[int, str]:
        found = {}
        for number in numbers:
            messages: Any = [{"role": "user", "content": f"Question {number}"}]
            client = clients[number // AT_ONCE % len(clients)]
            try:
                answer = await client.chat.completions.create(model=MOVES, messages=messages, max_tokens=1)
            except InternalServerError:
                found[number] = FAILED
            else:
                found[number] = backend_of(answer.system_fingerprint)
        return found

    found: dict[int, str] = {}
    for some in await asyncio.gather(*(send(range(first, CONVERSATIONS, AT_ONCE)) for first in range(AT_ONCE))):
        found |= some
    return [found[number] for number in range(CONVERSATIONS)]


async def survey_until(client: AsyncOpenAI, look: Callable[[list[str]], bool]) -> list[str]:
    """The first survey that is as it is to be. The gateway hears of new weights by itself."""
    async with asyncio.timeout(PATIENCE_S):
        while not look(found := await survey(client)):
            pass
    return found


async def stream(client: AsyncOpenAI, hold: Hold) -> tuple[str, str]:
    """The backend and the text of a whole stream."""
    fingerprints, text = set(), ""
    async for chunk in await client.chat.completions.create(
        model=MOVES, messages=hold.messages, max_tokens=20, stream=True
    ):
        fingerprints.add(chunk.system_fingerprint)
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
    [fingerprint] = fingerprints
    return backend_of(fingerprint), text


async def test_a_canary_grows_to_all_is_rolled_back_and_retired_without_a_failure(
    service: Service, account: Account, tiny_path: Path
) -> None:
    async def shift(kind: str, **body: Any) -> None:
        await asyncio.to_thread(service.admin, "POST", f"/admin/models/{MOVES}/{kind}", body)

    canary = {
        "name": "canary",
        "args": {"model": str(tiny_path), "kv_cache_memory": "64MiB", "max_context": 4096},
        "options": {"ray_actor_options": {"num_cpus": 0.5}},
    }
    async with service.async_client(account.key) as client:
        with service.hold() as hold:
            running = asyncio.create_task(stream(client, hold))
            await asyncio.to_thread(hold.reached)
            deploying = asyncio.create_task(asyncio.to_thread(service.admin, "POST", "/admin/backends", canary))
            while not deploying.done():
                assert set(await survey(client)) == {"held"}
            await deploying
            await asyncio.to_thread(until, lambda: backends(service)["canary"]["healthy"], PATIENCE_S)
            assert set(await survey(client)) == {"held"}

            await shift("canary", backend="canary", share=50)
            await survey_until(client, lambda found: "canary" in found)
            half = await survey(client)
            assert set(half) == {"held", "canary"}
            assert await survey(client) == half
            await shift("promote", backend="canary")
            await survey_until(client, lambda found: set(found) == {"canary"})
            await shift("rollback")
            await survey_until(client, lambda found: set(found) == {"held"})
            await shift("promote", backend="canary")
            await survey_until(client, lambda found: set(found) == {"canary"})
        # It began before all of this.
        assert await running == ("held", reply(20))

        messages: Any = [{"role": "user", "content": "A story."}]
        last = await client.chat.completions.create(
            model=MOVES, messages=messages, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
        )
        first = await anext(aiter(last))
        assert backend_of(first.system_fingerprint) == "canary"
        await shift("promote", backend="held")
        await asyncio.to_thread(service.admin, "POST", "/admin/backends/canary/retire", {})
        *_, end = [chunk async for chunk in last]
        assert end.choices[0].finish_reason == "length"
        await asyncio.to_thread(
            until, lambda: "canary" not in backends(service) and not service.pids("canary:Model"), PATIENCE_S
        )
        assert set(await survey(client)) == {"held"}


async def test_a_failing_canary_is_rolled_back_by_rule(service: Service, account: Account) -> None:
    """It fails for two accounts: one alone may be the cause itself."""
    other = service.account("moves, too", credit="100")
    async with service.async_client(account.key) as client, service.async_client(other.key) as second:
        await asyncio.to_thread(
            service.admin, "POST", f"/admin/models/{MOVES}/canary", {"backend": "broken", "share": 50}
        )

        def traffic() -> dict[str, Any]:
            found: dict[str, Any] = service.admin("GET", f"/admin/models/{MOVES}")["traffic"]
            return found

        async with asyncio.timeout(PATIENCE_S):
            while (await asyncio.to_thread(traffic))["actor"] != "rule":
                assert set(await survey(client, second)) <= {"held", FAILED}
        assert "failed" in traffic()["reason"]
        await survey_until(client, lambda found: set(found) == {"held"})
    model = service.admin("GET", f"/admin/models/{MOVES}")
    assert {one["name"] for one in model["backends"] if one["weight"]} == {"held"}
    assert any(record["actor"] == "rule" for record in service.admin("GET", "/admin/audit")["data"])
