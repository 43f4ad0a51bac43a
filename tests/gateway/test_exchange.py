"""Every way a chat request can end leaves no hold, no slot, and exactly the right bill."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from serve_app.contracts import key_format as keys
from serve_app.contracts.books import Outcome, Settlement
from serve_app.contracts.generation import Delta, Finished, FinishReason, Rejected, Rejection, Started
from serve_app.contracts.limiting import Identify, Status
from serve_app.contracts.ports import BackendUnavailable
from serve_app.gateway import web
from tests.gateway.connections import Call
from tests.gateway.world import NANO, PRICE_IN, PRICE_OUT, World, price, says, settled, until

# Requests that complete


@pytest.mark.parametrize("stream", [False, True])
async def test_the_usage_that_is_reported_is_the_usage_that_is_billed(world: World, stream: bool) -> None:
    world.backends.play(says("Hello", " wor", "ld", prompt=12))
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    call = await Call(world, **options).done()
    assert call.status == 200
    usage = call.events[-1]["usage"] if stream else call.json["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (12, 3, 15)
    assert call.text == "Hello world" if stream else call.json["choices"][0]["message"]["content"] == "Hello world"
    await settled(world, requests=1, spent=price(12, 3))


async def test_events_that_arrive_all_at_once_keep_their_order(world: World) -> None:
    # Started comes first: otherwise a client that disconnects later is billed for a prompt of zero tokens.
    gate = asyncio.Event()
    world.backends.play([Started(10, 0), Delta("a", 1), Delta("b", 2), gate])
    call = Call(world, stream=True)
    await call.until('"b"')
    call.hang_up()
    await call.done()
    await settled(world, requests=1, spent=price(10, 2))


@pytest.mark.parametrize("stream", [False, True])
async def test_the_settlement_is_durable_before_the_last_chunk_leaves(world: World, stream: bool) -> None:
    gate = world.accounting.wire_settle.hold["*"] = asyncio.Event()
    call = Call(world, stream=stream)
    await world.accounting.wire_settle.seen("*").wait()
    assert 'finish_reason":"stop' not in call.body.decode()
    assert not call.ended
    gate.set()
    assert (await call.done()).ended
    await settled(world, requests=1, spent=price(10, 2))


async def test_the_model_gets_the_budget_of_the_grant(world: World) -> None:
    # The estimate of this prompt leaves room for a few tokens only.
    account_id, key = world.new_account(credit=30 * PRICE_OUT)
    await Call(world, key, max_tokens=1000).done()
    [call] = world.backends.calls
    assert 1 <= call.sampling.max_tokens < 30
    assert call.credit <= 30 * PRICE_OUT
    assert call.bill.account_id == account_id


async def test_the_hold_covers_a_prompt_that_is_dearer_when_it_is_cached(make_world: Callable[..., Any]) -> None:
    model = {"backends": {"fake": 1}, "price": {"input": "1", "cached_input": "2", "output": "3"}}
    world: World = await make_world(models={"svc-chat": model})
    world.account_id, key = world.new_account(credit=2000 * 20 + 3000)
    world.backends.play(
        [Rejected(Rejection.CREDIT, prompt_tokens=20)],
        [Started(20, 20), Delta("a", 1), Finished(FinishReason.LENGTH, 20, 20, 1)],
    )
    call = await Call(world, key).done()
    assert call.status == 200
    assert world.backends.calls[1].sampling.max_tokens == 1
    await until(lambda: world.is_idle)
    assert world.balance == 0


# Refusals


@pytest.mark.parametrize(
    ("rejected", "stream", "status", "code"),
    [
        (Rejected(Rejection.CONTEXT, prompt_tokens=40000, limit=32768), False, 422, "context_length_exceeded"),
        (Rejected(Rejection.CONTEXT, limit=32768), False, 422, "context_length_exceeded"),
        (Rejected(Rejection.QUEUE_FULL), True, 503, "overloaded_error"),
        (Rejected(Rejection.CLOSED), False, 503, "overloaded_error"),
        (Rejected(Rejection.INVALID, message="roles must alternate"), True, 422, "invalid_parameter"),
    ],
    ids=lambda value: str(getattr(value, "reason", value)),
)
async def test_a_request_that_a_replica_rejects_consumes_nothing(
    world: World, rejected: Rejected, stream: bool, status: int, code: str
) -> None:
    world.backends.play([rejected], says("x"))
    call = await Call(world, stream=stream).done()
    assert (call.status, call.json["error"]["code"]) == (status, code)
    await settled(world, requests=0, spent=0)
    if status != 422:
        # Nor any rate: the next request finds both buckets as if this one had never come.
        after = await Call(world).done()
        assert after.headers["x-ratelimit-remaining-requests"] == "999"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("param", "named"), [("min_p", "min_p"), ("", None)])
async def test_a_request_that_an_engine_refuses_only_after_its_start_is_refused_and_free(
    world: World, stream: bool, param: str, named: str | None
) -> None:
    refused = Rejected(Rejection.INVALID, message="this model's engine refuses the request.", param=param)
    world.backends.play([Started(10, 0), refused])
    call = await Call(world, stream=stream).done()
    assert call.status == 422
    error = call.json["error"]
    assert (error["code"], error["param"]) == ("invalid_parameter", named)
    await settled(world, requests=0, spent=0)


@pytest.mark.parametrize(
    "rejected",
    [
        Rejected(Rejection.INVALID, message="a bad grammar", param="response_format"),
        Rejected(Rejection.CONTEXT, prompt_tokens=40_000, limit=32768),
    ],
    ids=["invalid", "context"],
)
async def test_requests_that_are_rejected_for_their_own_fault_use_up_the_rates_of_a_minute(
    world: World, rejected: Rejected
) -> None:
    """Else prompts of nearly the context's length with a bad grammar keep replicas busy for nothing."""
    _, key = world.new_account(rpm=2)
    world.backends.play([rejected])
    assert [(await Call(world, key).done()).status for _ in range(3)] == [422, 422, 429]
    _, key = world.new_account(tpm=90_000)
    world.backends.play([rejected])
    long = {"messages": [{"role": "user", "content": "word " * 18_000}], "max_tokens": 1}
    statuses = [(await Call(world, key, **long).done()).status for _ in range(5)]
    assert statuses[:2] == [422, 422]
    assert statuses[4] == 429
    await until(lambda: world.is_idle)


