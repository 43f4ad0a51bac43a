"""Counts of requests reach Ray's metrics: each one, with its labels, and without a call for each."""

from __future__ import annotations

import ast
import asyncio
from collections import Counter as Counts
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

import serve_app
from deployments import metrics
from deployments.metrics import RayMetrics
from serve_app.api.errors import ERROR_TYPES
from serve_app.contracts.books import Outcome
from serve_app.contracts.metric import Metric
from serve_app.contracts.metrics import REFUSALS, SETTLEMENTS, STATUSES
from serve_app.contracts.metrics import REQUESTS as REQUESTS_OF_ALL
from serve_app.gateway.backends import Catalogue
from serve_app.settings import GatewaySettings

REQUESTS = Metric("counter", "requests", "requests", "", ("model",))
ERRORS = Metric("counter", "errors", "errors", "")
SECONDS = Metric("histogram", "seconds", "seconds", "", ("model",))
WAITING = Metric("gauge", "waiting", "requests", "")


class Remembered:
    """A metric of Ray's that remembers its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.counted: Counts[tuple[tuple[str, str], ...]] = Counts()
        self.observed: list[tuple[float, dict[str, str]]] = []

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0
        self.calls += 1
        self.counted[tuple(tags.items())] += int(value)

    info: dict[str, Any] = {"tag_keys": ("model", "replica", "route"), "default_tags": {"replica": "r"}}  # noqa: RUF012

    def _record(self, value: float, tags: dict[str, str]) -> None:
        self.observed.append((value, tags))

    def observe(self, value: float, tags: dict[str, str]) -> None:
        self.observed.append((value, tags))

    set = observe


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Remembered]:
    """Ray's metrics by name."""
    found: dict[str, Remembered] = {}

    def make(metric: Metric) -> Any:
        return found.setdefault(metric.name, Remembered())

    monkeypatch.setattr(metrics, "_make", make)
    return found


async def test_counts_are_summed_by_counter_and_labels(made: dict[str, Remembered]) -> None:
    counted = RayMetrics()
    for number in range(100):
        counted.add(REQUESTS, 2, "svc-chat" if number % 4 else "svc-coder")
        counted.add(ERRORS, 1)
    assert not made
    counted.flush_metrics()
    assert made["requests"].counted == {(("model", "svc-chat"),): 150, (("model", "svc-coder"),): 50}
    assert made["errors"].counted == {(): 100}
    assert (made["requests"].calls, made["errors"].calls) == (2, 1)
    counted.flush_metrics()
    assert (made["requests"].calls, made["errors"].calls) == (2, 1)


def histogram(made: dict[str, Remembered], name: str) -> dict[str, float]:
    """Its buckets, sum and count as they were exported last."""
    found = {tags["le"]: value for value, tags in made[f"{name}_bucket"].observed}
    return found | {suffix: made[f"{name}_{suffix}"].observed[-1][0] for suffix in ("sum", "count")}


async def test_a_histogram_counts_every_value_and_its_sum_is_exact(made: dict[str, Remembered]) -> None:
    counted = RayMetrics()
    for value in (0.005, 0.0051, 0.4, 0.4, 1000.0):
        counted.observe(SECONDS, value, "svc-chat")
    counted.flush_metrics()
    found = histogram(made, "seconds")
    assert {le: found[le] for le in ("0.005", "0.01", "0.25", "0.5", "300", "+Inf")} == {
        "0.005": 1, "0.01": 2, "0.25": 2, "0.5": 4, "300": 4, "+Inf": 5,
    }  # fmt: skip
    assert (found["sum"], found["count"]) == (pytest.approx(1000.8101), 5)
    assert {tags["model"] for _, tags in made["seconds_bucket"].observed} == {"svc-chat"}
    exports = len(made["seconds_bucket"].observed)
    counted.observe(SECONDS, 1000.0, "svc-chat")
    counted.flush_metrics()
    assert made["seconds_bucket"].observed[exports:] == [(6, {"model": "svc-chat", "le": "+Inf"})]


async def test_a_histogram_is_there_before_its_first_value(made: dict[str, Remembered]) -> None:
    counted = RayMetrics()
    counted.observe(SECONDS, 1.0, "svc-coder")
    counted.export_zeros([SECONDS], [{"model": "svc-chat"}, {"model": "svc-coder"}])
    counted.flush_metrics()
    counts = {tags["model"]: value for value, tags in made["seconds_count"].observed}
    assert counts == {"svc-chat": 0, "svc-coder": 1}


async def test_a_gauge_is_set_at_once(made: dict[str, Remembered]) -> None:
    RayMetrics().set(WAITING, 3)
    assert made["waiting"].observed == [(3, {})]


async def test_a_gauge_is_set_again_because_ray_exports_it_once(
    made: dict[str, Remembered], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "REPEAT_S", 0.01)
    counted = RayMetrics()
    counted.set(WAITING, 2)
    counted.set(WAITING, 3)
    async with asyncio.timeout(60):
        while len(made["waiting"].observed) < 5:
            await asyncio.sleep(0.001)
    assert made["waiting"].observed[:5] == [(2, {}), *[(3, {})] * 4]


