"""The days of bench.autoscaling: drawn as published, policies as Ray and Kubernetes define them, a place in docs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest

from bench.autoscaling import report, tune
from bench.autoscaling.baselines import KedaPolicy, KedaTuning, ServePolicy, ServeTuning
from bench.autoscaling.days import Job, meets, simulate
from bench.autoscaling.foresight import Foresight, ForesightTuning
from bench.autoscaling.traffic import DAY_S, SHAPES, arrivals, hours
from bench.harness import document
from bench.simulation.cluster import Arrival, Fleet
from bench.simulation.replica import Device
from serve_app.scaling.scaling_settings import ScalingSettings
from serve_app.scaling.signals import ReplicaLoad, Signals

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks.md"


def test_the_document_has_a_place_for_the_figures() -> None:
    document.check(DOCS.read_text(), report.BEGIN, report.END)


@pytest.mark.parametrize(
    ("name", "prompt", "output", "minutes"), [("conversation", 1155, 211, 0.25), ("code", 2048, 28, 1.03)]
)
def test_lengths_and_minutes_are_those_of_the_published_traces(
    name: str, prompt: float, output: float, minutes: float
) -> None:
    requests = list(arrivals(SHAPES[name], 3))
    assert fmean(one.prompt for one in requests) == pytest.approx(prompt, rel=0.06)
    assert fmean(one.output for one in requests) == pytest.approx(output, rel=0.2)
    assert len(requests) / DAY_S == pytest.approx(SHAPES[name].mean_per_s, rel=0.1)
    counts = Counter(int(one.at // 60) for one in requests if 14 * 3600 <= one.at < 16 * 3600)
    values = [counts[minute] for minute in range(14 * 60, 16 * 60)]
    assert pstdev(values) / fmean(values) == pytest.approx(minutes, rel=0.45)


def test_hours_have_the_published_peak_and_mean() -> None:
    for shape in SHAPES.values():
        rates = [hours(shape, at) for at in range(0, int(DAY_S), 600)]
        assert fmean(rates) == pytest.approx(1.0, abs=0.01)
        assert max(rates) == pytest.approx(shape.peak, rel=0.01)
        assert min(rates) == pytest.approx(shape.quietest, rel=0.01)


def signals(now: float, replicas: int, running: float, waiting: float = 0.0, target: int | None = None) -> Signals:
    load = ReplicaLoad(slots=16, running=running, waiting=waiting)
    return Signals(now, (load,) * replicas, replicas if target is None else target, 0.0, 1, 8)


def test_serves_policy_divides_the_mean_of_the_look_back_by_the_target_after_its_delay() -> None:
    policy = ServePolicy(ServeTuning(4.0, 30.0, 60.0, 10.0), 1, 8)
    assert [policy.wanted(signals(float(at), 1, 12)) for at in range(0, 30, 2)] == [1] * 15
    assert policy.wanted(signals(30.0, 1, 12)) == 3
    down = [policy.wanted(signals(float(at), 3, 1, target=3)) for at in range(32, 120, 2)]
    assert set(down) == {3, 1}
    assert down.index(1) >= 30


def test_kedas_rule_doubles_at_most_and_keeps_the_highest_wish_of_its_window() -> None:
    policy = KedaPolicy(KedaTuning(5.0, True, stabilization_s=60.0))
    assert policy.wanted(signals(0.0, 1, 16, 24)) == 5
    assert policy.wanted(signals(5.0, 1, 0, target=5)) == 5  # between two syncs
    assert policy.wanted(signals(15.0, 5, 0)) == 5
    assert policy.wanted(signals(80.0, 5, 0)) == 1


def test_foresight_starts_a_replica_before_its_load_and_ends_it_with_the_load() -> None:
    device = Device(slots=1, prefill_per_s=1e9, step_s=1.0, row_s=0.0)
    busy = [Arrival(300.0 + at, "a", 0, 1) for at in range(0, 100, 10) for _ in range(25)]  # 2.5 replicas for 100 s
    policy = Foresight(ForesightTuning(10.0, 1.0), Fleet(device=device, start_s=90.0), busy, 1000.0)
    target, seen = 0, []
    for now in range(0, 600, 10):
        target = policy.wanted(Signals(float(now), (), target, 0.0, 0, 8))
        seen.append(target)
    assert seen.index(3) * 10 == 300 - 110  # a start takes up to 108 s
    assert [at * 10 for at, wanted in enumerate(seen) if wanted == 3][-1] == 390


def test_the_cheapest_settings_that_are_good_enough_are_chosen() -> None:
    def day(cost: float, refused: float) -> dict[str, Any]:
        return {"shape": "conversation", "cost": cost, "refused": refused, "first_p95_s": 1.0}

    one, two, three = (ServeTuning(float(target)) for target in (1, 2, 3))
    assert tune.best([(one, day(30, 0.001)), (two, day(20, 0.009)), (three, day(10, 0.02))]) == two
    assert tune.best([(one, day(30, 0.03)), (two, day(20, 0.02))]) == two


def test_a_part_of_a_day_is_simulated_and_makes_a_report() -> None:
    records = []
    for policy, tuning in (("rule", ScalingSettings()), ("serve", ServeTuning(8.0, 0.0))):
        figures = simulate(Job("bursts", tuning, 5, tuning_day=True, hours=(8.0, 8.5)))
        assert figures["requests"] > 500
        assert isinstance(meets(figures), bool)
        records.append(figures | {"policy": policy})
    fleet = {"least": 1, "most": 10, "start_s": 90.0, "price": 10.0}
    text = report.markdown({"records": records, "fleet": fleet})
    assert "bursts (BurstGPT)" in text
    assert "target 8" in text
