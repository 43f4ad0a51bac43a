"""Measures the cost of a part of the service by switching the part off and on while the service runs.

Short loads with and without the part alternate, so a slow minute of the machine affects both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Final

from bench.gateway import load
from bench.gateway.report import machine
from bench.gateway.session import WARM_UP_CLIENTS, WORKLOAD, Scope
from bench.gateway.speedups import check, environment
from bench.gateway.systems import Full
from bench.gateway.without.sitecustomize import COSTS, SWITCH
from bench.harness import document
from bench.harness.command import say
from bench.harness.results import Results, client_counts, ratio, rounds, spread
from bench.harness.tables import show, table

BEGIN: Final = "<!-- measured: written by `python -m bench.gateway --costs --docs`, not by hand -->"
END: Final = "<!-- end of what bench.gateway --costs measured -->"
SCOPE: Final = Scope(rounds=40, clients=(16,), window_s=2)
MIN_PAIRS: Final = 3


class Switched(Full):
    """The service. One part of it is off while the file `switch` exists."""

    def __init__(self, folder: Path, cost: str) -> None:
        self.name = f"switched-{cost}"
        super().__init__(folder)
        self._cost = cost
        self.switch = folder / f"{self.name}.off"

    def environment(self) -> dict[str, str]:
        return {**super().environment(), **environment(self._cost), SWITCH: str(self.switch)}

    def command(self) -> list[str]:
        check(self._cost)
        self.switch.unlink(missing_ok=True)
        return super().command()


def measure(folder: Path, costs: Sequence[str], scope: Scope) -> Results:
    """Measures pairs in the order on, off, off, on. Returns their records. Raises LoadError, ServerError."""
    results: Results = {"costs": list(costs), "records": [], "missing": {}}
    for cost in costs:
        system = Switched(folder, cost)
        try:
            system.start()
            load.run(system.base_url, system.key, WARM_UP_CLIENTS, scope.warm_up_s)
            for clients in scope.clients:
                for number in range(scope.rounds):
                    results["records"] += _pair(system, cost, clients, number, scope.window_s)
        finally:
            system.switch.unlink(missing_ok=True)
            system.stop()
    return results


def _pair(system: Switched, cost: str, clients: int, number: int, seconds: int) -> list[dict[str, Any]]:
    records = []
    for kind in ("with", "without") if number % 2 == 0 else ("without", "with"):
        if kind == "without":
            system.switch.touch()
        else:
            system.switch.unlink(missing_ok=True)
        seen, _ = load.run(system.base_url, system.key, clients, seconds)
        records.append(
            {
                "server": f"{kind}-{cost}",
                "workload": WORKLOAD,
                "clients": clients,
                "round": number,
                **asdict(seen),
                "requests_per_s": seen.requests_per_s,
                "problems": seen.problems,
            }
        )
    say(f"{cost}, {clients} clients, pair {number + 1}: " + ", ".join(_line(one) for one in records))
    return records


def _line(record: dict[str, Any]) -> str:
    return f"{record['server'].partition('-')[0]} {record['requests_per_s']:.0f} requests/s"


def write_docs(path: Path, results: Results) -> None:
    """Updates the document's part with the costs, and their records. Raises ValueError if the document has no marks."""
    document.renew(path, BEGIN, END, ("costs.json", results), lambda folder: {}, lambda pictures: markdown(results))


def markdown(results: Results) -> str:
    """Returns a table with a row for each part at each number of clients."""
    rows = []
    for cost in results["costs"]:
        for clients in client_counts(results, WORKLOAD):
            on, off = f"with-{cost}", f"without-{cost}"
            sides = [show(spread(results, one, WORKLOAD, clients, "requests_per_s"), "{:.0f}") for one in (on, off)]
            found = ratio(results, on, off, WORKLOAD, clients, "requests_per_s")
            middle = show(found, "{:.2f}") if found else ""
            row = [f"`{cost}`", COSTS[cost].text, str(clients), *sides, middle, _mean(results, cost, clients)]
            rows.append(row)
    head = ["part", "what it is", "clients", "requests/s with", "without", "ratio", "mean ratio ± standard error"]
    return f"{machine(results)}\n\n{table(head, rows)}\n"


def _mean(results: Results, cost: str, clients: int) -> str:
    on, off = (rounds(results, f"{kind}-{cost}", WORKLOAD, clients, "requests_per_s") for kind in ("with", "without"))
    pairs = [math.log(on[number] / off[number]) for number in on.keys() & off.keys() if on[number] and off[number]]
    if len(pairs) < MIN_PAIRS:
        return ""
    return f"{math.exp(mean(pairs)):.3f} ± {stdev(pairs) / math.sqrt(len(pairs)):.3f}"