async def test_it_flushes_by_itself_and_again(made: dict[str, Remembered], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "FLUSH_S", 0.01)
    counted = RayMetrics()
    for turn in (1, 2, 3):
        counted.add(REQUESTS, 1, "svc-chat")
        counted.observe(SECONDS, 0.5, "svc-chat")
        async with asyncio.timeout(60):
            while "seconds_count" not in made or made["seconds_count"].observed[-1][0] < turn:
                await asyncio.sleep(0.001)
        assert made["requests"].counted == {(("model", "svc-chat"),): turn}


async def test_what_is_counted_during_a_flush_is_not_lost(made: dict[str, Remembered]) -> None:
    counted = RayMetrics()

    class Counting(Remembered):
        def inc(self, value: float, tags: dict[str, str]) -> None:
            counted.add(ERRORS, 1)

    made["requests"] = Counting()
    counted.add(REQUESTS, 1, "svc-chat")
    counted.flush_metrics()
    counted.flush_metrics()
    assert made["errors"].counted == {(): 1}


async def test_a_label_that_is_missing_is_an_error(made: dict[str, Remembered]) -> None:
    counted = RayMetrics()
    counted.add(REQUESTS, 1)
    with pytest.raises(ValueError, match="zip"):
        counted.flush_metrics()


async def test_known_counters_are_exported_as_zero_before_their_first_event(made: dict[str, Remembered]) -> None:
    known = Metric("counter", "known", "events", "", ("model", "end"), known={"end": ("a", "b")})
    counted = RayMetrics()
    counted.export_zeros([known, SECONDS, WAITING], [{"model": "svc-chat"}, {"model": "svc-coder"}])
    assert [tags for value, tags in made["known"].observed if value == 0] == [
        {"route": "", "model": model, "end": end} for model in ("svc-chat", "svc-coder") for end in ("a", "b")
    ]
    assert "waiting" not in made
    counted.export_zeros([REQUESTS], [{"model": "svc-chat", "backend": "of another counter"}])
    assert made["requests"].observed == [(0, {"route": "", "model": "svc-chat"})]
    counted.export_zeros([ERRORS])
    assert len(made["errors"].observed) == 1


async def test_ray_exports_a_zero_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its public `inc` refuses 0."""
    recorded: list[tuple[float, dict[str, str]]] = []
    counter = metrics._make(SETTLEMENTS)
    monkeypatch.setattr(counter, "_metric", SimpleNamespace(record=lambda value, tags: recorded.append((value, tags))))
    counted = RayMetrics()
    counted._made[SETTLEMENTS] = counter
    counted.export_zeros([SETTLEMENTS])
    assert recorded == [(0, {"outcome": outcome}) for outcome in SETTLEMENTS.known["outcome"]]
    with pytest.raises(ValueError, match="0"):
        counter.inc(0, {"outcome": "completed"})


def test_every_code_of_a_refusal_and_every_outcome_is_known_from_the_start() -> None:
    assert {outcome.value for outcome in Outcome} < set(SETTLEMENTS.known["outcome"])
    root = Path(serve_app.__file__).parent
    codes: set[str] = {"requests", "tokens", "concurrency"}  # of limits, which name their refusals
    for path in [root / "api" / "errors.py", *(root / "limiter").glob("*.py"), *(root / "gateway").glob("*.py")]:
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(getattr(call, "func", None), "id", "")
            if isinstance(call, ast.Call) and name in ("ApiError", "Refusal") and len(call.args) > 2:
                code = call.args[2]
                codes |= {code.value} if isinstance(code, ast.Constant) else set()
    # Of other routes; and the limiter's word for what becomes an overloaded_error.
    assert codes - {"not_found", "method_not_allowed", "overloaded"} <= set(REFUSALS.known["reason"])
    # What only a chat request gets.
    assert {str(status) for status in ERROR_TYPES} - {"404", "405"} | {"200", "499"} == set(STATUSES)


async def test_a_gateway_exports_all_counters_of_what_it_serves_and_0_as_weight_of_what_is_gone() -> None:
    from deployments.gateway import Gateway

    price = {"input": "0.27", "cached_input": "0.07", "output": "1.10"}
    settings = [
        GatewaySettings.model_validate({"models": {"svc-chat": {"backends": backends, "price": price}}})
        for backends in ({"old": 100}, {"new": 30, "app:law": 10})
    ]
    gateway = MagicMock()
    gateway._shares = {}
    for one in settings:
        Gateway.func_or_class._export_catalogue(gateway, Catalogue(one))
    declared, served = gateway._metrics.export_zeros.call_args.args
    assert ("svc-chat", "app:law", "503") in REQUESTS_OF_ALL.rows(served)
    assert ("none", "none", "401") in REQUESTS_OF_ALL.rows(served)
    assert REQUESTS_OF_ALL in declared
    weights = {call.args[3]: call.args[1] for call in gateway._metrics.set.call_args_list}
    assert weights == {"old": 0.0, "new": 0.75, "app:law": 0.25}
