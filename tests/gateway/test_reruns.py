"""A request whose replica is lost runs again on another one, and is billed once, whoever dies then."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from serve_app.contracts.books import Outcome
from serve_app.contracts.generation import Delta, Finished, FinishReason, GenerateCall, Started
from serve_app.contracts.ports import BackendUnavailable
from serve_app.gateway import reruns
from serve_app.gateway.observer import log_line
from serve_app.model import orphans
from serve_app.model.orphans import Orphans
from serve_app.storage.spool import ORPHANS, Spool
from tests.gateway.connections import Call
from tests.gateway.world import World, price, says, settled, until

MakeWorld = Callable[..., Awaitable[World]]
LOST = BackendUnavailable("died")
FULL = Finished(FinishReason.STOP, 10, 0, 2)
DEATHS: dict[str, list[Any]] = {
    "before anything": [LOST],
    "before the first token": [Started(10, 0), LOST],
    "with its text held back": [Started(10, 0), Delta("", 1), LOST],
    "drained": [Started(10, 0), asyncio.CancelledError()],
    "the stream ends": [Started(10, 0)],
}
LATER_DEATHS: dict[str, list[Any]] = {
    "in mid-reply": [Started(10, 0), Delta("other", 1), LOST],
    "in its last event": [Started(10, 0), Delta("other", 1), Delta(" text", 2), LOST],
}


def completed_ids(world: World) -> list[str]:
    return [one.request_id for one in usage(world) if one.outcome is Outcome.COMPLETED]


def usage(world: World) -> list[Any]:
    return list(world.ledger.export_usage(world.account_id).rows)


@pytest.mark.parametrize("death", [*DEATHS, *LATER_DEATHS])
async def test_a_call_whose_replica_dies_at_any_point_runs_again_and_is_billed_once(world: World, death: str) -> None:
    world.backends.play({**DEATHS, **LATER_DEATHS}[death], says("Hello", " world"))
    call = await Call(world).done()
    assert call.status == 200
    assert call.json["choices"][0]["message"]["content"] == "Hello world"
    assert call.json["usage"]["completion_tokens"] == 2
    await settled(world, requests=2, spent=price(10, 2))
    assert completed_ids(world) == [call.json["id"]]
    assert [one.charged for one in usage(world) if one.outcome is Outcome.FAILED] == [0]


@pytest.mark.parametrize("death", ["before anything", "with its text held back", "drained"])
async def test_a_stream_of_which_nothing_was_sent_runs_again(world: World, death: str) -> None:
    world.backends.play(DEATHS[death], says("Hello", " world"))
    call = await Call(world, stream=True).done()
    assert (call.status, call.text, call.ended) == (200, "Hello world", True)
    assert {event["id"] for event in call.events} == set(completed_ids(world))
    await settled(world, requests=2, spent=price(10, 2))


async def test_a_stream_that_has_only_sent_comments_runs_again(make_world: MakeWorld) -> None:
    world = await make_world(keep_alive_s=0.01)
    gate = asyncio.Event()
    world.backends.play([Started(10, 0), gate, LOST], says("Hello", " world"))
    call = Call(world, stream=True)
    await call.until(": keep-alive")
    gate.set()
    await call.done()
    assert call.text == "Hello world"
    await settled(world, requests=2, spent=price(10, 2))


async def test_a_call_that_has_sent_line_feeds_runs_again(make_world: MakeWorld) -> None:
    world = await make_world(early_reply_s=0.01, line_feed_s=0.01)
    gate = asyncio.Event()
    world.backends.play([Started(10, 0), Delta("other", 1), gate, LOST], says("Hello", " world"))
    call = Call(world)
    await call.until("\n")
    gate.set()
    await call.done()
    assert call.json["choices"][0]["message"]["content"] == "Hello world"
    await settled(world, requests=2, spent=price(10, 2))


async def test_a_stream_of_which_text_was_sent_does_not_begin_again(world: World) -> None:
    world.backends.play([Started(10, 0), Delta("half", 1), LOST], says("Hello", " world"))
    call = await Call(world, stream=True).done()
    assert (call.text, set(call.events[-1])) == ("half", {"error"})
    assert len(world.backends.calls) == 1
    await settled(world, requests=1, spent=0)


@pytest.mark.parametrize(("deaths", "status"), [(2, 200), (3, 503)])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_runs_three_times_at_most(world: World, stream: bool, deaths: int, status: int) -> None:
    world.backends.play(*[[Started(10, 0), LOST]] * deaths, says("Hello", " world"))
    call = await Call(world, stream=stream).done()
    assert call.status == status
    assert len(world.backends.calls) == 3
    assert len({one.request_id for one in world.backends.calls}) == 3
    await settled(world, requests=3, spent=price(10, 2) if status == 200 else 0)
    await until(lambda: world.records)
    assert [log_line(record)["reruns"] for record in world.records] == [2]
    if status == 503:
        assert call.json["error"]["type"] == "overloaded_error"
        assert call.headers["retry-after"] == "2"


async def test_no_run_begins_that_could_not_begin_in_time(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reruns, "PAUSES_S", [3000.0])
    world = await make_world(queue_timeout_s=2000.0)
    world.backends.play([LOST], says("Hello"))
    assert (await Call(world).done()).status == 503
    await settled(world, requests=1, spent=0)


async def test_a_run_after_a_lost_one_takes_neither_a_second_slot_nor_a_second_request_of_the_rate(
    world: World,
) -> None:
    world.account_id, world.key = world.new_account(rpm=1, concurrency=1)
    world.backends.play([Started(10, 0), Delta("other", 1), LOST], [LOST], says("Hello", " world"))
    assert (await Call(world).done()).status == 200
    await until(lambda: world.is_idle)
    assert (await Call(world).done()).status == 429, "one was used"


async def test_the_money_stays_held_while_it_runs_again(world: World) -> None:
    gate = asyncio.Event()
    world.backends.play([Started(10, 0), LOST], [Started(10, 0), gate, Delta("Hello", 1), FULL])
    call = Call(world)
    await until(lambda: len(world.backends.calls) == 2)
    assert world.open_requests == world.limiter_client.open_requests == 1
    assert world.held >= price(10, 100)
    gate.set()
    assert (await call.done()).status == 200
    await settled(world, requests=2, spent=price(10, 2))


@pytest.mark.parametrize("lost", [LOST, asyncio.CancelledError()], ids=["dies", "cancelled"])
async def test_the_reply_of_the_second_run_is_stored_for_a_retry(world: World, lost: BaseException) -> None:
    world.backends.play([Started(10, 0), Delta("other", 1), lost], says("Hello", " world"))
    sends = {"idempotency-key": "one"}
    first = await Call(world, sends=sends).done()
    again = await Call(world, sends=sends).done()
    assert (again.body, again.headers["idempotency-replayed"]) == (first.body, "true")
    await settled(world, requests=2, spent=price(10, 2))


async def test_a_lost_run_counts_against_its_backend_and_in_the_metrics(world: World) -> None:
    world.backends.play([Started(10, 0, replica="a"), LOST], says("Hello", " world"))
    assert (await Call(world).done()).status == 200
    await until(lambda: world.records)
    lost, whole = sorted(world.services.calls, key=lambda record: record.reruns)
    assert (lost.phases.failed, lost.backend, lost.replica) == (True, "fake", "a")
    assert (whole.phases.failed, whole.reruns, whole.outcome) == (False, 1, Outcome.COMPLETED)
    assert whole.trace == lost.trace
    assert world.metrics.reruns == ["fake"]
    assert world.metrics.first_tokens == 1


# What the replica of a lost run leaves behind


class Replicas:
    """Replicas that write down their replies and die, and a live one that settles them."""

    def __init__(self, world: World, folder: Path) -> None:
        self._world = world
        self._folder = folder
        self._names = iter("abcd")

    async def finish(self, call: GenerateCall, tokens: int = 2) -> None:
        """A replica writes ahead what a reply has used, and dies."""
        spool = Spool(self._folder, next(self._names), suffix=ORPHANS, flushed=False)
        kept = Orphans(self._world.accounting_service.settle, spool, self._find_unsettled)
        assert kept.write_ahead(call, Finished(FinishReason.STOP, 10, 0, tokens), started_at=1.0)
        await asyncio.to_thread(spool.close)

    async def settle(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another replica of the folder finds all that is due."""
        monkeypatch.setattr(orphans, "LATE_S", 60.0)
        spool = Spool(self._folder, next(self._names), suffix=ORPHANS, flushed=False)
        now = time.time()
        due = Orphans(self._world.accounting_service.settle, spool, self._find_unsettled, clock=lambda: now)
        now += 3600
        await due.settle_due()
        assert not spool.waiting
        await asyncio.to_thread(spool.close)

    async def _find_unsettled(self, request_ids: tuple[str, ...]) -> list[str]:
        return await self._world.settlements._accounting.unsettled(request_ids)


