"""Finds the expressions of a board, and the metrics in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import promql_parser

# Variables that Grafana replaces by durations. Other variables are in strings, where PromQL allows them.
DURATION: Final = re.compile(r"\[\$__(rate_interval|range|interval)\b")


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the panels, including those in collapsed rows. Leaves out the rows themselves."""
    found = [nested for panel in board["panels"] for nested in (panel, *panel.get("panels", []))]
    return [panel for panel in found if panel["type"] != "row"]


def variable_expressions(board: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the name of each variable with values from Prometheus, and the selector in its `label_values`."""
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\((.+), *\w+\)", variable["query"]["query"])
            yield variable["name"], match[1] if match else ""


def all_expressions(board: dict[str, Any]) -> list[str]:
    of_panels = [target["expr"] for panel in panels(board) for target in panel.get("targets", [])]
    return of_panels + [expression for _, expression in variable_expressions(board)]


def selectors(expression: str) -> list[promql_parser.VectorSelector]:
    """Returns the selectors in an expression. Raises ValueError if it is not PromQL."""
    found: list[promql_parser.VectorSelector] = []

    def note(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            if not node.name:
                raise ValueError("a selector has no metric name")
            found.append(node)

    promql_parser.walk(_parsed(expression), note)
    return found


def grouped_by(expression: str) -> set[str]:
    """Returns the labels in all `by (…)` of an expression. Raises ValueError if it is not PromQL."""
    found: set[str] = set()

    def note(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            found.update(node.modifier.labels)

    promql_parser.walk(_parsed(expression), note)
    return found


def _parsed(expression: str) -> promql_parser.Expr:
    return promql_parser.parse(DURATION.sub("[5m", expression))


def names(expression: str) -> set[str]:
    """Returns the names of the series in an expression. Raises ValueError if it is not PromQL."""
    return {selector.name for selector in selectors(expression) if selector.name}
