"""With an idempotency key, a retry of a finished request gets its reply and neither runs nor is billed again."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from serve_app.contracts.generation import Delta, Finished, FinishReason, Rejected, Rejection, Started
from serve_app.contracts.limiting import Admit, Release
from serve_app.contracts.ports import BackendUnavailable
from serve_app.contracts.rates import Rates
from serve_app.gateway import idempotency
from serve_app.gateway.idempotency import REPLAYS_PER_MINUTE
from tests.gateway.connections import MESSAGES, Call, served
from tests.gateway.world import NANO, PATIENT_S, World, price, says, settled, until

KEY = {"idempotency-key": "7d6e1c0e-61c5-4f0c"}


async def answered(world: World, key: str | None = None, *, sends: dict[str, str] | None = None, **fields: Any) -> Call:
    """A request with the idempotency key, when it has ended."""
    return await Call(world, key, sends=KEY if sends is None else sends, **fields).done()


def replayed(call: Call) -> bool:
    return call.headers.get("idempotency-replayed") == "true"


# The stored reply


async def test_a_retry_gets_the_same_bytes_and_is_not_billed_again(world: World) -> None:
    first = await answered(world)
    again = await answered(world)
    assert (first.status, again.status) == (200, 200)
    assert (replayed(first), replayed(again)) == (False, True)
    assert again.body == first.body
    assert again.headers["content-type"] == "application/json"
    assert again.headers["content-length"] == str(len(again.body))
    assert again.headers["x-request-id"] != first.headers["x-request-id"]
    assert len(world.backends.calls) == 1
    await settled(world, requests=1, spent=price(10, 2))


async def test_a_retry_consumes_neither_rate_nor_slot(world: World) -> None:
    _, key = world.new_account(rpm=3, concurrency=1)  # a slot of the rate every 20 s
    for _ in range(6):
        assert (await answered(world, key)).status == 200
    after = await Call(world, key).done()
    assert after.headers["x-ratelimit-remaining-requests"] == "1"  # of three; the first request and this one used two


async def test_stored_replies_have_a_rate_of_the_account_and_cost_no_look_up_beyond_it(world: World) -> None:
    """They are free, and each is read from the ledger."""
    passed_s = 0.0
    world.settlements.replays = Rates(lambda: passed_s, 10)
    await answered(world)
    for _ in range(REPLAYS_PER_MINUTE):
        world.settlements.replays.charge((world.account_id, REPLAYS_PER_MINUTE))
    world.accounting.called.clear()
    refused = await answered(world)
    assert (refused.status, refused.json["error"]["code"], refused.headers["retry-after"]) == (429, "requests", "1")
    assert "FindReply" not in world.accounting.called
    assert (await answered(world, sends={})).status == 200, "other requests go on"
    _, key = world.new_account()
    assert (await answered(world, key)).status == 200, "and so do other accounts"
    passed_s = 60.0 / REPLAYS_PER_MINUTE
    assert replayed(await answered(world))
    assert (await answered(world)).status == 429
    await until(lambda: world.is_idle)


async def test_a_retry_after_an_answer_that_was_lost_bills_once(world: World) -> None:
    lost = Call(world, sends=KEY)
    lost.send_error = ConnectionResetError("gone")
    await lost.done()
    assert not lost.body
    again = await answered(world)
    assert replayed(again)
    assert again.json["choices"][0]["message"]["content"] == "Hello world"
    assert len(world.backends.calls) == 1
    await settled(world, requests=1, spent=price(10, 2))


async def test_a_client_that_hangs_up_during_settlement_gets_its_reply_by_a_retry(world: World) -> None:
    gate = world.accounting.wire_settle.hold["*"] = asyncio.Event()
    lost = Call(world, sends=KEY)
    await world.accounting.wire_settle.seen("*").wait()
    lost.hang_up()
    await lost.done()
    gate.set()
    await until(lambda: world.is_idle)
    assert replayed(await answered(world))
    await settled(world, requests=1, spent=price(10, 2))


async def test_the_retry_of_a_gateway_that_was_killed_before_it_answered_gets_the_stored_reply(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Killed directly after the ledger's commit: no response, no release, no more heartbeats.
    monkeypatch.setattr(world.limiter_client, "release", lambda release: None)
    killed = Call(world, sends=KEY)
    killed.send_error = ConnectionResetError("killed")
    await killed.done()
    monkeypatch.undo()
    assert world.recorded == 1
    assert world.open_requests == 1
    again = await answered(world)
    assert replayed(again)
    assert again.json["usage"]["completion_tokens"] == 2
    assert world.open_requests == 1  # its lease is still running
    assert len(world.backends.calls) == 1
    assert (world.recorded, world.spent) == (1, price(10, 2))


DIES_ONCE_SETTLED = """
import asyncio, os, pathlib, signal, sys
from tests.gateway.connections import Call
from tests.gateway.world import World

