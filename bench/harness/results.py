"""Reads figures from the records of a run. A record is one round: a server, a workload and a number of clients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

Results = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, minimum and maximum of some values."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """Returns the spread; None without values."""
        known = sorted(values)
        return cls(median(known), known[0], known[-1]) if known else None


def percentile(values: Sequence[float], share: float) -> float | None:
    """The nearest-rank percentile; None without values."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def rounds(results: Results, server: str, workload: str, clients: int, figure: str) -> dict[int, float]:
    """Returns the figure by round. Leaves out rounds with problems and rounds that did not measure it."""
    return {
        record["round"]: record[figure]
        for record in results["records"]
        if (record["server"], record["workload"], record["clients"]) == (server, workload, clients)
        and record.get(figure) is not None
        and not record["problems"]
    }


def spread(results: Results, server: str, workload: str, clients: int, figure: str) -> Spread | None:
    """Median and range over the rounds."""
    return Spread.of(rounds(results, server, workload, clients, figure).values())


def ratio(results: Results, server: str, other: str, workload: str, clients: int, figure: str) -> Spread | None:
    """Ratio of the server's figure to the other's within each round, because a slow round slows both."""
    ours = rounds(results, server, workload, clients, figure)
    theirs = rounds(results, other, workload, clients, figure)
    return Spread.of(ours[number] / theirs[number] for number in ours.keys() & theirs.keys() if theirs[number] > 0)


def client_counts(results: Results, workload: str) -> list[int]:
    """The numbers of clients at which a workload was measured."""
    return sorted({record["clients"] for record in results["records"] if record["workload"] == workload})


def measured(results: Results, workload: str) -> list[str]:
    """Servers that have records of a workload, in the tables' order."""
    there = {record["server"] for record in results["records"] if record["workload"] == workload}
    return [name for name in results["servers"] if name in there]


def title(results: Results, server: str) -> str:
    """The server's name in the tables."""
    return str(results["servers"].get(server, {}).get("title", server))
