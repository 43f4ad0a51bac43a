"""Prometheus alerting rules as the rules that Grafana evaluates itself."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping

from serve_app.cli.grafana.shipped import DEFAULT_INTERVAL, UID_PREFIX, Json, seconds

LABEL = ("managed_by", "serve-app")
GRAFANA_TICK_S = 10  # Grafana evaluates groups at multiples of this

_QUERY, _RETURNED, _FIRES = "query", "returned", "fires"


def is_ours(rule: Mapping[str, object]) -> bool:
    """Whether a push made this rule."""
    labels = rule.get("labels")
    marked = isinstance(labels, dict) and labels.get(LABEL[0]) == LABEL[1]
    return marked and str(rule.get("uid", "")).startswith(UID_PREFIX)


def intervals(groups: Iterable[Json]) -> dict[str, int]:
    """Each group that has alerts, with its interval in seconds, as Grafana accepts it."""
    return {
        group["name"]: max(1, math.ceil(seconds(group.get("interval", DEFAULT_INTERVAL)) / GRAFANA_TICK_S))
        * GRAFANA_TICK_S
        for group in groups
        if any("alert" in rule for rule in group["rules"])
    }


def grafana_rules(groups: Iterable[Json], datasource: str) -> list[Json]:
    """The alerts of the groups for Grafana's provisioning API, without a folder. Recordings stay in Prometheus."""
    alerts = [(group["name"], rule) for group in groups for rule in group["rules"] if "alert" in rule]
    titles = _titles([rule for _, rule in alerts])
    return [_grafana_rule(rule, title, group, datasource) for (group, rule), title in zip(alerts, titles, strict=True)]


def _titles(alerts: list[Json]) -> list[str]:
    """Unique, as Grafana wants them in a folder: alerts of one name get their labels behind it, else a number."""
    count = Counter(rule["alert"] for rule in alerts)
    titles: list[str] = []
    for rule in alerts:
        labels = ", ".join(str(value) for value in (rule.get("labels") or {}).values())
        title = f"{rule['alert']} ({labels})" if labels and count[rule["alert"]] > 1 else str(rule["alert"])
        same = sum(other == title or other.startswith(f"{title} #") for other in titles)
        titles.append(f"{title} #{same + 1}" if same else title)
    return titles


def _grafana_rule(rule: Json, title: str, group: str, datasource: str) -> Json:
    texts = {name: _translated(str(text)) for name, text in (rule.get("annotations") or {}).items()}
    made = {
        "uid": UID_PREFIX + hashlib.sha256(title.encode()).hexdigest()[:16],
        "title": title,
        "ruleGroup": group,
        "condition": _FIRES,
        "data": _data(rule["expr"].strip(), datasource),
        "for": str(rule.get("for", "0s")),
        "noDataState": "OK",
        "execErrState": "Error",
        "labels": {**{name: str(value) for name, value in (rule.get("labels") or {}).items()}, LABEL[0]: LABEL[1]},
    }
    return {**made, "annotations": texts} if texts else made


def _data(expression: str, datasource: str) -> list[Json]:
    """In Prometheus an alert fires for every series that its expression returns, whatever the value, zero included.

    Grafana compares values. So the second step makes 1 of every value; Grafana's own import of rules does the same.
    """
    returned = f"is_number(${_QUERY}) || is_nan(${_QUERY}) || is_inf(${_QUERY})"
    above_zero = {"evaluator": {"type": "gt", "params": [0]}}
    return [
        _step(_QUERY, datasource, "prometheus", {"expr": expression, "instant": True, "range": False}),
        _step(_RETURNED, "__expr__", "__expr__", {"type": "math", "expression": returned}),
        _step(
            _FIRES, "__expr__", "__expr__", {"type": "threshold", "expression": _RETURNED, "conditions": [above_zero]}
        ),
    ]


def _step(name: str, datasource: str, kind: str, model: Json) -> Json:
    # Grafana adds the two defaults when it saves the model; a second push must not see them as a change.
    defaults = {"refId": name, "datasource": {"type": kind, "uid": datasource}, "intervalMs": 1000}
    return {
        "refId": name,
        "queryType": "",
        "relativeTimeRange": {"from": 600, "to": 0} if kind == "prometheus" else {"from": 0, "to": 0},
        "datasourceUid": datasource,
        "model": {**defaults, "maxDataPoints": 43200, **model},
    }


def _translated(template: str) -> str:
    """In Grafana `$value` is a text about all steps; the number of the query is under `$values`."""
    number = f"$values.{_QUERY}.Value"
    return re.sub(r"{{.*?}}", lambda found: re.sub(r"\$value\b", lambda _: number, found[0]), template, flags=re.DOTALL)