async def test_a_queue_that_is_full_gives_the_tokens_of_a_minute_back(world: World) -> None:
    _, key = world.new_account(tpm=90_000)
    world.backends.play([Rejected(Rejection.QUEUE_FULL)])
    long = {"messages": [{"role": "user", "content": "word " * 18_000}], "max_tokens": 1}
    assert {(await Call(world, key, **long).done()).status for _ in range(8)} == {503}


async def test_a_refused_admission_leaves_nothing(world: World) -> None:
    _, key = world.new_account(credit=0)
    call = await Call(world, key).done()
    assert (call.status, call.json["error"]["code"]) == (402, "insufficient_balance")
    assert not world.backends.calls
    await until(lambda: world.is_idle)


async def test_a_prompt_that_turns_out_larger_gets_a_larger_hold(world: World) -> None:
    world.backends.play([Rejected(Rejection.CREDIT, prompt_tokens=500)], says("x", prompt=500))
    call = await Call(world).done()
    assert call.status == 200
    first, second = world.backends.calls
    assert second.credit >= price(500, second.sampling.max_tokens) > first.credit
    await settled(world, requests=1, spent=price(500, 1))


async def test_a_prompt_that_the_balance_does_not_pay_for_is_402(world: World) -> None:
    world.account_id, key = world.new_account(credit=price(100, 0))
    world.backends.play([Rejected(Rejection.CREDIT, prompt_tokens=500)], says("never"))
    call = await Call(world, key).done()
    assert call.status == 402
    assert len(world.backends.calls) == 1
    await until(lambda: world.is_idle)
    assert (world.balance, world.recorded) == (price(100, 0), 0)