async def main(folder, ledger, key, idempotency_key):
    world = World(pathlib.Path(folder), pathlib.Path(ledger))
    await world.start()
    service = world.accounting_service
    settle = service.settle

    async def settle_and_die(settlements):
        await settle(settlements)
        os.kill(os.getpid(), signal.SIGKILL)

    world.accounting.wire_settle = lambda names, settlements: settle_and_die(settlements)
    await Call(world, key, sends={"idempotency-key": idempotency_key}).done()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.slow
async def test_a_reply_is_kept_when_the_process_dies_after_the_commit(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    folder.mkdir()
    arguments = (str(folder), str(tmp_path / "ledger.db"), world.key, KEY["idempotency-key"])
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DIES_ONCE_SETTLED, *arguments, cwd=Path(__file__).parents[2]
    )
    assert await asyncio.wait_for(process.wait(), 120) == -signal.SIGKILL
    assert world.recorded == 1
    again = await answered(world)
    assert replayed(again)
    assert again.json["choices"][0]["message"]["content"] == "Hello world"
    assert not world.backends.calls
    await settled(world, requests=1, spent=price(10, 2))
    assert world.books_balance()


async def test_a_reply_that_used_up_the_balance_is_returned_to_a_retry(world: World) -> None:
    world.account_id, key = world.new_account(credit=price(10, 2))
    world.backends.play([Rejected(Rejection.CREDIT, prompt_tokens=10)], says("Hello", " world"))
    first = await answered(world, key)
    assert (first.status, world.balance) == (200, 0)
    await until(lambda: world.is_idle)
    again = await answered(world, key)
    assert replayed(again)
    assert again.body == first.body
    assert (await answered(world, key, sends={"idempotency-key": "new"})).status == 402


async def test_two_retries_at_once_run_the_model_once(world: World) -> None:
    gate = asyncio.Event()
    world.backends.play([Started(10, 0), gate, *says("Hello", " world")[1:]])
    first = Call(world, sends=KEY)
    await until(lambda: world.backends.running)
    second = await answered(world)
    assert second.status == 409
    assert second.json["error"]["code"] == "idempotency_in_progress"
    assert second.json["error"]["param"] == "idempotency-key"
    assert 1 <= int(second.headers["retry-after"]) <= 60
    gate.set()
    await first.done()
    third = await answered(world)
    assert replayed(third)
    assert third.body == first.body
    assert len(world.backends.calls) == 1
    await settled(world, requests=1, spent=price(10, 2))


async def test_the_sdk_waits_for_the_first_request_by_itself(world: World) -> None:
    gate = asyncio.Event()
    world.backends.play([Started(10, 0), gate, *says("Hello", " world")[1:]])
    async with served(world) as port:
        url = f"http://127.0.0.1:{port}/v1"
        async with openai.AsyncOpenAI(api_key=world.key, base_url=url, max_retries=5) as client:
            request: Any = {"model": "svc-chat", "messages": MESSAGES, "max_tokens": 100, "extra_headers": KEY}
            asked = [asyncio.create_task(client.chat.completions.create(**request)) for _ in range(2)]
            await until(lambda: world.metrics.refusals)
            gate.set()
            one, two = await asyncio.gather(*asked)
    assert set(world.metrics.refusals) == {"idempotency_in_progress"}
    assert one == two
    await settled(world, requests=1, spent=price(10, 2))


async def test_the_key_of_an_open_request_outlives_a_restart_of_the_limiter(world: World) -> None:
    world.limiter_client.start()
    gate = asyncio.Event()
    world.backends.play([Started(10, 0), gate, *says("Hello", " world")[1:]])
    first = Call(world, sends=KEY)
    await until(lambda: world.backends.running)
    world.limiter.service = world.new_limiter(recovery_s=0.05)
    await world.limiter.service.follow()
    second = Call(world, sends=KEY)
    await until(lambda: world.open_requests == 1)
    world.passed_s += 0.05
    assert (await second.done()).status == 409
    gate.set()
    await first.done()
    assert len(world.backends.calls) == 1
    await settled(world, requests=1, spent=price(10, 2))


