"""Sends the queries of a board to a Prometheus, with values for the board's variables."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import httpx

ALL: Final = ".*"  # value of a variable that selects everything
RATE_WINDOW: Final = "1m"  # Grafana's value of $__rate_interval for the shortest steps

Point = tuple[float, float]  # Unix seconds, value


def filled(
    expression: str, chosen: Mapping[str, str] | None = None, *, window: str = RATE_WINDOW, shown: str = "5m"
) -> str:
    """Returns the expression as Grafana sends it. `chosen`: regular expressions by variable; others: ALL.

    `shown` is the board's time range, as a PromQL duration.
    """
    chosen = chosen or {}
    text = re.sub(r"\$__(rate_interval|interval)", window, expression).replace("$__range", shown)
    return re.sub(r"\$([a-z]+)", lambda found: chosen.get(found[1], ALL), text)


@dataclass(frozen=True, slots=True)
class Series:
    """One series of an answer. An instant query returns one point."""

    labels: Mapping[str, str]
    points: tuple[Point, ...]

    def legend(self, form: str) -> str:
        """Returns the legend for `form`, a text with {{label}} as in Grafana."""
        return re.sub(r"{{ *(\w+) *}}", lambda found: self.labels.get(found[1], ""), form).strip()


class Prometheus:
    """A Prometheus server. Queries raise httpx.HTTPError, or ValueError if it rejects an expression."""

    def __init__(self, url: str, *, transport: httpx.BaseTransport | None = None) -> None:
        self._http = httpx.Client(base_url=url, timeout=30, trust_env=False, transport=transport)

    def get(self, path: str, **query: str) -> Any:
        answer = self._http.get(f"/api/v1/{path}", params=query).json()
        if answer["status"] != "success":
            raise ValueError(f"{answer.get('error')}: {query}")
        return answer["data"]

    def ask(self, expression: str, at: float | None = None) -> list[Series]:
        """Runs an instant query, now or at a Unix time."""
        moment = {} if at is None else {"time": f"{at}"}
        found = self.get("query", query=expression, **moment)["result"]
        return [Series(one["metric"], (_point(one["value"]),)) for one in found]

    def ask_range(self, expression: str, began: float, ended: float, step_s: float) -> list[Series]:
        found = self.get("query_range", query=expression, start=f"{began}", end=f"{ended}", step=f"{step_s}")["result"]
        return [Series(one["metric"], tuple(map(_point, one["values"]))) for one in found]

    def total(self, expression: str, by: str) -> dict[str, float]:
        """Returns sums by one label, without zeros."""
        found = self.ask(f"sum by ({by}) ({expression})")
        return {one.labels[by]: one.points[0][1] for one in found if one.points[0][1]}

    def alerts(self, state: str = "firing|pending") -> list[Mapping[str, str]]:
        """Returns the labels of the alerts in these states (a regular expression). `alertname` is one of the labels."""
        return [one.labels for one in self.ask(f'ALERTS{{alertstate=~"{state}"}}')]


def _point(found: tuple[float, str]) -> Point:
    value = float(found[1])
    return float(found[0]), value if math.isfinite(value) else math.nan
