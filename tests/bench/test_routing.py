"""The comparison of routers counts what the service logged, and a broken promise shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.routing import report
from bench.routing.figures import Sent, Waits, summary
from bench.routing.service import ROUTERS, Routed
from bench.routing.traffic import TURNS, script
from deployments import strict_config

MACHINE = {"cores": 2, "cpu": "a processor", "family": "family 1"}
PLAN = {"clients": 8, "accounts": 4, "conversations": 2, "think_s": 4.0, "kv_cache": "320MiB", "seed": 1}


def record(router: str, cached: float, p95_s: float, flood_s: float = 0.3) -> dict[str, Any]:
    sent = [Sent("a", f"r{number % 2}", 1000, round(1000 * cached), p95_s) for number in range(20)]
    return {"router": router, "turn": 0, **summary(sent, Waits((0.2,), (flood_s,)), 2)}


def results(*records: dict[str, Any]) -> dict[str, Any]:
    return {"routers": ROUTERS, "plan": PLAN, "records": list(records), "machine": MACHINE}


def test_figures_are_of_all_requests_and_of_the_busier_replica() -> None:
    sent = [Sent("a", "one", 1000, 900, 0.1), Sent("a", "one", 2000, 900, 0.3), Sent("b", "two", 1000, 0, 0.2)]
    found = summary(sent, Waits((0.1, 0.2, 0.3), (0.5, 0.4, 0.3)), 2)
    assert found["cached_share"] == 0.45
    assert (found["ttft_p50_s"], found["ttft_p95_s"]) == (0.2, 0.3)
    assert found["most_requests"] == pytest.approx(4 / 3)
    assert found["most_computed"] == pytest.approx(1200 * 2 / 2200)
    assert found["fairness"] == pytest.approx(2.0)


def test_without_requests_there_are_figures() -> None:
    assert summary([], Waits((1.0,), (1.0,)), 2)["cached_share"] == 0.0


@pytest.mark.parametrize(
    ("ours", "kept"),
    [
        (record("conversation", 0.8, 1.0), [True, True, True]),
        (record("conversation", 0.7, 1.0), [False, True, True]),
        (record("conversation", 0.8, 1.1), [True, False, True]),
        (record("conversation", 0.8, 1.0, 0.5), [True, True, False]),
    ],
    ids=["all kept", "cached share", "first token", "fairness"],
)
def test_a_promise_that_is_broken_shows(ours: dict[str, Any], kept: list[bool]) -> None:
    found = results(record("balanced", 0.5, 1.0), ours)
    assert [verdict.kept for verdict in report.verdicts(found)] == kept
    assert report.markdown(found).count("**no**") == kept.count(False)


def test_what_was_not_measured_is_neither_kept_nor_broken() -> None:
    found = results(record("balanced", 0.5, 1.0))
    assert [verdict.kept for verdict in report.verdicts(found)] == [None, None, None]


def test_a_script_is_the_same_for_each_router() -> None:
    assert script(1, 2, 3, 4.0) == script(1, 2, 3, 4.0)
    assert script(1, 2, 3, 4.0) != script(1, 3, 3, 4.0)
    assert all(TURNS[0] <= len(one) <= TURNS[1] for one in script(1, 2, 50, 4.0).conversations)


@pytest.mark.parametrize("router", ROUTERS)
def test_the_configurations_are_valid(tmp_path: Path, router: str) -> None:
    assert strict_config.find_problems(Routed(tmp_path, router, "320MiB").config()) == []


def test_the_documents_place_is_there() -> None:
    assert report.BEGIN in Path("docs/benchmarks.md").read_text()