async def test_a_reply_that_was_begun_early_is_stored_without_its_line_feeds(make_world: Callable[..., Any]) -> None:
    world: World = await make_world(early_reply_s=0.02, line_feed_s=0.01)
    gate = asyncio.Event()
    world.backends.play([Started(10, 0), Delta("a", 1), gate, Finished(FinishReason.STOP, 10, 0, 1)])
    first = Call(world, sends=KEY)
    await first.until("\n\n")
    gate.set()
    await first.done()
    again = await answered(world)
    assert again.body == first.body.lstrip(b"\n")
    assert again.headers["content-length"] == str(len(again.body))
    await settled(world, requests=1, spent=price(10, 1))


async def test_a_reply_in_the_spool_is_neither_run_again_nor_lost(make_world: Callable[..., Any]) -> None:
    world: World = await make_world(settle_timeout_s=0.02)
    world.accounting.wire_settle.down()
    world.settlements.start()
    first = await answered(world)
    assert first.status == 200
    assert world.metrics.settlements == ["spooled"]
    world.accounting.wire_call.down("FindReply")
    assert (await answered(world)).status == 409  # its hold stays until the ledger has it
    world.settlements.settle_timeout_s = PATIENT_S
    world.accounting.wire_settle.up()
    world.accounting.wire_call.up()
    await until(lambda: world.is_idle and world.recorded == 1)
    again = await answered(world)
    assert replayed(again)
    assert again.body == first.body
    assert len(world.backends.calls) == 1
    await settled(world, requests=1, spent=price(10, 2))


# Which requests are different ones


async def test_the_same_key_for_another_body_is_422_and_consumes_nothing(world: World) -> None:
    world.account_id, key = world.new_account(rpm=3)
    await answered(world, key)
    other = await answered(world, key, max_tokens=99)
    assert (other.status, other.json["error"]["code"]) == (422, "idempotency_key_reused")
    assert other.json["error"]["param"] == "idempotency-key"
    assert len(world.backends.calls) == 1
    await settled(world, requests=1, spent=price(10, 2))
    assert (await Call(world, key).done()).headers["x-ratelimit-remaining-requests"] == "1"


async def test_the_same_key_of_another_account_is_another_request(world: World) -> None:
    mine = await answered(world)
    _, key = world.new_account()
    theirs = await answered(world, key)
    assert theirs.status == 200
    assert not replayed(theirs)
    assert theirs.json["id"] != mine.json["id"]


async def test_another_key_or_none_is_another_request_and_costs_no_look_up(world: World) -> None:
    await answered(world)
    world.accounting.called.clear()
    for sends in ({"idempotency-key": "another"}, {}):
        call = await answered(world, sends=sends)
        assert not replayed(call)
    assert world.accounting.called.count("FindReply") == 1
    await settled(world, requests=3, spent=3 * price(10, 2))


async def test_streams_ignore_the_key(world: World) -> None:
    for _ in range(2):
        call = await answered(world, stream=True)
        assert (call.status, call.text) == (200, "Hello world")
    assert (await answered(world)).status == 200
    assert world.accounting.called.count("FindReply") == 1
    await settled(world, requests=3, spent=3 * price(10, 2))


async def test_a_key_that_can_not_be_one_is_422(world: World) -> None:
    call = await answered(world, sends={"idempotency-key": "a b"})
    assert (call.status, call.json["error"]["param"]) == (422, "idempotency-key")
    assert not world.backends.calls
    await until(lambda: world.is_idle)


# Requests that have not finished


@pytest.mark.parametrize(
    "fails",
    [
        [BackendUnavailable("died")],
        [Started(10, 0), Delta("half", 1), RuntimeError("fault")],
        [Rejected(Rejection.QUEUE_FULL)],
    ],
    ids=["no replica", "fault", "queue full"],
)
async def test_a_request_that_failed_stores_nothing_and_its_retry_runs(world: World, fails: list[Any]) -> None:
    runs = 3 if isinstance(fails[-1], BackendUnavailable) else 1
    world.backends.play(*[fails] * runs, says("Hello", " world"))
    assert (await answered(world)).status in (500, 503)
    await until(lambda: world.is_idle)
    again = await answered(world)
    assert again.status == 200
    assert not replayed(again)
    await until(lambda: world.is_idle)
    assert world.spent == world.charged == price(10, 2)