@pytest.mark.parametrize("gateway_dies", [False, True])
async def test_what_a_lost_replica_has_written_down_is_not_billed_while_another_one_works(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gateway_dies: bool
) -> None:
    gate, replicas = asyncio.Event(), Replicas(world, tmp_path / "replicas")
    world.backends.play([Started(10, 0), LOST], [Started(10, 0), Delta("Hello", 1), gate, Delta(" world", 2), FULL])
    call = Call(world)
    await until(lambda: len(world.backends.calls) == 2)
    first, second = world.backends.calls
    await replicas.finish(first, tokens=7)
    await replicas.settle(monkeypatch)
    assert world.spent == 0
    if gateway_dies:
        await world.die()
        await replicas.finish(second)
        await replicas.settle(monkeypatch)
        assert world.spent == price(10, 2)
        assert world.recorded == 2
        call.hang_up()
        await call.done()
    else:
        gate.set()
        assert (await call.done()).json["usage"]["completion_tokens"] == 2
        await settled(world, requests=2, spent=price(10, 2))
    assert world.books_balance()


async def test_a_lost_run_that_its_replica_has_settled_first_is_billed_as_that_and_does_not_run_again(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, replicas = asyncio.Event(), Replicas(world, tmp_path / "replicas")
    world.backends.play([Started(10, 0), gate, LOST], says("Hello", " world"))
    call = Call(world)
    await until(lambda: world.backends.calls)
    await replicas.finish(world.backends.calls[0], tokens=7)
    await replicas.settle(monkeypatch)
    gate.set()
    assert (await call.done()).status == 503
    assert len(world.backends.calls) == 1
    await settled(world, requests=1, spent=price(10, 7))


async def test_without_the_ledger_nothing_runs_again(make_world: MakeWorld) -> None:
    world = await make_world(settle_timeout_s=0.05)
    gate = asyncio.Event()
    world.backends.play([Started(10, 0), gate, LOST], says("Hello", " world"))
    call = Call(world)
    await until(lambda: world.backends.calls)
    world.accounting.wire_settle.down()
    gate.set()
    assert (await call.done()).status == 503
    assert len(world.backends.calls) == 1
    await until(lambda: world.is_idle)
    world.accounting.wire_settle.up()
    world.settlements.start()
    await settled(world, requests=1, spent=0)


async def test_an_answer_of_the_ledger_that_was_lost_does_not_end_the_request(make_world: MakeWorld) -> None:
    world = await make_world()
    wire = world.accounting.wire_settle
    gate = wire.hold["*"] = asyncio.Event()
    wire.lose.add("*")
    world.backends.play([LOST], says("Hello", " world"))
    call = Call(world)
    await wire.seen("*").wait()
    gate.set()
    await until(lambda: world.recorded == 1)
    wire.up()
    assert (await call.done()).status == 200
    await settled(world, requests=2, spent=price(10, 2))


@pytest.mark.parametrize("point", ["settling", "admitting", "waiting"])
async def test_a_client_that_leaves_between_two_runs_pays_nothing_and_leaves_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    died = asyncio.Event()
    world.backends.play([Started(10, 0), Delta("other", 1), died, LOST], says("Hello", " world"))
    call = Call(world)
    await until(lambda: world.backends.calls)
    if point == "waiting":
        monkeypatch.setattr(reruns, "PAUSES_S", [30.0])
        died.set()
        await until(lambda: not world.backends.running)
        await asyncio.sleep(0)
    else:
        wire, name = (world.accounting.wire_settle, "*") if point == "settling" else (world.limiter.wire, "Admit")
        wire.arrived.clear()
        gate = wire.hold[name] = asyncio.Event()
        died.set()
        await wire.seen(name).wait()
    call.hang_up()
    await call.done()
    if point != "waiting":
        gate.set()
    await settled(world, requests=1, spent=0)
    assert len(world.backends.calls) == 1
