"""What becomes of Prometheus's alerting rules in Grafana, and how differences of documents are named."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.cli.grafana.differences import differences
from serve_app.cli.grafana.rules import grafana_rules, intervals, is_ours
from serve_app.cli.grafana.shipped import seconds

from .shipped_files import RULES

STUCK = grafana_rules(RULES["groups"], "prom-1")[0]


def test_an_alert_fires_for_every_series_that_its_expression_returns_even_for_zero() -> None:
    query, returned, fires = STUCK["data"]
    assert query["datasourceUid"] == "prom-1"
    assert query["model"]["expr"] == "max by (cluster) (ray_serve_app_stuck_settlements) == 0"
    assert (query["model"]["instant"], query["model"]["range"]) == (True, False)
    assert returned["model"]["expression"] == "is_number($query) || is_nan($query) || is_inf($query)"
    assert fires["model"]["conditions"] == [{"evaluator": {"type": "gt", "params": [0]}}]
    assert (STUCK["condition"], STUCK["noDataState"], STUCK["for"]) == ("fires", "OK", "60m")


def test_value_in_a_template_is_the_querys_number() -> None:
    assert STUCK["annotations"] == {
        "summary": "{{ $values.query.Value | humanize }} are stuck",
        "action": "Costs $value each",
    }


def test_recordings_stay_in_prometheus() -> None:
    titles = [rule["title"] for rule in grafana_rules(RULES["groups"], "p")]
    assert titles == ["Stuck", "Spool (page)", "Spool (warn)", "Slow"]
    assert intervals(RULES["groups"]) == {"money": 30, "users/speed": 60}


def test_every_rule_is_marked_as_ours() -> None:
    rules = grafana_rules(RULES["groups"], "p")
    assert all(is_ours(rule) for rule in rules)
    assert len({rule["uid"] for rule in rules}) == len(rules)
    assert max(len(rule["uid"]) for rule in rules) <= 40
    assert not is_ours(rules[0] | {"uid": "by-hand"})
    assert not is_ours(rules[0] | {"labels": {}})


def test_alerts_of_one_name_have_titles_of_their_own() -> None:
    same = {"alert": "A", "expr": "up", "labels": {"severity": "page", "long": "1h"}}
    rules = [same, same | {"labels": {}}, same, same | {"labels": {"severity": "warn"}}]
    made = grafana_rules([{"name": "g", "rules": rules}], "p")
    assert [rule["title"] for rule in made] == ["A (page, 1h)", "A", "A (page, 1h) #2", "A (warn)"]


@pytest.mark.parametrize(("interval", "accepted"), [("1s", 10), ("15s", 20), ("30s", 30), ("2m", 120)])
def test_an_interval_is_a_multiple_of_ten_seconds(interval: str, accepted: int) -> None:
    group = {"name": "g", "interval": interval, "rules": [{"alert": "A", "expr": "up"}]}
    assert intervals([group]) == {"g": accepted}


def test_durations_are_read_as_prometheus_reads_them() -> None:
    assert [seconds(text) for text in ("0s", "90s", "1m30s", "1h", "60m", "1d", "500ms")] == [
        0, 90, 90, 3600, 3600, 86400, 0.5,
    ]  # fmt: skip
    for wrong in ("", "1", "1.5h", "soon", "1h 30m"):
        with pytest.raises(ValueError, match="no duration"):
            seconds(wrong)


JSON = st.recursive(
    st.booleans() | st.integers(0, 3) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["title", "id", "x"]), inner),
    max_leaves=12,
)


@given(JSON, JSON)
def test_documents_differ_exactly_if_a_difference_is_named(before: Any, after: Any) -> None:
    assert list(differences(before, copy.deepcopy(before))) == []
    # Python takes 1 for True, and so does the comparison; neither stands for the other in a dashboard.
    assert (list(differences(before, after)) == []) == (before == after)


def test_an_inserted_panel_is_one_difference() -> None:
    old = {"panels": [{"title": "A", "y": 0}, {"title": "B", "y": 8}]}
    new = {"panels": [{"title": "C", "y": 0}, {"title": "A", "y": 0}, {"title": "B", "y": 8}]}
    assert [one.line() for one in differences(old, new)] == ['panels[C]: + {"title": "C", "y": 0}']
    swapped = {"panels": list(reversed(old["panels"]))}
    assert [one.path for one in differences(old, swapped)] == ["panels (order)"]


def test_two_long_texts_are_shown_where_they_differ() -> None:
    before, after = (f"sum by (cluster, namespace, model) (rate(x_total[{window}]))" for window in ("5m", "10m"))
    (line,) = (one.line() for one in differences({"expr": before}, {"expr": after}))
    assert line == 'expr: "…ate(x_total[5m]))" → "…ate(x_total[10m]))"'
