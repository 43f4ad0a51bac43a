"""A gateway follows what the ledger says is served, uses the backends that can reply, and takes back bad roll-outs."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import httpx
import pytest

from serve_app.contracts.books import Audit
from serve_app.contracts.generation import BackendEvent, GenerateCall, Rejected, Rejection, Started
from serve_app.contracts.limiting import Admit, Refusal
from serve_app.contracts.money import Price
from serve_app.contracts.ports import BackendUnavailable
from serve_app.contracts.served import Backend, ModelSpec, SamplingDefaults
from serve_app.contracts.served_commands import (
    CreateModel,
    DeployBackend,
    ListTraffic,
    RetireBackend,
    SchedulePrice,
    SetTraffic,
)
from serve_app.gateway import lifecycle
from serve_app.gateway.backend_applications import DRAIN_S
from serve_app.gateway.backends import Catalogue
from serve_app.gateway.lifecycle import Lifecycle
from serve_app.settings import GatewaySettings
from tests.gateway.connections import Call
from tests.gateway.world import FULL_SETTINGS, World, says, taking, until

UP = {"status": "RUNNING", "replicas": 1}
STARTS = {"status": "DEPLOYING", "replicas": 0}
OLD = {"fake": 100}
EVEN = {"fake": 50, "new": 50}
MODELS = {  # with targets that a slow machine meets
    name: {**model, "first_token_target_s": 600.0, "output_token_target_s": 600.0}
    for name, model in FULL_SETTINGS["models"].items()
}
MANY = 8  # conversations, half of which belong to each of two backends


def questions(accounts: dict[str, str]) -> list[tuple[str, list[dict[str, str]]]]:
    """Conversations of two accounts with their keys, in turns of two by account.

    Every second one is on `fake` and the others on `new` while these share evenly.
    """
    models = {"svc-chat": {**FULL_SETTINGS["models"]["svc-chat"], "backends": EVEN}}
    catalogue = Catalogue(GatewaySettings.model_validate({"models": models}))
    pairs = []
    for account_id, key in accounts.items():
        of: dict[str, list[tuple[str, list[dict[str, str]]]]] = {name: [] for name in EVEN}
        for number in range(100 * MANY):
            messages = [{"role": "user", "content": f"Question {number}"}]
            of[catalogue.choose_backend("svc-chat", account_id, messages)].append((key, messages))
        pairs.append(zip(of["fake"], of["new"], strict=False))
    return [one for both in zip(*pairs, strict=False) for pair in both for one in pair][:MANY]


class Backends:
    """Each backend has a script of its own; what was asked of which."""

    def __init__(self, world: World) -> None:
        self.scripts: dict[str, list[Any]] = {}
        self.asked: list[str] = []
        self.calls: list[GenerateCall] = []
        world.backends.generate = taking(self.generate)  # type: ignore[method-assign]
        world.backends.report = {"fake": UP, "new": UP, "small": UP}

    async def generate(self, backend: str, call: GenerateCall) -> AsyncGenerator[BackendEvent, None]:
        self.asked.append(backend)
        self.calls.append(call)
        for step in self.scripts.get(backend, says("Hello")):
            if isinstance(step, BaseException):
                raise step
            if isinstance(step, asyncio.Event):
                await step.wait()
            else:
                yield step


class Applications:
    """ApplicationsPort."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str]] = []

    async def deploy(self, backend: Backend) -> None:
        self.done.append(("deploy", backend.name))

    async def delete(self, backend: Backend) -> None:
        self.done.append(("delete", backend.name))


