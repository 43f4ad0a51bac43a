"""The simulated day: its figures have a place in the docs, and the same seed gives the same ones."""

from __future__ import annotations

from pathlib import Path

from bench.harness import document
from bench.pressure import day, report
from bench.pressure.clients import Shape
from bench.pressure.overload import capacity
from bench.pressure.record import jain
from bench.pressure.world import Scaling
from bench.simulation.replica import Device

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks.md"


def test_the_document_has_a_place_for_the_figures() -> None:
    document.check(DOCS.read_text(), report.BEGIN, report.END)


def test_a_day_is_the_same_for_the_same_seed_and_its_figures_make_a_report() -> None:
    first, second = (day.simulate(3, 50, 0.25, Scaling(least=1, most=2)) for _ in range(2))
    assert first == second
    run = {"goodput": 0.95, "worst_share": 0.12, "late": 0, "longest_wait_s": 20.0, "admitted": 100}
    results = {"seed": 3, "weights": [50], "overload": [run], "day": first}
    results["scaling"] = {"least": 1, "most": 2, "start_s": 90.0}
    assert [kept for _, _, _, kept in report.promises(results)] == [True, False, True]
    assert "| **no** |" in report.markdown(results)


def test_a_replica_does_what_its_device_can() -> None:
    device, shape = Device(), Shape()
    found = capacity(device, shape)
    # Between what the batch decodes while prompts take their share of the time, and all prompts at once for free.
    decoded = device.slots / (device.step_s + device.row_s * device.slots)
    assert decoded < found < decoded * (1 + shape.prompt / shape.output * 1.5)
    twice = capacity(Device(prefill_per_s=2 * device.prefill_per_s, step_s=0.01, row_s=0.00025), shape)
    assert abs(twice / found - 2.0) < 0.02


def test_jains_index_is_one_for_equals_and_a_share_for_one_who_takes_all() -> None:
    assert jain([3.0, 3.0, 3.0]) == 1.0
    assert jain([1.0, 0.0, 0.0, 0.0]) == 0.25
