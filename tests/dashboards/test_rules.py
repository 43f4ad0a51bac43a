"""Prometheus' rules: each alert fires on its condition, for the service in trouble alone, and on nothing healthy."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards import rules
from dashboards.exported import SERIES
from dashboards.expressions import names
from dashboards.rules.serving import CERTIFICATE_EXPIRES
from serve_app.contracts import metrics
from serve_app.contracts.metric import Metric

ROOT = Path(__file__).parents[2]
CASES = sorted((Path(__file__).parent / "rule_tests").glob("*.yaml"))
NAMES = [path.stem for path in CASES]
HEALTHY, DAYS = "healthy.yaml", "slo_days.yaml"

Document = dict[str, Any]


def promtool(*arguments: str | Path) -> None:
    """Raises AssertionError with what promtool says."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is missing: it is in Debian's package `prometheus`")
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@cache
def cases_of(path: Path) -> list[Document]:
    found: list[Document] = yaml.safe_load(path.read_text(encoding="utf-8"))["tests"]
    return found


def labels_of(sample: str) -> dict[str, str]:
    return dict(re.findall(r'(\w+)="([^"]*)"', sample))


def fired() -> Iterator[tuple[Document, dict[str, str]]]:
    """Each alert that a case expects to fire: the test, and the alert's labels."""
    for path in CASES:
        for test in cases_of(path):
            for expected in test["promql_expr_test"]:
                for sample in expected["exp_samples"]:
                    labels = labels_of(sample["labels"])
                    if sample["labels"].startswith("ALERTS{") and labels["alertstate"] == "firing":
                        yield test, labels


def variant(name: str, labels: dict[str, str]) -> tuple[str, ...]:
    """Several alerts may have one name: what tells them apart."""
    return (name, labels["severity"], labels.get("long", ""))


def test_prometheus_accepts_the_rules() -> None:
    promtool("check", "rules", ROOT / "serve_app/boards/rules.yaml")


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=pytest.mark.slow if path.name == DAYS else ()) for path in CASES], ids=NAMES
)
def test_alerts_fire_when_they_should(path: Path) -> None:
    promtool("test", "rules", path)


def test_every_alert_has_a_case_in_which_it_fires() -> None:
    declared = {variant(alert.name, {"severity": alert.severity, **alert.labels}) for alert in rules.ALERTS}
    assert {variant(labels["alertname"], labels) for _, labels in fired()} == declared


def test_the_healthy_case_has_every_metric_that_a_rule_reads() -> None:
    given = {
        one["series"].partition("{")[0]
        for test in cases_of(Path(__file__).parent / "rule_tests" / HEALTHY)
        for one in test["input_series"]
    }
    recorded = {recording.name for recording in rules.RECORDINGS}
    read = {name for group in rules.GROUPS for rule in group.rules for name in names(rule.expr)}
    assert read - recorded <= given


@pytest.mark.parametrize("name", sorted({alert.name for alert in rules.ALERTS}))
def test_one_service_in_trouble_is_not_hidden_by_another_that_is_well(name: str) -> None:
    cases = [(test, labels) for test, labels in fired() if labels["alertname"] == name and "cluster" in labels]
    assert {labels["cluster"] for _, labels in cases} == {"north"}
    assert any('cluster="south"' in one["series"] for test, _ in cases for one in test["input_series"])


def test_rules_read_what_somebody_exports() -> None:
    recorded = {recording.name for recording in rules.RECORDINGS}
    known = {*SERIES, CERTIFICATE_EXPIRES, *recorded}
    assert {name for group in rules.GROUPS for rule in group.rules for name in names(rule.expr)} <= known


def test_every_recording_is_read_by_a_rule() -> None:
    read = {name for group in rules.GROUPS for rule in group.rules for name in names(rule.expr)}
    assert {recording.name for recording in rules.RECORDINGS} <= read


def test_texts_name_only_labels_that_the_alert_has() -> None:
    labels = {labels["alertname"]: set(labels) for _, labels in fired() if "cluster" in labels}
    for alert in rules.ALERTS:
        named = set(re.findall(r"\$labels\.(\w+)", alert.summary + alert.description))
        assert named <= labels[alert.name], alert.name


@pytest.mark.parametrize(
    "metric",
    [
        metrics.UNCOLLECTED,
        metrics.STUCK,
        metrics.BOOKS_DIFFERENCES,
        metrics.SPOOL_SETTLEMENTS,
        metrics.SPOOL_BYTES,
        metrics.SPOOL_AGE,
        metrics.LIMITER_EPOCH,
        metrics.FEED_AGE_SECONDS,
        metrics.EXPIRED_HOLDS,
    ],
    ids=lambda metric: metric.name,
)
def test_money_at_risk_and_a_limiter_in_trouble_raise_an_alert(metric: Metric) -> None:
    assert metric.exported in {name for alert in rules.ALERTS for name in names(alert.expr)}


@pytest.mark.parametrize("path", rules.files(), ids=str)
def test_the_files_are_what_the_code_makes(path: Path) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == rules.files()[path], "run `python -m dashboards`"
