"""Figures of gateways from the exporters of their machines, by the differences between two reads."""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import httpx

from serve_app.cli.live.rates import COUNTED, WINDOW_S, Rates, series_of
from serve_app.contracts.metric import Metric

# Ray's processes hand their counts to the exporter so often: rates over a shorter time would leap.
EXPORT_S: Final = 10.0
TIMEOUT_S: Final = 5.0
# Ray's dashboard keeps this file up to date: the addresses of all that a running service exports.
RAY_TARGETS: Final = "prom_metrics_service_discovery.json"

Key = tuple[Metric, tuple[str, ...]]  # with the values of the metric's labels in COUNTED
Samples = dict[tuple[str, frozenset[tuple[str, str]]], tuple[Key, float]]  # by name and labels


class Exporters:
    """`addresses` are asked for at each read: those of a local service change when it is started again.

    With `all_count` each of them has counts of gateways, so one that can't be read is noted. Else there may be others
    among them, which may also be off.
    """

    first_after_s = EXPORT_S

    def __init__(self, addresses: Callable[[], Iterable[str]], *, all_count: bool, clock: Callable[[], float]) -> None:
        self._addresses = addresses
        self._all_count = all_count
        self._clock = clock
        # No proxy stands before the machines of a service.
        self._http = httpx.Client(timeout=TIMEOUT_S, trust_env=False)
        self._exporters: dict[str, _Exporter] = {}

    def read(self) -> Rates:
        addresses, failures = list(self._addresses()), []
        counting: dict[str, _Exporter] = {}
        for address in addresses:
            exporter = self._exporters.setdefault(address, _Exporter())
            try:
                response = self._http.get(address)
                response.raise_for_status()
                exporter.take(self._clock(), parse(response.text))
            except (httpx.HTTPError, ValueError) as error:
                failures.append(f"{address}: {str(error).partition(chr(10))[0] or type(error).__name__}")
            else:
                if exporter.counts:
                    counting[address] = exporter
        notes = failures if self._all_count or not counting else []
        if not counting:
            return Rates(notes=(*notes, f"no counts of a gateway at {', '.join(addresses) or 'the local service'}"))
        ready = {address: exporter for address, exporter in counting.items() if exporter.over_s >= EXPORT_S}
        if not ready:
            wait_s = EXPORT_S - max(exporter.over_s for exporter in counting.values())
            return Rates(notes=(*notes, f"requests/s and the like come in {wait_s:.0f} s"))
        values: dict[Metric, dict[tuple[str, ...], float]] = {metric: {} for metric in COUNTED}
        for exporter in ready.values():
            for (metric, labels), rate in exporter.rates().items():
                values[metric][labels] = values[metric].get(labels, 0.0) + rate
        over_s = min(exporter.over_s for exporter in ready.values())
        return Rates(f"metrics at {', '.join(ready)}", values, over_s, tuple(notes))


class _Exporter:
    """What one exporter has counted since it was first read."""

    def __init__(self) -> None:
        self.counts = False  # whether it has any of COUNTED
        self._last: Samples | None = None
        self._sums: dict[Key, float] = {}
        self._past: deque[tuple[float, dict[Key, float]]] = deque()

    @property
    def over_s(self) -> float:
        """The time between the newest read and the one that rates are taken from: the last one a minute before it."""
        return self._past[-1][0] - self._past[0][0]

    def take(self, now: float, samples: Samples) -> None:
        if self._last is not None:
            for series, (key, value) in samples.items():
                # A series that was not there has begun at 0 since, and one that fell has begun again.
                before = self._last[series][1] if series in self._last else 0.0
                self._sums[key] = self._sums.get(key, 0.0) + (value - before if value >= before else value)
        self._last = samples
        self.counts |= bool(samples)
        self._past.append((now, dict(self._sums)))
        while len(self._past) > 2 and self._past[1][0] <= now - WINDOW_S:
            self._past.popleft()

    def rates(self) -> dict[Key, float]:
        before = self._past[0][1]
        return {key: (value - before.get(key, 0.0)) / self.over_s for key, value in self._sums.items()}


def parse(text: str) -> Samples:
    """The samples of COUNTED in an exporter's text. Raises ValueError for another format."""
    from prometheus_client.parser import text_string_to_metric_families

    named = {series_of(metric): metric for metric in COUNTED}
    # Most of what Ray exports is its own: parsing all of it would take a second of each frame.
    wanted = tuple(f"{name}{{" for name in named)
    kept = "".join(f"{line}\n" for line in text.split("\n") if line.startswith(wanted))
    samples: Samples = {}
    for family in text_string_to_metric_families(kept):
        for sample in family.samples:
            metric = named[sample.name]
            labels = tuple(sample.labels.get(name, "") for name in COUNTED[metric])
            samples[sample.name, frozenset(sample.labels.items())] = (metric, labels), sample.value
    return samples


def local_addresses(home: Path) -> list[str]:
    """What the service of this state folder exports; empty when it does not run, or runs without Ray's dashboard."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        session = (home / "logs" / "ray").readlink().parent  # the launcher's link, while the service is ready
        groups = json.loads((session / RAY_TARGETS).read_text(encoding="utf-8"))
        return [f"http://{target}/metrics" for group in groups for target in group["targets"]]
    return []