class Gateway:
    """A gateway with its background work, step by step, and the clock of its requests."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.began, self.later_s = time.monotonic(), 0.0
        self.questions = questions(dict(world.new_account(concurrency=100, rpm=10_000) for _ in range(2)))
        self.backends, self.applications = Backends(world), Applications()
        self.lifecycle = Lifecycle(
            world.services, world.accountings[0], self.applications, world.metrics, clock=self.clock
        )
        world.admin.status = self.lifecycle.status

    def clock(self) -> float:
        return self.began + self.later_s

    async def run(self, command: Any) -> Any:
        return await self.world.accountings[0].run(command)

    async def give(self, weights: dict[str, int]) -> None:
        await self.run(SetTraffic("svc-chat", weights, configured=OLD, audit=Audit("ada")))
        assert await self.lifecycle.read()

    async def step(self) -> None:
        """Does the background work of one second."""
        await self.lifecycle.read()
        await self.lifecycle.read_status()
        await self.lifecycle.look()

    async def ask(self, count: int) -> list[int]:
        """So many conversations, one after the other; their statuses."""
        return [(await Call(self.world, key, messages=one).done()).status for key, one in self.questions[:count]]

    def asked(self) -> Counter[str]:
        asked, self.backends.asked = Counter(self.backends.asked), []
        return asked


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "READ_S", 0.02)


@pytest.fixture
async def world(make_world: Callable[..., Awaitable[World]]) -> World:
    return await make_world(models=MODELS)


@pytest.fixture
async def gateway(world: World) -> Gateway:
    made = Gateway(world)
    await made.step()
    return made


async def test_new_weights_hold_from_the_next_look_at_the_ledger_on(gateway: Gateway) -> None:
    await gateway.ask(5)
    assert gateway.asked() == {"fake": 5}
    await gateway.give({"new": 1})
    await gateway.ask(5)
    assert gateway.asked() == {"new": 5}


async def test_a_gateway_that_starts_knows_the_weights_before_its_first_request(gateway: Gateway) -> None:
    await gateway.give({"new": 1})
    other = Gateway(gateway.world)
    await other.lifecycle.start()
    other.lifecycle.stop()
    await other.ask(3)
    assert other.asked() == {"new": 3}


async def test_a_gateway_serves_nothing_until_it_knows_the_identifiers_and_prices_of_the_ledger(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it charges the configured price, and answers 422 for an identifier that is only in the ledger."""
    monkeypatch.setattr(lifecycle, "FIRST_READ_S", 0.01)
    world.accounting.wire_call.down("ReadServed")
    gateway = Gateway(world)
    gateway.lifecycle.rebuild()  # as after the first configuration
    await gateway.lifecycle.start()
    for model in ("svc-chat", "svc-created"):
        call = await Call(world, world.key, model=model).done()
        assert (call.status, call.headers["retry-after"]) == (503, "2")
    world.accounting.wire_call.up()
    await until(lambda: world.services.catalogue.is_known)
    gateway.lifecycle.stop()
    assert await gateway.ask(1) == [200]


