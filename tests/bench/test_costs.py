"""A part that is switched off costs nothing while it is off, and the table has the ratio within each pair."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.gateway import costs
from bench.gateway.without import sitecustomize
from bench.gateway.without.sitecustomize import COSTS, SWITCH
from tests.bench.test_gateway_report import record
from tests.bench.test_without import pairs


class Observer:
    def __init__(self) -> None:
        self.seen: list[str] = []
        self._sinks = [lambda record: self.seen.append("sink")]

    def ended(self, record: object) -> None:
        self._count(record)
        for sink in self._sinks:
            sink(record)

    def _count(self, record: object) -> None:
        self.seen.append("metrics")

    def gap(self, record: object, seconds: float) -> None:
        self.seen.append("gap")

    def first_token(self, record: object, seconds: float) -> None:
        self.seen.append("first")


@pytest.mark.parametrize(
    ("cost", "left"),
    [("observation", []), ("request-metrics", ["sink"]), ("request-sinks", ["metrics", "gap", "first"])],
)
def test_a_part_is_off_while_the_switch_is_there(
    cost: str, left: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch = tmp_path / "off"
    monkeypatch.setenv(SWITCH, str(switch))
    patched = type("Patched", (Observer,), {})
    COSTS[cost].remove(SimpleNamespace(Observer=patched, log_line=None))

    def seen() -> list[str]:
        monkeypatch.setitem(sitecustomize._switch, "looked", 0.0)
        observer = patched()
        observer.ended(None)
        observer.gap(None, 0.1)
        observer.first_token(None, 0.1)
        return list(observer.seen)

    assert seen() == ["metrics", "sink", "gap", "first"]
    switch.touch()
    assert seen() == left
    switch.unlink()
    assert seen() == ["metrics", "sink", "gap", "first"]


def results(*ratios: float) -> Any:
    records = [
        record(f"{kind}-observation", 16, number, rate)
        for number, ratio in enumerate(ratios)
        for kind, rate in (("with", 100.0 * ratio), ("without", 100.0))
    ]
    return {**pairs(at16=(1.0, 1.0)), "costs": ["observation"], "records": records}


def test_the_table_has_the_mean_of_the_pairs_with_its_standard_error() -> None:
    text = costs.markdown(results(0.98, 0.96, 0.94, 0.96))
    assert "| `observation` |" in text
    assert "| 0.960 ± 0.009 |" in text


def test_a_few_pairs_have_no_error() -> None:
    assert "±" not in costs.markdown(results(0.98, 0.96)).rpartition("standard error |")[2]
