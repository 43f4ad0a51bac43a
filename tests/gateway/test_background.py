"""Responses in the background: one outcome and one bill each, whichever gateway is asked and whatever dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from serve_app.admin import stored_responses
from serve_app.contracts.books import RESPONSE_LOST_S
from serve_app.contracts.generation import Delta, Finished, FinishReason, Rejected, Rejection, Started, TokenLogprob
from serve_app.contracts.ports import BackendUnavailable
from serve_app.gateway import background, responses_endpoint
from serve_app.gateway.responses_endpoint import Run
from tests.gateway.connections import Call
from tests.gateway.world import World, price, says, settled, until


@pytest.fixture(autouse=True)
def fast_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "BEAT_S", 0.01)
    monkeypatch.setattr(stored_responses, "POLL_S", 0.01)
    monkeypatch.setattr(stored_responses, "CANCEL_POLLS", 6000)
    monkeypatch.setattr(responses_endpoint, "BEGIN_S", 60.0)


@pytest.fixture
async def other(make_world: Callable[..., Any], world: World) -> World:
    """A second gateway over the same ledger and limiter."""
    made: World = await make_world(beside=world)
    return made


@pytest.fixture
async def ask(world: World, other: World) -> AsyncIterator[Callable[..., Any]]:
    """Asks the second gateway."""
    transport = httpx.ASGITransport(other.app(), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://other") as client:

        async def send(method: str, path: str) -> httpx.Response:
            headers = {"authorization": f"Bearer {world.key}"}
            return await client.request(method, f"/v1/responses/{path}", headers=headers)

        yield send


async def begun(world: World, sends: dict[str, str] | None = None, **fields: Any) -> Call:
    body = {"model": "svc-chat", "input": "Hi", "background": True, **fields}
    return await Call(world, path="/responses", body=body, sends=sends).done()


async def ended(ask: Callable[..., Any], response_id: str) -> Any:
    async with asyncio.timeout(60):
        while (answer := await ask("GET", response_id)).json()["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
    return answer.json()


async def test_a_run_returns_at_once_and_is_read_through_another_gateway(world: World, ask: Callable[..., Any]) -> None:
    gate = asyncio.Event()
    world.backends.play([Started(10, 0), gate, *says("Hello", " world")[1:]])
    call = await begun(world, metadata={"a": "b"})
    first = call.json
    assert (call.status, first["status"], first["background"], first["output"]) == (200, "in_progress", True, [])
    assert (await ask("GET", first["id"])).json()["status"] == "in_progress"
    gate.set()
    last = await ended(ask, first["id"])
    assert (last["id"], last["created_at"], last["metadata"]) == (first["id"], first["created_at"], {"a": "b"})
    assert (last["status"], last["output"][0]["content"][0]["text"]) == ("completed", "Hello world")
    await settled(world, requests=1, spent=price(10, 2))
    again = await Call(
        world, path="/responses", body={"model": "svc-chat", "input": "And?", "previous_response_id": first["id"]}
    ).done()
    assert again.status == 200
    assert len(world.backends.calls[-1].messages) == 3


async def test_a_run_goes_on_when_its_client_has_gone(world: World, ask: Callable[..., Any]) -> None:
    gate = asyncio.Event()
    world.backends.play([Started(10, 0), gate, *says("Hello")[1:]])
    call = await begun(world)
    call.hang_up()
    gate.set()
    assert (await ended(ask, call.json["id"]))["status"] == "completed"
    await settled(world, requests=1, spent=price(10, 1))


async def test_another_gateway_cancels_a_run_and_what_was_produced_is_billed(
    world: World, ask: Callable[..., Any]
) -> None:
    world.backends.play([Started(10, 0), Delta("Hel", 1), asyncio.Event()])
    response_id = (await begun(world)).json["id"]
    await until(lambda: world.backends.scripts[0].begun == 3)
    cancelled = (await ask("POST", f"{response_id}/cancel")).json()
    assert (cancelled["status"], cancelled["output"][0]["status"]) == ("cancelled", "incomplete")
    await settled(world, requests=1, spent=price(10, 1))
    assert (await ask("POST", f"{response_id}/cancel")).json() == cancelled
    assert (await ask("DELETE", response_id)).status_code == 200


async def test_a_run_that_takes_long_to_end_in_the_ledger_is_cancelled_once(
    world: World, ask: Callable[..., Any]
) -> None:
    world.backends.play([Started(10, 0), Delta("Hel", 1), asyncio.Event()])
    response_id = (await begun(world)).json["id"]
    gate = world.accounting.wire_call.hold["EndResponse"] = asyncio.Event()
    cancelling = asyncio.create_task(ask("POST", f"{response_id}/cancel"))
    await world.accounting.wire_call.seen("EndResponse").wait()
    await asyncio.sleep(0.1)  # several beats
    gate.set()
    assert (await cancelling).json()["status"] == "cancelled"
    assert (await ask("GET", response_id)).json()["output"][0]["content"][0]["text"] == "Hel"


async def test_a_run_that_waits_for_a_replica_is_queued_and_cancelled_free_of_charge(
    world: World, ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses_endpoint, "BEGIN_S", 0.01)
    world.backends.play([asyncio.Event()])
    queued = (await begun(world)).json
    assert queued["status"] == "queued"
    assert (await ask("POST", f"{queued['id']}/cancel")).json()["status"] == "cancelled"
    await settled(world, requests=1, spent=0)


async def test_a_refusal_has_its_status_and_stores_nothing(world: World, ask: Callable[..., Any]) -> None:
    world.backends.play([Rejected(Rejection.CONTEXT, prompt_tokens=40_000, limit=32_768)])
    call = await begun(world)
    assert (call.status, call.json["error"]["param"]) == (422, "input")
    for fields in ({"stream": True}, {"store": False}):
        call = await begun(world, **fields)
        assert (call.status, call.json["error"]["param"]) == (422, "background")
    world.services.settings = world.settings.model_copy(update={"unstored_accounts": [world.account_id]})
    assert (await begun(world)).json["error"]["param"] == "background"
    await settled(world, requests=0, spent=0)


async def test_an_account_runs_as_many_in_the_background_as_it_may_at_once(
    make_world: Callable[..., Any], world: World
) -> None:
    world.account_id, world.key = world.new_account(concurrency=2)
    gate = asyncio.Event()
    world.backends.play([Started(10, 0), gate, *says("x")[1:]])
    assert [(await begun(world)).status for _ in range(3)] == [200, 200, 429]
    gate.set()
    await settled(world, requests=2, spent=2 * price(10, 1))


async def test_a_run_that_fails_says_so_and_is_not_billed(world: World, ask: Callable[..., Any]) -> None:
    gate = asyncio.Event()
    world.backends.play([Started(10, 0), Delta("x", 1), gate, RuntimeError("the device is gone")])
    response_id = (await begun(world)).json["id"]
    gate.set()
    failed = await ended(ask, response_id)
    assert (failed["status"], failed["error"]["code"], failed["output"]) == ("failed", "server_error", [])
    await settled(world, requests=1, spent=0)


async def test_a_run_that_is_billed_can_be_read_however_large_its_log_probabilities_are(
    world: World, ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.api.stored_responses.MAX_JSON", 8192)
    tokens = tuple(TokenLogprob(number, "x", b"x", -1.0) for number in range(200))
    world.backends.play([Started(10, 0), Delta("x" * 200, 200, tokens), Finished(FinishReason.STOP, 10, 0, 200)])
    last = await ended(ask, (await begun(world, top_logprobs=1)).json["id"])
    assert (last["status"], last["output"][0]["content"][0]["text"]) == ("completed", "x" * 200)
    await settled(world, requests=1, spent=price(10, 200))
    call = await begun(world, input="y" * 8192)
    assert (call.status, call.json["error"]["param"]) == (422, "background")
    await settled(world, requests=1, spent=price(10, 200))


async def test_a_run_whose_replica_is_lost_runs_again_under_the_same_id(world: World, ask: Callable[..., Any]) -> None:
    world.backends.play([Started(10, 0), Delta("x", 1), BackendUnavailable("gone")], says("Hello"))
    response_id = (await begun(world)).json["id"]
    last = await ended(ask, response_id)
    assert (last["id"], last["output"][0]["content"][0]["text"]) == (response_id, "Hello")
    await settled(world, requests=2, spent=price(10, 1))  # the lost run is recorded, free of charge


async def test_a_run_of_a_gateway_that_died_fails_after_a_bounded_time_and_can_be_deleted(
    world: World, other: World, ask: Callable[..., Any]
) -> None:
    world.backends.play([Started(10, 0), Delta("x", 1), asyncio.Event()])
    response_id = (await begun(world)).json["id"]
    world.accounting.wire_call.fail.add("BeatResponses")
    assert (await ask("DELETE", response_id)).status_code == 422
    started = other.admin.now()
    other.admin.now = lambda: started + RESPONSE_LOST_S + 1
    lost = (await ask("GET", response_id)).json()
    assert (lost["status"], lost["error"]["code"]) == ("failed", "server_error")
    assert "lost" in lost["error"]["message"]


async def test_a_gateway_that_stops_lets_runs_end_and_fails_the_others_free_of_charge(
    world: World, ask: Callable[..., Any]
) -> None:
    gate = asyncio.Event()
    world.backends.play([Started(10, 0), gate, *says("x")[1:]], [Started(10, 0), Delta("x", 1), asyncio.Event()])
    short, long = [(await begun(world)).json["id"] for _ in range(2)]
    gate.set()
    await ended(ask, short)
    await world.services.background.stop(within_s=0.01)
    failed = await ended(ask, long)
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    await settled(world, requests=2, spent=price(10, 1))


async def test_a_retry_with_an_idempotency_key_gets_the_response_that_has_ended(
    world: World, ask: Callable[..., Any]
) -> None:
    gate = asyncio.Event()
    world.backends.play([Started(10, 0), gate, *says("Hello")[1:]])
    first = await begun(world, sends={"idempotency-key": "k"})
    busy = await begun(world, sends={"idempotency-key": "k"})
    assert (busy.status, busy.json["error"]["code"]) == (409, "idempotency_in_progress")
    gate.set()
    last = await ended(ask, first.json["id"])
    again = await begun(world, sends={"idempotency-key": "k"})
    assert (again.json, again.headers["idempotency-replayed"]) == (last, "true")
    await settled(world, requests=1, spent=price(10, 1))


async def test_a_retry_that_is_recognized_late_ends_and_the_next_gets_the_response(
    world: World, ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await begun(world, sends={"idempotency-key": "k"})
    await ended(ask, first.json["id"])
    monkeypatch.setattr(responses_endpoint, "BEGIN_S", 0.01)
    gate = world.accounting.wire_call.hold["FindReply"] = asyncio.Event()
    late = (await begun(world, sends={"idempotency-key": "k"})).json
    assert late["status"] == "queued"
    gate.set()
    failed = await ended(ask, late["id"])
    assert failed["status"] == "failed"
    assert "same idempotency-key" in failed["error"]["message"]
    monkeypatch.setattr(responses_endpoint, "BEGIN_S", 60.0)
    again = await begun(world, sends={"idempotency-key": "k"})
    assert (again.json["id"], again.json["status"]) == (first.json["id"], "completed")
    await settled(world, requests=1, spent=price(10, 2))


async def test_a_run_is_not_begun_without_the_ledger(world: World) -> None:
    gate = world.accounting.wire_call.hold["BeginResponse"] = asyncio.Event()
    world.accounting.wire_call.down("BeginResponse")
    world.backends.play([Started(10, 0), Delta("x", 1), asyncio.Event()])
    starting = asyncio.create_task(begun(world))
    await until(lambda: world.backends.scripts[0].begun == 3)
    gate.set()
    assert (await starting).status == 503
    await settled(world, requests=1, spent=0)


async def test_a_response_that_still_runs_is_not_continued(world: World) -> None:
    world.backends.play([Started(10, 0), Delta("x", 1), asyncio.Event()])
    response_id = (await begun(world)).json["id"]
    body = {"model": "svc-chat", "input": "And?", "previous_response_id": response_id}
    call = await Call(world, path="/responses", body=body).done()
    assert (call.status, call.json["error"]["param"]) == (422, "previous_response_id")


async def test_a_cut_reply_is_incomplete(world: World, ask: Callable[..., Any]) -> None:
    world.backends.play([Started(10, 0), Delta("x", 1), Finished(FinishReason.LENGTH, 10, 0, 1)])
    last = await ended(ask, (await begun(world)).json["id"])
    assert (last["status"], last["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


async def test_a_cancellation_that_comes_while_the_reply_is_settled_is_too_late(
    world: World, ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []  # statuses with which the run ends its response apart from the settlement
    end = Run._end

    async def noted(run: Run, status: str, *rest: Any) -> None:
        ended.append(status)
        await end(run, status, *rest)

    monkeypatch.setattr(Run, "_end", noted)
    gate = world.accounting.wire_settle.hold["*"] = asyncio.Event()
    response_id = (await begun(world)).json["id"]
    await world.accounting.wire_settle.seen("*").wait()
    cancelling = asyncio.create_task(ask("POST", f"{response_id}/cancel"))
    run = world.services.background._tasks[world.account_id, response_id]
    await until(run.cancelling)
    gate.set()
    answer = (await cancelling).json()
    await asyncio.wait([run])
    assert ended == []
    assert (answer["status"], answer["output"][0]["status"]) == ("completed", "completed")
    await settled(world, requests=1, spent=price(10, 2))
