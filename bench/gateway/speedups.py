"""Measures the gain from each speed-up: the service with and without it, in turns, under the same load."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.gateway.report import machine
from bench.gateway.session import WORKLOAD, Scope, Session
from bench.gateway.systems import Full
from bench.gateway.without.sitecustomize import APPLIED, REMOVABLE, VARIABLE
from bench.harness import document
from bench.harness.command import ROOT, say
from bench.harness.results import Results, client_counts, ratio, spread
from bench.harness.servers import ServerError
from bench.harness.tables import show, table

BEGIN: Final = "<!-- measured: written by `python -m bench.gateway --without --docs`, not by hand -->"
END: Final = "<!-- end of what bench.gateway --without measured -->"
SCOPE: Final = Scope(rounds=2, clients=(16, 64))
MIN_GAIN: Final = 1.1  # minimum ratio of requests/s with and without a speed-up, at the best number of clients
PATCHES: Final = Path(__file__).with_name("without")


class With(Full):
    """The unchanged service, for comparison with `Without`."""

    def __init__(self, folder: Path, speedup: str) -> None:
        self.name = f"with-{speedup}"
        super().__init__(folder)


class Without(Full):
    """The service without one speed-up."""

    def __init__(self, folder: Path, speedup: str) -> None:
        self.name = f"without-{speedup}"
        super().__init__(folder)
        self._speedup = speedup

    def environment(self) -> dict[str, str]:
        return {**super().environment(), **environment(self._speedup)}

    def command(self) -> list[str]:
        check(self._speedup)
        return super().command()


def environment(speedup: str) -> dict[str, str]:
    """Returns environment variables that remove `speedup` from a Python process and all its descendants."""
    path = os.pathsep.join(filter(None, [str(PATCHES), str(ROOT), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, VARIABLE: speedup}


def check(speedup: str) -> None:
    """Raises ServerError if a process with these variables still has the speed-up."""
    program = f"import {REMOVABLE[speedup].module} as module; print(module.{APPLIED})"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment(speedup)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.stdout.strip() != speedup:
        reason = (done.stderr.strip().splitlines() or ["it was not patched"])[-1]
        raise ServerError(f"{speedup} can't be taken out: {reason}")


def measure(folder: Path, speedups: Sequence[str], scope: Scope) -> Results:
    """Measures each speed-up in the order with, without, without, with. Returns the records."""
    results: Results = {"speedups": list(speedups), "records": [], "audits": [], "missing": {}}
    for number, speedup in enumerate(speedups):
        say(f"{speedup}, {number + 1} of {len(speedups)}")
        session = Session([With(folder, speedup), Without(folder, speedup)], scope)
        session.run()
        results["records"] += session.records
        results["audits"] += session.audits
        results["missing"] |= session.missing
    return results


def write_docs(path: Path, results: Results) -> None:
    """Updates the speed-ups' part of the document and their records.

    Raises:
        ValueError: the document does not have this benchmark's marks.
    """
    document.renew(
        path,
        BEGIN,
        END,
        ("speedups.json", results),
        lambda folder: {},
        lambda pictures: markdown(results),
    )


def markdown(results: Results) -> str:
    """The whole report."""
    return f"{machine(results)}\n\n{speedup_table(results)}\n\n{notes(results)}\n"


def speedup_table(results: Results) -> str:
    """Returns a table with a row for each speed-up: requests/s with and without it at each number of clients."""
    counts = client_counts(results, WORKLOAD) or list(SCOPE.clients)
    head = ["speed-up", "what it is"]
    for clients in counts:
        head += [f"requests/s at {clients} clients", "without", "ratio"]
    rows = [[f"`{name}`", REMOVABLE[name].text, *_cells(results, name, counts)] for name in results["speedups"]]
    return table(head, rows)


def _cells(results: Results, name: str, counts: Sequence[int]) -> list[str]:
    cells = []
    for clients in counts:
        for server in (f"with-{name}", f"without-{name}"):
            cells.append(show(spread(results, server, WORKLOAD, clients, "requests_per_s"), "{:.0f}"))
        found = ratio(results, f"with-{name}", f"without-{name}", WORKLOAD, clients, "requests_per_s")
        cells.append(show(found, "{:.2f}"))
    return cells


def too_small(results: Results) -> list[str]:
    """Names of the speed-ups whose ratio is less than MIN_GAIN at every number of clients."""
    counts = client_counts(results, WORKLOAD)
    found = {
        name: [
            one.median
            for clients in counts
            if (one := ratio(results, f"with-{name}", f"without-{name}", WORKLOAD, clients, "requests_per_s"))
        ]
        for name in results["speedups"]
    }
    return [name for name, ratios in found.items() if ratios and max(ratios) < MIN_GAIN]


def notes(results: Results) -> str:
    """Returns speed-ups with too little gain, checks of the ledger, and failures."""
    lines = [f"- **{name} gains less than {MIN_GAIN - 1:.0%}.**" for name in too_small(results)]
    lines += [f"- Not in the table: {name} ({why})." for name, why in results["missing"].items()]
    audits: list[dict[str, Any]] = results["audits"]
    wrong = [
        f"{one['server']}, round {one['round'] + 1}" for one in audits if not (one["exact"] and one["books_sound"])
    ]
    lines.append(
        f"- The books were compared with the replies {len(audits)} times; wrong: {', '.join(wrong) or 'none'}."
    )
    for record in results["records"]:
        if record["problems"]:
            place = f"{record['server']}, {record['clients']} clients, round {record['round'] + 1}"
            lines.append(f"- Left out: {place}: {'; '.join(record['problems'])}.")
    return "\n".join(lines)