async def test_a_client_that_is_gone_while_the_hold_is_adjusted_leaves_nothing_behind(world: World) -> None:
    world.backends.play([Rejected(Rejection.CREDIT, prompt_tokens=500)], says("never"))
    gate = world.limiter.wire.hold["Adjust"] = asyncio.Event()
    call = Call(world)
    await world.limiter.wire.seen("Adjust").wait()
    call.hang_up()
    await call.done()
    gate.set()
    await settled(world, requests=1, spent=0)


# Clients that disconnect


async def test_a_client_that_leaves_while_the_limiter_is_asked_pays_nothing(world: World) -> None:
    gate = world.limiter.wire.hold["Admit"] = asyncio.Event()
    call = Call(world)
    await world.limiter.wire.seen("Admit").wait()
    call.hang_up()
    await call.done()
    gate.set()
    await until(lambda: any(type(ask).__name__ == "Release" for ask in world.limiter.asked))
    await settled(world, requests=0, spent=0)
    assert not world.backends.calls
    assert world.metrics.requests == [("svc-chat", 499)]


async def test_a_client_that_leaves_while_the_admission_waits_behind_another_call_pays_nothing(world: World) -> None:
    # Admission and release reach the limiter in one list.
    await Call(world).done()
    _, other = world.new_account()
    await Call(world, other).done()  # so that nobody asks whose key it is
    gate = world.limiter.wire.hold["*"] = asyncio.Event()
    blocker = world.limiter_client._shards[0]._asks.submit(Status(()))  # the call that is in flight
    call = Call(world, other)
    await until(lambda: len(world.limiter_client._shards[0]._asks._waiting) == 1)
    call.hang_up()
    await call.done()
    gate.set()
    await blocker
    await until(lambda: type(world.limiter.asked[-1]).__name__ == "Release")
    await settled(world, requests=1, spent=price(10, 2))


async def test_a_client_that_leaves_before_it_is_known_who_it_is_is_not_admitted(world: World) -> None:
    gate = world.limiter.wire.hold["Identify"] = asyncio.Event()
    call = Call(world)
    await world.limiter.wire.seen("Identify").wait()
    call.hang_up()
    await call.done()
    gate.set()
    await settled(world, requests=0, spent=0)
    assert "Admit" not in [type(ask).__name__ for ask in world.limiter.asked]


async def test_a_client_that_leaves_in_the_queue_pays_nothing(world: World) -> None:
    [script] = world.backends.play([asyncio.Event()])
    call = Call(world)
    await until(lambda: script.calls)
    call.hang_up()
    await call.done()
    await settled(world, requests=1, spent=0)


async def test_a_client_that_leaves_during_the_prompt_pays_nothing(world: World) -> None:
    [script] = world.backends.play([Started(1000, 0), asyncio.Event()])
    call = Call(world, stream=True)
    await until(lambda: script.calls)
    call.hang_up()
    await call.done()
    await asyncio.wait_for(script.closed.wait(), 60)
    await settled(world, requests=1, spent=0)


async def test_a_prompt_that_its_client_cancels_keeps_its_cost_in_rates(world: World) -> None:
    [script, _] = world.backends.play([Started(300_000, 0), asyncio.Event()], says("x"))
    call = Call(world, stream=True)
    await until(lambda: script.calls)
    call.hang_up()
    await call.done()
    await settled(world, requests=1, spent=0)
    headers = (await Call(world).done()).headers
    assert int(headers["x-ratelimit-remaining-tokens"]) < 900_000  # of a million, with some seconds' refill