async def test_a_request_that_was_cancelled_stores_nothing_and_its_retry_runs(world: World) -> None:
    [script, _] = world.backends.play([Started(10, 0), Delta("a", 1), asyncio.Event()], says("Hello", " world"))
    gone = Call(world, sends=KEY)
    await until(lambda: world.backends.running)
    gone.hang_up()
    await gone.done()
    await asyncio.wait_for(script.closed.wait(), 60)
    await until(lambda: world.is_idle)
    again = await answered(world)
    assert (again.status, replayed(again)) == (200, False)
    await until(lambda: world.is_idle)
    assert world.recorded == 2


async def test_a_reply_whose_usage_can_not_be_kept_is_not_stored(make_world: Callable[..., Any]) -> None:
    world: World = await make_world(settle_timeout_s=0.02, spool_max_bytes=4096)
    world.settlements.start()
    world.spool.max_bytes = 1
    world.accounting.wire_settle.down()
    assert (await answered(world)).status == 503
    world.settlements.settle_timeout_s = PATIENT_S
    world.accounting.wire_settle.up()
    await until(lambda: world.is_idle and not world.settlements.is_full)
    assert world.spent == 0
    world.spool.max_bytes = 4096
    again = await answered(world)
    assert (again.status, replayed(again)) == (200, False)
    await settled(world, requests=2, spent=price(10, 2))


async def test_a_refusal_is_not_stored_as_a_reply(world: World) -> None:
    account, key = world.new_account(credit=0)
    assert (await answered(world, key)).status == 402
    world.ledger.credit(account, NANO)
    await world.limiter.service.follow()
    assert (await answered(world, key)).status == 200


async def test_while_the_ledger_is_away_a_request_with_an_idempotency_key_is_503_and_holds_nothing(
    world: World,
) -> None:
    world.accounting.wire_call.down("FindReply")
    call = await answered(world)
    assert (call.status, call.json["error"]["type"]) == (503, "overloaded_error")
    assert 1 <= int(call.headers["retry-after"]) <= 60
    assert not world.backends.calls
    await settled(world, requests=0, spent=0)
    # Other requests are not affected.
    assert (await Call(world).done()).status == 200


async def test_a_client_that_leaves_while_the_stored_reply_is_looked_up_leaves_no_hold(world: World) -> None:
    gate = world.accounting.wire_call.hold["FindReply"] = asyncio.Event()
    call = Call(world, sends=KEY)
    await world.accounting.wire_call.seen("FindReply").wait()
    call.hang_up()
    await call.done()
    gate.set()
    await until(lambda: world.is_idle)
    assert not world.backends.calls
    assert world.spent == 0


async def test_a_reply_that_is_too_large_is_sent_but_not_stored(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "MAX_BYTES", 100)
    assert (await answered(world)).status == 200
    again = await answered(world)
    assert (again.status, replayed(again)) == (200, False)
    await settled(world, requests=2, spent=2 * price(10, 2))


async def test_retries_in_any_number_are_billed_once(world: World) -> None:
    calls = [Call(world, sends=KEY) for _ in range(10)]
    for call in calls:
        await call.done()
    assert {call.status for call in calls} <= {200, 409}
    assert len({call.body for call in calls if call.status == 200}) == 1
    assert len(world.backends.calls) == 1
    await settled(world, requests=1, spent=price(10, 2))


async def test_retries_are_billed_once_with_several_limiters_and_accounting_processes(
    make_world: Callable[..., Any],
) -> None:
    world: World = await make_world(limiter_shards=3, accounting_shards=2)
    accounts = [world.new_account() for _ in range(4)]
    for account, key in accounts:
        first, again = await answered(world, key), await answered(world, key)
        assert (replayed(first), replayed(again)) == (False, True)
        assert again.body == first.body
        assert world.ledger.get_account(account).balance == NANO - price(10, 2)
    assert len(world.backends.calls) == len(accounts)


async def test_the_limiter_receives_the_key_the_backend_and_the_end(world: World) -> None:
    await answered(world)
    await until(lambda: any(isinstance(ask, Release) for ask in world.limiter.asked))
    admits = [ask for ask in world.limiter.asked if isinstance(ask, Admit)]
    assert {(ask.backend, ask.idempotency_key) for ask in admits} == {("fake", KEY["idempotency-key"])}
    body = json.loads((await answered(world, sends={})).body)
    assert body["system_fingerprint"] == "fp_fake"
