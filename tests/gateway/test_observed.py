"""Each request is reported once, when all is known of it: its record, its metrics, its line in the log."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from serve_app.contracts import metrics
from serve_app.contracts.books import Outcome
from serve_app.contracts.errors import SpoolFull
from serve_app.contracts.generation import (
    CallArguments,
    CallEnded,
    CallStarted,
    Delta,
    Finished,
    FinishReason,
    Rejected,
    Rejection,
    ReplyParts,
    Started,
)
from serve_app.contracts.metric import Metric
from serve_app.gateway.backends import Catalogue
from serve_app.gateway.observer import Observer, log_line
from serve_app.gateway.record import RequestRecord
from serve_app.gateway.reply_endpoint import ReplyToRequest
from tests.gateway.connections import Call
from tests.gateway.world import World, price, says, until

MakeWorld = Callable[..., Awaitable[World]]


async def reported(world: World) -> RequestRecord:
    await until(lambda: world.records)
    [record] = world.records
    assert record.open == 0
    return record


class Counted:
    """Metrics that keep every value."""

    def __init__(self) -> None:
        self.added: list[tuple[str, tuple[str, ...], float]] = []
        self.observed: list[tuple[str, tuple[str, ...]]] = []

    def add(self, counter: Metric, value: float, *labels: str) -> None:
        door = {"door": "/chat/completions"}
        served = [{"model": "svc-chat", "backend": "fake"} | door, {"model": "none", "backend": "none"} | door]
        assert labels in counter.rows(served)
        self.added.append((counter.name, labels, value))

    def observe(self, histogram: Metric, value: float, *labels: str) -> None:
        self.observed.append((histogram.name, labels))

    def set(self, gauge: Metric, value: float, *labels: str) -> None: ...

    def export_zeros(self, declared: object, served: object = ()) -> None: ...

    def of(self, metric: Metric) -> list[tuple[tuple[str, ...], float]]:
        return [(labels, value) for name, labels, value in self.added if name == metric.name]


def counted(world: World, record: RequestRecord) -> Counted:
    found = Counted()
    Observer(found, world.targets).ended(record)
    return found


async def test_a_served_request(world: World) -> None:
    world.backends.play([Started(10, 2, "w1", "replica-a"), Delta("Hel", 1), Delta("lo", 2), says("")[-1]])
    call = Call(world, stream=True, sends={"x-request-id": "mine"})
    await call.done()
    record = await reported(world)
    line = log_line(record)
    assert line["door"] == "/chat/completions"
    assert {name: line[name] for name in ("status", "outcome", "finish_reason", "replica", "model", "backend")} == {
        "status": 200, "outcome": "completed", "finish_reason": "stop", "replica": "replica-a", "model": "svc-chat",
        "backend": "fake",
    }  # fmt: skip
    assert (line["account"], line["reason"]) == (world.account_id, None)
    assert line["request_id"].removeprefix("chatcmpl-") == line["trace_id"] == call.headers["x-trace-id"]
    for name in ("admit_ms", "queue_ms", "prefill_ms", "decode_ms", "settle_ms", "first_token_ms", "total_ms"):
        assert line[name] >= 0, name
    [row] = world.ledger.export_usage().rows
    assert (line["prompt_tokens"], line["completion_tokens"]) == (row.prompt_tokens, row.completion_tokens)
    assert record.charged == row.charged
    found = counted(world, record)
    assert found.of(metrics.REQUESTS) == [(("svc-chat", "fake", "200"), 1)]
    assert found.of(metrics.FINISHES) == [(("svc-chat", "fake", "stop"), 1)]
    assert found.of(metrics.COMPLETION_TOKENS) == [(("svc-chat", "fake"), row.completion_tokens)]
    assert not found.of(metrics.REFUSALS)


async def test_a_refused_request_names_its_account_and_what_it_wanted(world: World) -> None:
    world.ledger.set_limits(world.account_id, rpm=1)
    await world.limiter.service.follow()
    await Call(world).done()
    await reported(world)
    world.records.clear()
    call = Call(world, max_tokens=50)
    await call.done()
    assert call.status == 429
    record = await reported(world)
    line = log_line(record)
    assert (line["status"], line["code"], line["account"]) == (429, "requests", world.account_id)
    assert line["reason"] == call.json["error"]["message"]
    assert line["reason"].startswith("Requests per minute: the limit is 1 and 1 are used.")
    assert (line["outcome"], line["price"], line["queue_ms"]) == (None, "0.00", None)
    assert call.headers["x-trace-id"] == line["trace_id"]
    found = counted(world, record)
    assert found.of(metrics.REFUSALS) == [(("svc-chat", "requests"), 1)]
    [(labels, wanted)] = found.of(metrics.REJECTED_DEMAND)
    assert labels == ("svc-chat", "fake", "requests")
    assert wanted > 50


@pytest.mark.parametrize(
    ("key", "fields", "status", "known"),
    [("sk-wrong", {}, 401, False), (None, {"model": "moon"}, 422, True), (None, {"messages": 7}, 400, True)],
)
async def test_a_request_that_is_refused_before_it_is_admitted(
    world: World, key: str | None, fields: dict[str, Any], status: int, known: bool
) -> None:
    call = Call(world, key, **fields)
    await call.done()
    record = await reported(world)
    assert (call.status, record.status, record.model, record.backend) == (status, status, "none", "none")
    assert bool(record.account_id) is known
    # What may quote the request is not logged.
    assert log_line(record)["reason"] == (call.json["error"]["message"] if status == 401 else None)
    assert counted(world, record).of(metrics.REFUSALS) == [(("none", record.code), 1)]


async def test_a_stream_that_fails_is_counted_as_failed_although_its_text_is_billed(world: World) -> None:
    world.backends.play([Started(10, 0), Delta("a", 1), Finished(FinishReason.ERROR, 10, 0, 1)])
    await Call(world, stream=True).done()
    record = await reported(world)
    assert (record.status, record.charged) == (500, price(10, 1))
    assert counted(world, record).of(metrics.FINISHES) == [(("svc-chat", "fake", "failed"), 1)]


async def test_a_client_that_leaves_is_reported_when_it_is_settled(world: World) -> None:
    world.backends.play([Started(10, 0), Delta("a", 1), asyncio.Event()])
    call = Call(world, stream=True)
    await call.until('"a"')
    call.hang_up()
    await call.done()
    record = await reported(world)
    assert (record.status, log_line(record)["outcome"]) == (499, "cancelled")
    assert record.charged == price(10, 1)
    assert counted(world, record).of(metrics.FINISHES) == [(("svc-chat", "fake", "cancelled"), 1)]


async def test_a_reply_with_calls_ends_with_tool_calls(world: World) -> None:
    parts = (CallStarted(0, "call_1", "f"), CallArguments(0, "{}"), CallEnded(0))
    world.backends.play([Started(10, 0), ReplyParts(parts, 5), Finished(FinishReason.STOP, 10, 0, 5)])
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    await Call(world, tools=[tool]).done()
    assert (await reported(world)).finish == "tool_calls"


async def test_what_a_replica_rejects(world: World) -> None:
    world.backends.play([Rejected(Rejection.QUEUE_FULL)])
    await Call(world).done()
    record = await reported(world)
    assert (record.status, record.code, record.outcome) == (503, "overloaded_error", None)


async def test_goodput_counts_replies_within_both_targets(make_world: MakeWorld) -> None:
    prices = {"input": "1", "cached_input": "0.5", "output": "3"}
    strict = {"backends": {"fake": 1}, "price": prices, "first_token_target_s": 1e-9, "output_token_target_s": 1000}
    world = await make_world(models={"svc-chat": strict})
    await Call(world, stream=True).done()
    met = dict(counted(world, await reported(world)).of(metrics.LATENCY_TARGETS))
    assert [labels[2:] for labels in met] == [("first_token", "no"), ("output_token", "yes"), ("all", "no")]


async def test_texts_are_in_the_log_only_of_accounts_for_which_an_operator_wants_them(world: World) -> None:
    lines = []
    for wanted in (["acct_of_another"], [world.account_id]):
        world.services.settings = world.settings.model_copy(update={"logged_texts": wanted})
        world.backends.play(says("a secret reply"))
        await Call(world, messages=[{"role": "user", "content": "a secret prompt"}]).done()
        lines.append(log_line(await reported(world)))
        world.records.clear()
    assert "secret" not in json.dumps(lines[0])
    assert lines[1]["reply"] == "a secret reply"
    assert "a secret prompt" in json.dumps(lines[1]["messages"])


@pytest.mark.parametrize(("events", "tokens"), [([Started(10, 0)], 0), ([Started(10, 0), Delta("a", 1)], 1)])
async def test_price_and_tokens_are_the_ledgers_when_a_client_leaves(
    world: World, events: list[Any], tokens: int
) -> None:
    reached = asyncio.Event()
    world.backends.play([*events, reached])
    call = Call(world, stream=True)
    await until(lambda: world.backends.running)
    await until(lambda: not tokens or b'"a"' in call.body)
    call.hang_up()
    await call.done()
    record = await reported(world)
    [row] = world.ledger.export_usage().rows
    assert (record.charged, record.completion_tokens) == (row.charged, row.completion_tokens)
    assert record.outcome is not None
    assert record.outcome.value == row.outcome.value


async def test_a_request_that_no_settlement_could_keep_is_reported_as_the_ledger_will_have_it(world: World) -> None:
    async def full(*_: Any, **__: Any) -> None:
        raise SpoolFull("full")

    world.services.settlements.settle = full  # type: ignore[method-assign]
    await Call(world).done()
    record = await reported(world)
    assert (record.status, record.outcome, record.charged) == (503, Outcome.FAILED, 0)
    assert record.completion_tokens > 0


async def test_an_identifier_that_is_removed_meanwhile_leaves_no_hold(world: World) -> None:
    gate = asyncio.Event()
    world.backends.play([gate, Rejected(Rejection.QUEUE_FULL)])
    call = Call(world)
    await until(lambda: world.backends.running)
    world.services.catalogue = Catalogue(world.settings.model_copy(update={"models": {}}))
    gate.set()
    await call.done()
    assert call.status == 503
    await until(lambda: world.limiter.service.admission.held() == (0, 0))


async def test_a_request_that_has_ended_is_in_no_circle(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams would otherwise wait for a full collection of the garbage."""

    replies: weakref.WeakSet[ReplyToRequest] = weakref.WeakSet()
    respond = ReplyToRequest.respond

    async def kept(reply: ReplyToRequest, *arguments: Any) -> None:
        replies.add(reply)
        await respond(reply, *arguments)

    monkeypatch.setattr(ReplyToRequest, "respond", kept)
    gc.disable()
    try:
        for _ in range(3):
            await Call(world, stream=True).done()
        await until(lambda: len(world.records) == 3)
        world.records.clear()
        await until(lambda: not replies)
    finally:
        gc.enable()


async def test_a_clients_trace_is_kept(world: World) -> None:
    trace, span = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    call = Call(world, sends={"traceparent": f"00-{trace}-{span}-01"})
    await call.done()
    record = await reported(world)
    assert (record.trace.trace_id, record.trace.parent_id) == (trace, span)
    assert call.headers["x-trace-id"] == trace