async def test_a_client_that_leaves_while_its_first_token_is_held_back_pays_for_it(world: World) -> None:
    """From the first token on, its prompt is found in the cache."""
    [script] = world.backends.play([Started(10, 0), Delta("", 1), asyncio.Event()])
    call = Call(world, stream=True)
    await until(lambda: script.calls and world.metrics.first_tokens)
    assert not call.body  # nothing of it is for the client
    call.hang_up()
    await call.done()
    await settled(world, requests=1, spent=price(10, 1))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_in_mid_reply_stops_the_model_and_pays_for_the_tokens_produced(
    world: World, stream: bool
) -> None:
    [script] = world.backends.play([Started(10, 0), Delta("a", 1), Delta("b", 4), asyncio.Event()])
    call = Call(world, stream=stream)
    await until(lambda: script.begun == 4)
    if stream:
        await call.until('"b"')
    call.hang_up()
    await call.done()
    await asyncio.wait_for(script.closed.wait(), 60)
    await settled(world, requests=1, spent=price(10, 4))


async def test_cached_tokens_that_are_known_with_the_first_token_are_billed_as_cached(world: World) -> None:
    world.backends.play([Started(10, 0), Started(10, 8), Delta("a", 1), asyncio.Event()])
    call = Call(world, stream=True)
    await call.until('"a"')
    call.hang_up()
    await call.done()
    await settled(world, requests=1, spent=price(10, 1) - 8 * PRICE_IN // 2)


async def test_the_task_of_a_request_is_cancelled_as_ray_serve_does(world: World) -> None:
    [script] = world.backends.play([Started(10, 0), Delta("a", 1), asyncio.Event()])
    call = Call(world, stream=True)
    await call.until('"a"')
    call.task.cancel()
    await call.done()
    assert call.task.cancelled()
    await asyncio.wait_for(script.closed.wait(), 60)
    await settled(world, requests=1, spent=price(10, 1))
    assert world.metrics.requests == [("svc-chat", 499)]


@pytest.mark.parametrize("cancel", [False, True])
async def test_a_client_that_leaves_during_settlement_pays_for_the_whole_reply(world: World, cancel: bool) -> None:
    gate = world.accounting.wire_settle.hold["*"] = asyncio.Event()
    call = Call(world)
    await world.accounting.wire_settle.seen("*").wait()
    if cancel:
        call.task.cancel()
    else:
        call.hang_up()
    await call.done()
    gate.set()
    await settled(world, requests=1, spent=price(10, 2))
    assert world.metrics.settlements == ["completed"]


async def test_a_connection_that_breaks_while_something_is_sent_is_a_client_that_is_gone(world: World) -> None:
    gate = asyncio.Event()
    world.backends.play([Started(10, 0), Delta("a", 1), gate, Delta("b", 2), asyncio.Event()])
    call = Call(world, stream=True)
    await call.until('"a"')
    call.send_error = ConnectionResetError("gone")
    gate.set()
    await call.done()
    await settled(world, requests=1, spent=price(10, 2))
    assert world.metrics.requests == [("svc-chat", 499)]


async def test_a_client_that_stops_reading_does_not_keep_its_hold(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "STALLED_S", 0.02)
    world.backends.play(says("a", "b", "c"))
    call = Call(world, stream=True)
    call.stalled = asyncio.Event()
    await call.done()
    await settled(world, requests=1, spent=price(10, 3))


# Backends that fail


async def test_no_replica_is_503_and_costs_nothing(world: World) -> None:
    world.backends.play(*[[BackendUnavailable("no replica")]] * 3, says("x"))
    call = await Call(world).done()
    assert (call.status, call.json["error"]["type"]) == (503, "overloaded_error")
    await until(lambda: world.is_idle)
    assert world.spent == 0
    assert (await Call(world).done()).headers["x-ratelimit-remaining-requests"] == "999"


async def test_a_fault_of_the_model_is_500_and_costs_nothing(world: World) -> None:
    world.backends.play([RuntimeError("a secret path")])
    call = await Call(world, stream=True).done()
    assert call.status == 500
    assert b"secret" not in call.body
    await settled(world, requests=1, spent=0)


@pytest.mark.parametrize(
    ("work", "runs", "remaining"),
    [
        ([Started(10, 0), Finished(FinishReason.ERROR, 10, 0, 0)], 1, "8"),
        ([Started(10, 0), Finished(FinishReason.ERROR, 10, 0, 7)], 1, "8"),
        ([Started(10, 0), RuntimeError("fault")], 1, "8"),
        ([Started(10, 0), Finished(FinishReason.DEADLINE, 10, 0, 7)], 1, "8"),
        ([Started(10, 0), BackendUnavailable("died")], 3, "9"),
    ],
    ids=["engine fails", "fails after hidden tokens", "replica fails", "late after hidden tokens", "replica dies"],
)
async def test_a_failure_that_took_work_counts_against_the_rate_limits(
    world: World, work: list[Any], runs: int, remaining: str
) -> None:
    world.account_id, world.key = world.new_account(rpm=10)  # a slot of the rate every 6 s
    world.backends.play(*[work] * runs, says("x"))
    assert (await Call(world).done()).status in (500, 503)
    await until(lambda: world.is_idle)
    assert (await Call(world).done()).headers["x-ratelimit-remaining-requests"] == remaining


@pytest.mark.parametrize(
    "end",
    [[BackendUnavailable("died")], [], [Finished(FinishReason.ABORT, 10, 0, 1)], [asyncio.CancelledError()]],
    ids=["replica dies", "stream ends early", "engine has ended", "call cancelled"],
)
async def test_a_stream_that_breaks_ends_with_an_error_event_and_is_not_billed(world: World, end: list[Any]) -> None:
    world.backends.play([Started(10, 0), Delta("half", 1), *end])
    call = await Call(world, stream=True).done()
    assert call.status == 200
    assert call.events[-1]["error"]["type"] == "overloaded_error"
    assert b"[DONE]" not in call.body
    assert call.ended
    await settled(world, requests=1, spent=0)


@pytest.mark.parametrize(
    ("end", "tokens"), [(RuntimeError("fault"), 1), (Finished(FinishReason.ERROR, 10, 0, 2), 2)], ids=repr
)
async def test_a_failure_that_a_request_may_cause_does_not_make_the_text_before_it_free(
    world: World, end: Any, tokens: int
) -> None:
    world.backends.play([Started(10, 0), Delta("half", 1), end])
    call = await Call(world, stream=True).done()
    assert call.events[-1]["error"]["type"] == "server_error"
    assert b"[DONE]" not in call.body
    await settled(world, requests=1, spent=price(10, tokens))
    assert world.metrics.settlements == ["cancelled"]


@pytest.mark.parametrize("end", [BackendUnavailable("died"), asyncio.CancelledError()], ids=["dies", "cancelled"])
async def test_a_whole_reply_that_breaks_is_503_and_is_not_billed(world: World, end: BaseException) -> None:
    world.backends.play([Started(10, 0), Delta("half", 1), end])
    call = await Call(world).done()
    assert call.status == 503
    await settled(world, requests=3, spent=0)


async def test_a_client_that_leaves_before_it_receives_a_failure_pays_for_the_text_that_it_has(world: World) -> None:
    gate = asyncio.Event()
    failure = Finished(FinishReason.ERROR, 10, 0, 2)
    [script] = world.backends.play([Started(10, 0), Delta("a", 1), gate, Delta("b", 2), failure])
    call = Call(world, stream=True)
    await call.until('"a"')
    call.stalled = asyncio.Event()  # the failure waits behind data that the client does not read
    gate.set()
    await script.closed.wait()
    call.hang_up()
    await call.done()
    await settled(world, requests=1, spent=price(10, 2))


async def test_a_request_that_waits_too_long_is_503_and_stays_free_whatever_the_replica_does_then(
    make_world: Callable[..., Any], let_pass: Callable[[float], None]
) -> None:
    world: World = await make_world(queue_timeout_s=600.0)
    world.backends.play([asyncio.Event()])
    call = Call(world)
    await until(lambda: world.backends.running)
    let_pass(1000.0)
    await call.done()
    assert call.status == 503
    assert 1 <= int(call.headers["retry-after"]) <= 60
    await until(lambda: world.is_idle and world.recorded == 1)
    # The replica begins at this moment, and settles the stream as a cut one.
    [generate] = world.backends.calls
    bill = generate.bill
    late = Settlement(
        generate.request_id, bill.account_id, bill.key_id, bill.model, bill.backend, bill.price,
        10, 0, 5, Outcome.CANCELLED, 1.0, 2.0,
    )  # fmt: skip
    await world.accounting_service.settle([late])
    assert world.spent == 0
    assert world.metrics.settlements == ["failed"]


# Responses that are lost after the call took effect


async def test_an_admission_whose_answer_is_lost_is_admitted_once(world: World) -> None:
    await world.limiter.service.ask([Identify(keys.digest(world.key))])  # the limiter knows the key
    world.limiter.wire.lose.add("Admit")
    call = Call(world)
    await until(lambda: sum(type(ask).__name__ == "Admit" for ask in world.limiter.asked) >= 3)
    assert world.open_requests == 1
    world.limiter.wire.up()
    await call.done()
    assert call.headers["x-ratelimit-remaining-requests"] == "999"
    await settled(world, requests=1, spent=price(10, 2))


async def test_an_admission_whose_answers_are_all_lost_is_503_and_leaves_nothing(
    make_world: Callable[..., Any],
) -> None:
    world: World = await make_world(admit_timeout_s=0.05)
    world.limiter.wire.lose.add("Admit")
    call = await Call(world).done()
    assert call.status == 503
    await settled(world, requests=0, spent=0)
    assert not world.backends.calls


async def test_a_settlement_whose_answer_is_lost_is_charged_once(world: World) -> None:
    world.accounting.wire_settle.lose.add("*")
    call = Call(world)
    await until(lambda: world.recorded == 1)
    world.accounting.wire_settle.up()
    assert (await call.done()).status == 200
    await settled(world, requests=1, spent=price(10, 2))


async def test_a_release_whose_answer_is_lost_frees_once(world: World) -> None:
    world.limiter.wire.lose.add("Release")
    assert (await Call(world).done()).status == 200
    await until(lambda: sum(type(ask).__name__ == "Release" for ask in world.limiter.asked) >= 3)
    world.limiter.wire.up()
    await settled(world, requests=1, spent=price(10, 2))


async def test_a_settlement_that_the_ledger_refuses_is_500_and_frees_the_hold(world: World) -> None:
    world.backends.play([Started(10, 0), Delta("a", 1), Finished(FinishReason.STOP, 10, 11, 1)])  # 11 cached of 10
    call = await Call(world).done()
    assert call.status == 500
    await until(lambda: world.is_idle)
    assert world.spent == 0
    assert world.metrics.settlements == ["rejected"]


async def test_many_at_once_never_overdraw_and_are_billed_exactly(world: World) -> None:
    world.account_id, key = world.new_account(credit=price(200, 100), concurrency=100)
    calls = [Call(world, key, max_tokens=20) for _ in range(20)]
    for call in calls:
        await call.done()
    good = sum(call.status == 200 for call in calls)
    assert good >= 1
    assert {call.status for call in calls} <= {200, 402}
    await until(lambda: world.is_idle)
    assert world.balance == price(200, 100) - good * price(10, 2)
    assert world.books_balance()


async def test_the_slot_of_a_request_is_free_before_the_next_request(world: World) -> None:
    world.account_id, key = world.new_account(credit=NANO, concurrency=1)
    for _ in range(5):
        assert (await Call(world, key).done()).status == 200
