"""What a run has written, read by name: figures of one workload at one number of clients, round by round."""

from __future__ import annotations

from typing import Any

from bench.engine.figures import Spread

Results = dict[str, Any]


def rounds(results: Results, server: str, workload: str, clients: int, figure: str) -> dict[int, float]:
    """Round -> figure; rounds in which it was not measured, or in which something went wrong, are not there."""
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


def client_counts(results: Results, workload: str) -> list[int]:
    """At which numbers of clients a workload was measured."""
    return sorted({record["clients"] for record in results["records"] if record["workload"] == workload})


def measured(results: Results, workload: str) -> list[str]:
    """Servers of which there are records of a workload, in the tables' order."""
    there = {record["server"] for record in results["records"] if record["workload"] == workload}
    return [name for name in results["servers"] if name in there]


def title(results: Results, server: str) -> str:
    """As the tables call it."""
    return str(results["servers"].get(server, {}).get("title", server))
