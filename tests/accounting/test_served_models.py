"""Backends, identifiers and prices that commands add beside the configuration."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, get_args, get_type_hints

import pytest
from annotated_types import Ge, Gt, Le

from serve_app.api.chat_request import ChatRequest
from serve_app.api.field_checks import Range
from serve_app.contracts.books import Audit
from serve_app.contracts.errors import BackendNotFound, Conflict, InvalidValue, ModelNotFound
from serve_app.contracts.money import Price, price_at
from serve_app.contracts.served import ModelSpec, SamplingDefaults, Served
from serve_app.contracts.served_commands import (
    CreateModel,
    DeployBackend,
    ListPrices,
    ReadServed,
    RemoveModel,
    RetireBackend,
    SchedulePrice,
    SetTraffic,
    UpdateModel,
)

from .books import NOON, Books, Clock, Ledger

ADA = Audit("ada")
SPEC = ModelSpec(
    context_length=8192,
    max_output=1024,
    recommended_temperatures={"conversation": 0.7},
    sampling=SamplingDefaults(temperature=0.6, top_k=40),
    fallback="small",
)
CREATE = CreateModel("team-chat", SPEC, {"new": 100}, Price(3, 1, 5), ADA)
HOUR = 3600.0


def read(ledger: Ledger) -> Served:
    served = ledger.run(ReadServed())
    assert served is not None
    return served


def test_a_backend_keeps_its_args_and_options(ledger: Ledger) -> None:
    args, options = {"model": "bundled", "num_threads": 2}, {"num_replicas": 2}
    ledger.run(DeployBackend("new", args, options, ADA))
    backend = read(ledger).backends["new"]
    assert (backend.args, backend.options, backend.retired_at) == (args, options, None)
    [record] = ledger.audit_log()
    assert (record.action, record.subject, record.detail) == (
        "deploy_backend",
        "new",
        {"args": args, "options": options},
    )


def test_a_name_stands_for_one_content_for_good(ledger: Ledger) -> None:
    first = ledger.run(DeployBackend("new", {"model": "bundled"}, audit=ADA))
    assert ledger.run(DeployBackend("new", {"model": "bundled"}, audit=ADA)) == first
    for args, options in (({"model": "other"}, {}), ({"model": "bundled"}, {"num_replicas": 2})):
        with pytest.raises(Conflict, match="deploy under a new name and shift the traffic"):
            ledger.run(DeployBackend("new", args, options))
    ledger.run(RetireBackend("new", ADA))
    with pytest.raises(Conflict, match="new name"):
        ledger.run(DeployBackend("new", {"model": "other"}))
    assert ledger.run(DeployBackend("new", {"model": "bundled"}, audit=ADA)).retired_at is None
    assert [one.action for one in ledger.audit_log()] == ["deploy_backend", "retire_backend", "deploy_backend"]


def test_gateways_hear_of_a_retired_backend_until_it_is_long_gone(timed: Books, clock: Clock) -> None:
    ledger = timed.ledger
    ledger.run(DeployBackend("new", {}))
    retired = ledger.run(RetireBackend("new"))
    assert ledger.run(RetireBackend("new")) == retired
    assert read(ledger).backends["new"].retired_at == NOON
    clock.now += 31 * 24 * HOUR
    assert read(ledger).backends == {}


def test_a_backend_that_serves_an_identifier_is_not_retired(ledger: Ledger) -> None:
    for name in ("new", "small"):
        ledger.run(DeployBackend(name, {}))
    ledger.run(CREATE)
    for name in ("new", "small"):
        with pytest.raises(Conflict, match=f"{name} still serves team-chat"):
            ledger.run(RetireBackend(name))
    ledger.run(RemoveModel("team-chat"))
    for name in ("new", "small"):
        ledger.run(RetireBackend(name))
    with pytest.raises(BackendNotFound):
        ledger.run(RetireBackend("smollm2"))


def test_a_backend_that_makes_no_sense_is_refused(ledger: Ledger) -> None:
    for command, problem in (
        (DeployBackend("a b", {}), "a backend's name"),
        (DeployBackend("app:adapter", {}), "a backend's name"),
        (DeployBackend("new", {}, {"name": "x"}), "no field 'name'"),
        (DeployBackend("new", {"x": float("nan")}), "args: must be a JSON object"),
        (DeployBackend("new", {"x": 2**64}), "args: must be a JSON object"),
        (DeployBackend("new", {"x": "y" * 40_000}), "at most"),
    ):
        with pytest.raises(InvalidValue, match=problem):
            ledger.run(command)


def test_a_created_identifier_has_limits_weights_and_a_price(timed: Books) -> None:
    model = timed.ledger.run(CREATE)
    served = read(timed.ledger)
    assert served.models == {"team-chat": model}
    assert (model.spec, model.created_at) == (SPEC, NOON)
    assert (served.traffic["team-chat"].weights, served.traffic["team-chat"].actor) == ({"new": 100}, "ada")
    assert price_at(served.prices["team-chat"], NOON) == Price(3, 1, 5)
    assert timed.ledger.run(CREATE) == model
    with pytest.raises(Conflict, match="already exists"):
        timed.ledger.run(replace(CREATE, weights={"other": 1}))


def test_an_update_replaces_the_limits(ledger: Ledger) -> None:
    ledger.run(CREATE)
    wanted = replace(SPEC, max_output=2048, fallback=None)
    updated = ledger.run(UpdateModel("team-chat", wanted, ADA))
    assert read(ledger).models["team-chat"] == updated
    assert ledger.run(UpdateModel("team-chat", wanted, ADA)) == updated
    records = ledger.audit_log()
    assert [one.action for one in records] == ["update_model", "create_model"]
    assert records[0].detail == {
        "max_output": {"was": 1024, "is": 2048},
        "fallback": {"was": "small", "is": None},
    }
    with pytest.raises(ModelNotFound):
        ledger.run(UpdateModel("svc-chat", wanted))


def test_nothing_of_a_removed_identifier_holds_for_a_later_one_of_its_name(timed: Books, clock: Clock) -> None:
    ledger = timed.ledger
    ledger.run(CREATE)
    ledger.run(SchedulePrice("team-chat", Price(9, 9, 9), NOON + HOUR))
    ledger.run(RemoveModel("team-chat", ADA))
    ledger.run(RemoveModel("team-chat", ADA))
    served = read(ledger)
    assert (served.models, served.traffic, served.prices) == ({}, {}, {})
    with pytest.raises(ModelNotFound):
        ledger.run(SetTraffic("team-chat", {"new": 1}))
    ledger.run(replace(CREATE, price=Price(4, 1, 5)))
    clock.now += 2 * HOUR
    served = read(ledger)
    assert price_at(served.prices["team-chat"], clock.now) == Price(4, 1, 5)
    assert served.before == {}
    assert [one.action for one in ledger.audit_log()].count("remove_model") == 1


NO_MODELS: list[tuple[dict[str, Any], str]] = [
    ({"identifier": "a/b"}, "an identifier has"),
    ({"weights": {}}, "a weight above 0"),
    ({"price": Price(-1, 0, 0)}, "nano-units per token"),
    ({"spec": replace(SPEC, context_length=0)}, "context_length"),
    ({"spec": replace(SPEC, max_output=8192)}, "below context_length"),
    ({"spec": replace(SPEC, sampling=SamplingDefaults(temperature=2.1))}, "sampling.temperature"),
    ({"spec": replace(SPEC, recommended_temperatures={"x": 3})}, "recommended_temperatures.x"),
]


def test_an_identifier_that_makes_no_sense_is_refused(ledger: Ledger) -> None:
    for change, problem in NO_MODELS:
        with pytest.raises(InvalidValue, match=problem):
            ledger.run(replace(CREATE, **change))
    assert read(ledger) == Served(0)


def test_sampling_defaults_have_the_ranges_of_a_request() -> None:
    hints = get_type_hints(SamplingDefaults, include_extras=True)
    for one in fields(SamplingDefaults):
        bounds = get_args(hints[one.name])[0].__metadata__
        [low] = [bound for bound in bounds if isinstance(bound, Ge | Gt)]
        [high] = [bound.le for bound in bounds if isinstance(bound, Le)]
        [asked] = [kind for kind in ChatRequest.model_fields[one.name].metadata if isinstance(kind, Range)]
        lowest = low.gt if isinstance(low, Gt) else low.ge
        assert (max(asked.low, 0 if one.name == "top_k" else asked.low), asked.high) == (lowest, high)
        assert asked.above == isinstance(low, Gt)


def test_a_scheduled_price_takes_effect_at_its_time(timed: Books, clock: Clock) -> None:
    ledger, configured = timed.ledger, Price(270, 70, 1100)
    schedule = SchedulePrice("svc-chat", Price(300, 80, 1200), NOON + HOUR, is_configured=True, audit=ADA)
    row = ledger.run(schedule)
    prices = read(ledger).prices["svc-chat"]
    assert price_at(prices, NOON + HOUR - 1, configured) == configured
    assert price_at(prices, NOON + HOUR, configured) == schedule.price
    clock.now += 2 * HOUR
    assert ledger.run(schedule) == row  # a repetition, though its time has passed
    assert len(ledger.audit_log()) == 1
    with pytest.raises(InvalidValue, match="has passed"):
        ledger.run(replace(schedule, price=Price(1, 1, 1)))


def test_of_two_prices_for_one_time_the_later_one_holds(timed: Books) -> None:
    for price in (Price(1, 1, 1), Price(2, 2, 2)):
        timed.ledger.run(SchedulePrice("svc-chat", price, NOON + HOUR, is_configured=True))
    assert price_at(read(timed.ledger).prices["svc-chat"], NOON + HOUR) == Price(2, 2, 2)
    assert [one.price.input for one in timed.ledger.run(ListPrices("svc-chat"))] == [2, 1]


def test_gateways_hear_of_the_price_in_effect_and_of_those_to_come(timed: Books, clock: Clock) -> None:
    for day in (1, 2, 3):
        price = Price(day, day, day)
        timed.ledger.run(SchedulePrice("svc-chat", price, NOON + day * 24 * HOUR, is_configured=True))
    clock.now += 2 * 24 * HOUR
    assert [one.price.input for one in read(timed.ledger).prices["svc-chat"]] == [1, 2, 3]  # clocks may differ
    clock.now += 24 * HOUR
    assert [one.price.input for one in read(timed.ledger).prices["svc-chat"]] == [2, 3]
    assert len(timed.ledger.run(ListPrices("svc-chat"))) == 3


def test_a_price_from_now_on_is_set_once(timed: Books, clock: Clock) -> None:
    now = SchedulePrice("svc-chat", Price(1, 1, 1), is_configured=True)
    first = timed.ledger.run(now)
    clock.now += 5
    assert timed.ledger.run(now) == first
    with pytest.raises(ModelNotFound):
        timed.ledger.run(SchedulePrice("svc-none", Price(1, 1, 1)))


def test_an_alias_belongs_to_one_identifier(ledger: Ledger) -> None:
    made = ledger.run(replace(CREATE, spec=replace(SPEC, aliases=("gpt-4o", "claude-*"))))
    assert read(ledger).models["team-chat"].spec.aliases == made.spec.aliases == ("gpt-4o", "claude-*")
    other = replace(CREATE, identifier="other", spec=SPEC)
    for aliases, told in (
        (("gpt-4o",), "already an alias of"),
        (("team-chat",), "is an identifier"),
        (("a b",), "an alias begins with a letter or digit"),
    ):
        with pytest.raises(InvalidValue, match=told):
            ledger.run(replace(other, spec=replace(SPEC, aliases=aliases)))
    with pytest.raises(InvalidValue, match="gpt-4o is an identifier"):
        ledger.run(replace(other, identifier="gpt-4o"))
    ledger.run(other)
    with pytest.raises(InvalidValue, match="already an alias of"):
        ledger.run(UpdateModel("other", replace(SPEC, aliases=("claude-*",))))
    ledger.run(UpdateModel("team-chat", SPEC))
    ledger.run(UpdateModel("other", replace(SPEC, aliases=("claude-*",))))
    ledger.run(RemoveModel("other"))
    ledger.run(UpdateModel("team-chat", replace(SPEC, aliases=("claude-*",))))