async def test_while_the_ledger_is_away_what_was_known_holds(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    await gateway.give({"new": 1})
    gateway.world.accounting.wire_call.down("ReadServed")
    for _ in range(3):
        assert not await gateway.lifecycle.read()
    await gateway.ask(2)
    assert gateway.asked() == {"new": 2}
    assert sum("keep the known ones" in line for line in caplog.messages) == 1


async def test_the_weights_survive_a_new_configuration(gateway: Gateway) -> None:
    await gateway.give({"new": 1})
    gateway.world.services.settings = gateway.world.settings.model_copy(update={"keep_alive_s": 7.0})
    gateway.lifecycle.rebuild()
    await gateway.ask(2)
    assert gateway.asked() == {"new": 2}


async def test_a_backend_that_starts_gets_nothing_until_a_replica_runs(gateway: Gateway) -> None:
    await gateway.give(EVEN)
    gateway.world.backends.report = {"fake": UP, "new": STARTS}
    await gateway.step()
    await gateway.ask(MANY)
    assert gateway.asked() == {"fake": MANY}
    gateway.world.backends.report = {"fake": UP, "new": UP}
    await gateway.step()
    await gateway.ask(MANY)
    assert gateway.asked().keys() == {"fake", "new"}


async def test_once_a_gateway_says_that_it_is_ready_no_request_waits_for_a_backend_that_starts(
    gateway: Gateway, http: httpx.AsyncClient
) -> None:
    await gateway.give(EVEN)
    gateway.world.backends.report = {"fake": STARTS, "new": STARTS}
    await gateway.step()
    assert (await http.get("/ready")).status_code == 503
    gateway.world.backends.report = {"fake": UP, "new": STARTS}
    assert (await http.get("/ready")).status_code == 200
    await gateway.ask(MANY)
    assert gateway.asked() == {"fake": MANY}


async def test_requests_run_on_the_backend_that_is_ready_first_whichever_they_were_given_to(gateway: Gateway) -> None:
    await gateway.give(EVEN)
    gateway.world.backends.report = {"fake": STARTS, "new": STARTS}
    await gateway.step()
    gateway.backends.scripts["fake"] = [asyncio.Event()]
    calls = [Call(gateway.world, key, messages=one) for key, one in gateway.questions[:8]]
    await until(lambda: len(gateway.backends.asked) == len(calls))
    given = gateway.asked()
    assert given.keys() == {"fake", "new"}
    gateway.world.backends.report = {"fake": STARTS, "new": UP}
    await gateway.step()
    assert [(await call.done()).status for call in calls] == [200] * len(calls)
    assert gateway.asked() == {"new": given["fake"]}
    assert gateway.world.metrics.reruns == [], "no replica was lost"
    await until(lambda: gateway.world.is_idle)
    rows = gateway.world.ledger.export_usage().rows
    assert sum(row.outcome == "completed" for row in rows) == len(calls)
    assert sum(row.charged for row in rows if row.outcome != "completed") == 0


async def test_a_request_that_waits_for_a_backend_that_stops_moves_and_one_that_it_has_begun_stays(
    gateway: Gateway,
) -> None:
    await gateway.give({"fake": 1})
    gate = asyncio.Event()
    gateway.backends.scripts["fake"] = [Started(10, 0), gate, *says("Hello")[1:]]
    (key, first), (other, second) = gateway.questions[:2]
    begun = Call(gateway.world, key, messages=first)
    await until(lambda: any(record.phases.started_at for record in gateway.world.services.calls))
    gateway.backends.scripts["fake"] = [asyncio.Event()]
    waits = Call(gateway.world, other, messages=second)
    await until(lambda: len(gateway.backends.asked) == 2)
    gateway.world.backends.report = {"fake": STARTS, "new": STARTS}
    await gateway.step()
    await gateway.give(EVEN)
    await gateway.step()
    assert len(gateway.backends.asked) == 2, "no backend runs: it waits"
    gateway.world.backends.report = {"fake": STARTS, "new": UP}
    await gateway.step()
    assert (await waits.done()).status == 200
    gate.set()
    assert (await begun.done()).status == 200
    assert gateway.backends.asked == ["fake", "fake", "new"]


async def test_a_backend_that_has_scaled_to_zero_gets_requests_which_start_it(gateway: Gateway) -> None:
    await gateway.give(EVEN)
    gateway.world.backends.report = {"fake": UP, "new": {"status": "RUNNING", "replicas": 0}}
    await gateway.step()
    await gateway.ask(MANY)
    assert gateway.asked().keys() == {"fake", "new"}


async def test_a_controller_that_is_away_changes_nothing(gateway: Gateway) -> None:
    gateway.world.backends.report = None
    await gateway.step()
    assert await gateway.ask(2) == [200, 200]


async def background_has_turned() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def rolled_back(caplog: pytest.LogCaptureFixture) -> int:
    return sum("rolled back to version" in line for line in caplog.messages)


async def test_a_failing_canary_is_out_and_rolled_back_by_rule(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    await gateway.give(EVEN)
    gateway.backends.scripts["new"] = [Started(5, 0), RuntimeError("the device is gone")]
    statuses = await gateway.ask(MANY)
    assert statuses.count(500) >= 3
    await gateway.step()
    assert gateway.world.services.catalogue.availability.ejected == {("svc-chat", "new")}
    gateway.asked()
    assert await gateway.ask(MANY) == [200] * MANY
    assert gateway.asked() == {"fake": MANY}
    await until(lambda: rolled_back(caplog))
    rows = await gateway.run(ListTraffic("svc-chat"))
    assert rows[0].weights == OLD
    assert rows[0].actor == "rule"
    assert re.match(r"rule: new: \d+ failed, of \d+ requests", rows[0].reason)
    await gateway.step()
    assert gateway.world.services.catalogue.behind("svc-chat") == ("fake",)


async def test_one_account_whose_requests_fail_rolls_nothing_back(gateway: Gateway) -> None:
    await gateway.give(EVEN)
    gateway.backends.scripts["new"] = [RuntimeError("fault")]
    [(eve, _), *_] = gateway.questions
    gateway.questions = [(eve, messages) for _ in range(3) for key, messages in gateway.questions if key == eve]
    assert (await gateway.ask(len(gateway.questions))).count(500) >= 3
    await gateway.step()
    assert not gateway.world.services.catalogue.availability.ejected
    await background_has_turned()
    assert "RollBackTraffic" not in gateway.world.accounting.called


async def test_a_backend_that_got_all_traffic_and_fails_is_rolled_back(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    await gateway.give({"new": 100})
    gateway.backends.scripts["new"] = [RuntimeError("fault")]
    assert await gateway.ask(3) == [500] * 3
    await gateway.step()
    await until(lambda: rolled_back(caplog))
    await gateway.step()
    assert await gateway.ask(3) == [200] * 3


async def test_it_is_not_rolled_back_to_what_does_not_run(gateway: Gateway) -> None:
    await gateway.give({"new": 100})
    gateway.backends.scripts["new"] = [RuntimeError("fault")]
    gateway.world.backends.report = {"fake": STARTS, "new": UP}
    await gateway.step()
    await gateway.ask(5)
    await gateway.step()
    assert not gateway.world.services.catalogue.availability.ejected
    assert "RollBackTraffic" not in gateway.world.accounting.called


async def test_a_rollback_waits_for_a_ledger_that_is_away(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    await gateway.give(EVEN)
    gateway.backends.scripts["new"] = [BackendUnavailable("died")]
    await gateway.ask(MANY)
    wire = gateway.world.accounting.wire_call
    wire.down("RollBackTraffic")
    await gateway.step()
    await wire.seen("RollBackTraffic").wait()
    wire.up()
    await until(lambda: rolled_back(caplog))
    assert (await gateway.run(ListTraffic("svc-chat")))[0].actor == "rule"


async def test_several_gateways_roll_back_once(
    gateway: Gateway, make_world: Callable[..., Awaitable[World]], caplog: pytest.LogCaptureFixture
) -> None:
    await gateway.give(EVEN)
    both = [gateway, Gateway(await make_world(beside=gateway.world))]
    for one in both:
        await one.step()
        one.backends.scripts["new"] = [RuntimeError("fault")]
        await one.ask(MANY)
    # Both have read the same weights, and each judges by its own requests.
    await asyncio.gather(*(one.lifecycle.look() for one in both))
    await until(lambda: rolled_back(caplog) == 2)
    rows = await gateway.run(ListTraffic("svc-chat"))
    assert [row.actor for row in rows].count("rule") == 1


async def test_a_backend_whose_roll_out_is_long_over_is_ejected_and_keeps_its_weight(gateway: Gateway) -> None:
    await gateway.give(EVEN)
    await gateway.give({"fake": 50, "new": 49, "small": 1})  # `small` is the canary now
    gateway.backends.scripts["fake"] = [RuntimeError("fault")]
    await gateway.ask(MANY)
    await gateway.step()
    assert gateway.world.services.catalogue.availability.ejected == {("svc-chat", "fake")}
    await background_has_turned()
    assert "RollBackTraffic" not in gateway.world.accounting.called


async def test_a_backend_that_hangs_is_late_before_its_request_ends(gateway: Gateway) -> None:
    await gateway.give(EVEN)
    hangs = asyncio.Event()
    gateway.backends.scripts["new"] = [hangs]
    calls = [Call(gateway.world, key, messages=messages) for key, messages in gateway.questions]
    await until(lambda: len(gateway.backends.asked) == MANY)
    await gateway.step()
    assert not gateway.world.services.catalogue.availability.ejected
    gateway.later_s = 3600.0
    await gateway.step()
    assert gateway.world.services.catalogue.availability.ejected == {("svc-chat", "new")}
    gateway.backends.scripts["new"] = says("late")
    hangs.set()
    for call in calls:
        await call.done()


async def test_clients_that_hang_up_or_send_nonsense_eject_nothing(gateway: Gateway) -> None:
    await gateway.give(EVEN)
    gateway.backends.scripts["new"] = [Rejected(Rejection.INVALID, message="no")]
    assert 422 in await gateway.ask(MANY)
    await gateway.step()
    assert not gateway.world.services.catalogue.availability.ejected
    assert not gateway.world.services.calls, "requests that have ended are forgotten"


@pytest.mark.parametrize("rejection", [Rejection.QUEUE_FULL, Rejection.ADAPTER])
async def test_a_backend_that_can_not_serve_a_request_leaves_it_to_the_fallback(
    make_world: Callable[..., Awaitable[World]], rejection: Rejection
) -> None:
    model = {**FULL_SETTINGS["models"]["svc-chat"], "fallback": "small"}
    gateway = Gateway(await make_world(models={"svc-chat": model}))
    await gateway.step()
    gateway.backends.scripts["fake"] = [Rejected(rejection)]
    call = await Call(gateway.world).done()
    assert (call.status, call.json["system_fingerprint"]) == (200, "fp_small")
    assert gateway.asked() == {"fake": 1, "small": 1}
    assert [row.backend for row in gateway.world.ledger.export_usage().rows] == ["small"]
    gateway.backends.scripts["small"] = [Rejected(Rejection.QUEUE_FULL)]
    assert (await Call(gateway.world).done()).status == 503
    assert gateway.world.spent == gateway.world.ledger.export_usage().rows[0].charged


async def test_a_request_that_the_limiter_has_no_capacity_for_goes_to_the_fallback(
    make_world: Callable[..., Awaitable[World]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {**FULL_SETTINGS["models"]["svc-chat"], "fallback": "small"}
    gateway = Gateway(await make_world(models={"svc-chat": model}))
    await gateway.step()
    service = gateway.world.limiter.service
    admit = service.ask

    async def ask(asks: list[Any]) -> list[Any]:
        return [await answer(one) for one in asks]

    async def answer(one: Any) -> Any:
        if isinstance(one, Admit) and one.backend == "fake":
            return Refusal(one.request_id, 503, "overloaded", "no capacity", 1.0)
        [answer] = await admit([one])
        return answer

    monkeypatch.setattr(service, "ask", ask)
    call = await Call(gateway.world).done()
    assert (call.status, call.json["system_fingerprint"]) == (200, "fp_small")
    assert gateway.asked() == {"small": 1}


async def test_an_adapter_that_no_replica_has_is_422_and_its_backend_is_ejected(gateway: Gateway) -> None:
    await gateway.give(EVEN)
    gateway.backends.scripts["new"] = [Rejected(Rejection.ADAPTER)]
    assert 422 in await gateway.ask(MANY)
    await gateway.step()
    assert gateway.world.services.catalogue.availability.ejected == {("svc-chat", "new")}
    gateway.backends.scripts["fake"] = [Rejected(Rejection.ADAPTER)]
    call = await Call(gateway.world).done()
    assert (call.status, call.json["error"]["code"], call.json["error"]["param"]) == (422, "model_not_found", "model")


async def test_without_a_fallback_a_full_backend_is_503(gateway: Gateway) -> None:
    gateway.backends.scripts["fake"] = [Rejected(Rejection.QUEUE_FULL)]
    assert await gateway.ask(1) == [503]
    assert gateway.asked() == {"fake": 1}


async def test_an_identifier_of_the_ledger_is_served_with_its_defaults_and_billed_at_its_price(
    gateway: Gateway, http: httpx.AsyncClient
) -> None:
    spec = ModelSpec(4096, 256, sampling=SamplingDefaults(temperature=0.25, top_k=7))
    await gateway.run(CreateModel("svc-law", spec, {"new": 1}, Price(2000, 1000, 4000)))
    await gateway.lifecycle.read()
    messages = [{"role": "user", "content": "Hello"}]
    assert (await Call(gateway.world, model="svc-law", messages=messages).done()).status == 200
    assert (await Call(gateway.world, model="svc-law", messages=messages, temperature=1, top_k=0).done()).status == 200
    first, second = (call.sampling for call in gateway.backends.calls)
    assert (first.temperature, first.top_k, first.top_p) == (0.25, 7, 1.0)
    assert (second.temperature, second.top_k) == (1.0, 0)
    assert gateway.backends.calls[0].bill.price == Price(2000, 1000, 4000)
    http.headers["authorization"] = f"Bearer {gateway.world.key}"
    listed = (await http.get("/models/svc-law")).json()
    assert (listed["context_length"], listed["max_output_length"]) == (4096, 256)


async def test_a_price_that_is_scheduled_holds_from_its_time_on(gateway: Gateway) -> None:
    await gateway.run(SchedulePrice("svc-chat", Price(7, 7, 7), is_configured=True))
    await gateway.lifecycle.read()
    await gateway.ask(1)
    assert gateway.backends.calls[-1].bill.price == Price(7, 7, 7)


async def test_ready_needs_one_backend_of_each_identifier(gateway: Gateway, http: httpx.AsyncClient) -> None:
    await gateway.give(EVEN)
    gateway.world.backends.report = {"fake": UP}
    assert (await http.get("/ready")).json() == {"status": "ready", "backends": ["fake"]}
    gateway.world.backends.report = {"new": UP}
    answer = await http.get("/ready")
    assert answer.status_code == 503
    assert "so svc-coder can't reply" in answer.json()["error"]["message"]


async def test_backends_of_the_ledger_are_started_once_and_deleted_when_they_are_retired(gateway: Gateway) -> None:
    await gateway.run(DeployBackend("new", {"model": "bundled"}))
    gateway.world.backends.report = {"fake": UP}
    for _ in range(3):
        await gateway.step()
    await until(lambda: gateway.applications.done == [("deploy", "new")])
    gateway.world.backends.report = {"fake": UP, "new": UP}
    await gateway.run(RetireBackend("new"))
    await gateway.step()
    gateway.later_s += DRAIN_S - 1
    await gateway.step()
    await background_has_turned()
    assert len(gateway.applications.done) == 1, "other gateways may not know yet"
    gateway.later_s += 20
    await gateway.step()
    await until(lambda: gateway.applications.done[1:] == [("delete", "new")])


async def test_a_running_stream_ends_on_its_backend_although_the_traffic_moves(gateway: Gateway) -> None:
    more = asyncio.Event()
    first, *rest = says("Hel", "lo")[1:]
    gateway.backends.scripts["fake"] = [Started(10, 0, fingerprint="a"), first, more, *rest]
    call = Call(gateway.world, stream=True)
    await until(lambda: len(gateway.backends.asked) == 1)
    await gateway.give({"new": 1})
    more.set()
    await call.done()
    assert call.text == "Hello"
    assert {event["system_fingerprint"] for event in call.events} == {"fp_fake_a"}
