"""Figures of all gateways from a Prometheus that scrapes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import httpx

from serve_app.cli.grafana.address import Address
from serve_app.cli.live.rates import COUNTED, WINDOW_S, Rates, series_of
from serve_app.contracts import metrics
from serve_app.contracts.metric import Metric

TIMEOUT_S: Final = 5.0
SERVICE: Final = ("cluster", "namespace")  # the labels that tell services apart


class Prometheus:
    """`service` has the values of the labels SERVICE that are wanted; what it lacks may have any value."""

    first_after_s = 0.0

    def __init__(self, address: Address, service: Mapping[str, str], *, trust_env: bool) -> None:
        self._address = address
        self._service = {name: service[name] for name in SERVICE if name in service}
        self._http = httpx.Client(timeout=TIMEOUT_S, auth=address.login, trust_env=trust_env)

    def read(self) -> Rates:
        source = f"Prometheus at {self._address.url}"
        try:
            answers = {metric: self._query(expression(metric, self._service)) for metric in COUNTED}
        except (httpx.HTTPError, ValueError) as error:
            return Rates(source, notes=(f"{source}: {error or type(error).__name__}",))
        found = {tuple(labels.get(name, "") for name in SERVICE) for labels, _ in answers[metrics.REQUESTS]}
        if not found:
            note = f"{source} has no rate of {metrics.REQUESTS.exported} over the last minute"
            asked = ", ".join(f'{name}="{value}"' for name, value in self._service.items())
            return Rates(source, notes=(f"{note}{f' with {asked}' if asked else ''}",))
        values: dict[Metric, dict[tuple[str, ...], float]] = {}
        for metric, rows in answers.items():
            sums = values[metric] = {}
            for labels, rate in rows:
                key = tuple(labels.get(name, "") for name in COUNTED[metric])
                sums[key] = sums.get(key, 0.0) + rate
        notes: tuple[str, ...] = ()
        if len(found) > 1:
            notes = (f"these are sums of {len(found)} services: choose one with --cluster and --namespace",)
        return Rates(source, values, WINDOW_S, notes)

    def _query(self, query: str) -> list[tuple[dict[str, str], float]]:
        """Labels and values. Raises httpx.HTTPError, and ValueError for another answer."""
        response = self._http.get(f"{self._address.url}/api/v1/query", params={"query": query})
        try:
            answer = response.json()
            if answer["status"] == "success":
                return [(row["metric"], float(row["value"][1])) for row in answer["data"]["result"]]
            problem = str(answer["error"])
        except (ValueError, KeyError, TypeError, IndexError):
            problem = "is a Prometheus there?"
        raise ValueError(f"it answered {response.status_code}: {problem}")


def expression(metric: Metric, service: Mapping[str, str]) -> str:
    """The rates of a metric over the last minute, for each service apart."""
    matchers = ", ".join(f"{name}={_quoted(value)}" for name, value in service.items())
    by = ", ".join((*SERVICE, *COUNTED[metric]))
    return f"sum by ({by}) (rate({series_of(metric)}{{{matchers}}}[{WINDOW_S:.0f}s]))"


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
