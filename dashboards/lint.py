"""Checks boards. Grafana itself accepts almost any board, and shows no data if it is wrong."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final

import promql_parser

from dashboards.exported import SERIES, series
from dashboards.expressions import all_expressions, grouped_by, names, panels, selectors, variable_expressions
from dashboards.panels import Board
from serve_app.contracts import metrics

Document = dict[str, Any]
Selectors = list[promql_parser.VectorSelector]
SERVICE: Final = {"cluster": "$cluster", "namespace": "$namespace"}
# Labels that Prometheus, histograms and Ray's replicas add.
EVERYWHERE: Final = {"cluster", "namespace", "instance", "le", "application", "deployment", "replica"}


def problems(board: Document) -> list[str]:
    """Returns a sentence for each problem, with the name of the panel or variable."""
    missing = [key for key in ("uid", "title", "panels", "templating") if not board.get(key)]
    if missing:
        return [f"the board has no {key}" for key in missing]
    found = [*_duplicates(board), *_variables(board)]
    for panel in panels(board):
        found += [f"panel {panel.get('title')!r}: {problem}" for problem in _panel(panel)]
    return [f"{board['uid']}: {problem}" for problem in found]


def dead_metrics(boards: Iterable[Document], rules: Iterable[str]) -> list[str]:
    """Returns a sentence for each metric of the service that no board and no rule uses. `rules` are expressions."""
    expressions = [*rules, *(expression for board in boards for expression in all_expressions(board))]
    used = {name for expression in expressions for name in names(expression)}
    return [f"no board and no rule uses {one.exported}" for one in metrics.ALL if used.isdisjoint(series(one))]


def _panel(panel: Document) -> Iterator[str]:
    defaults = panel.get("fieldConfig", {}).get("defaults", {})
    if not panel.get("title", "").endswith("?"):
        yield "the title is not a question"
    if not panel.get("description"):
        yield "no description"
    if not defaults.get("unit"):
        yield "no unit"
    if panel["type"] == "stat" and len(defaults.get("thresholds", {}).get("steps", [])) < 2:
        yield "a single number without thresholds"
    if any(holder.get("datasource", {}).get("uid") != "${datasource}" for holder in (panel, *panel.get("targets", []))):
        yield "a data source that is fixed, not the variable's"
    yield from _links(panel)
    if not panel.get("targets"):
        yield "no expression"
    for target in panel.get("targets", []):
        yield from _target(target)


def _links(panel: Document) -> Iterator[str]:
    if not panel.get("links"):
        yield "no link to the next board"
    for link in panel.get("links", []):
        uid = re.search(r"/d/([\w-]+)", link.get("url", ""))
        if uid and uid[1] not in {board.uid for board in Board}:
            yield f"links to {uid[1]}, which is not a board"


def _target(target: Document) -> Iterator[str]:
    expression = target.get("expr", "")
    try:
        found, kept = selectors(expression), grouped_by(expression)
    except ValueError as error:
        yield f"not PromQL ({error}): {expression}"
        return
    yield from _metrics(found)
    for selector in found:
        given = {matcher.name: matcher.value for matcher in selector.matchers.matchers}
        for label, value in SERVICE.items() - given.items():
            yield f'{selector.name} is not selected by {label}=~"{value}"'
    labels = {label for selector in found if selector.name in SERIES for label in SERIES[selector.name].labels}
    for label in sorted(kept - labels - EVERYWHERE):
        yield f"no metric has the label {label!r}: {expression}"
    for label in re.findall(r"{{ *(\w+) *}}", target.get("legendFormat", "")):
        if label not in kept:
            yield f"the legend names {label!r}, which its expression does not keep"


def _metrics(found: Selectors) -> Iterator[str]:
    for selector in found:
        metric = SERIES.get(selector.name or "")
        if metric is None:
            yield f"no process exports {selector.name}"
            continue
        for matcher in selector.matchers.matchers:
            known = metric.known.get(matcher.name, ())
            for value in matcher.value.split("|") if known else ():
                if not any(re.fullmatch(value, one) for one in known):
                    yield f"{selector.name} never has {matcher.name}={value!r}"


def _duplicates(board: Document) -> Iterator[str]:
    for panel_id, times in Counter(panel.get("id") for panel in board["panels"]).items():
        if times > 1:
            titles = [panel.get("title") for panel in board["panels"] if panel.get("id") == panel_id]
            yield f"panels {titles} have the same id {panel_id}"
    for title, times in Counter(panel.get("title") for panel in panels(board)).items():
        if times > 1:
            yield f"panel {title!r}: {times} panels have this title"


def _variables(board: Document) -> Iterator[str]:
    variables = board["templating"]["list"]
    defined = {variable["name"] for variable in variables}
    for name in sorted(defined - _used(board)):
        yield f"variable {name!r}: it is not used"
    for kind, named in (("panel", panels(board)), ("variable", variables)):
        for one in named:
            for name in sorted(_used(one) - defined):
                yield f"{kind} {one.get('title', one.get('name'))!r}: the variable {name!r} is not defined"
    for name, expression in variable_expressions(board):
        try:
            yield from (f"variable {name!r}: {problem}" for problem in _metrics(selectors(expression)))
        except ValueError as error:
            yield f"variable {name!r}: not PromQL ({error}): {expression}"
    for variable in variables:
        if variable["type"] == "query" and variable.get("datasource", {}).get("uid") != "${datasource}":
            yield f"variable {variable['name']!r}: a data source that is fixed, not the variable's"


def _used(document: Document) -> set[str]:
    """Returns the variables in a document, without Grafana's own, which begin with two underscores."""
    found = re.findall(r"\$\{?([A-Za-z_]\w*)", json.dumps(document))
    return {name for name in found if not name.startswith("__")}
