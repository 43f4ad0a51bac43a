"""Seconds by layer, a folder of `tests/`: printed after each run, and written into docs/testing.md.

    make test ARGS='--layer-seconds=everyday.json'
    make test-slow ARGS='--layer-seconds=slow.json'
    .venv/bin/python -m tests.durations everyday.json slow.json

A layer's seconds include its fixtures, and are summed over parallel processes.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[1] / "docs" / "testing.md"
# Seconds in `make test` and in `make test-slow`, on the machine that docs/testing.md names; 0 is no budget.
BUDGETS: dict[str, tuple[int, int]] = {
    "accounting": (105, 340),
    "admin": (60, 35),
    "api": (10, 0),
    "bench": (5, 0),
    "cli": (140, 10),
    "clients": (85, 30),
    "cluster": (12, 15),
    "console": (90, 5),
    "contracts": (12, 0),
    "dashboards": (25, 10),
    "deployments": (15, 0),
    "engine": (210, 0),
    "engine_contract": (80, 0),
    "faults": (5, 0),
    "gateway": (130, 5),
    "launch": (35, 65),
    "limiter": (35, 30),
    "model": (50, 20),
    "scaling": (10, 0),
    "service": (120, 400),
    "storage": (5, 0),
}
BEGIN, END = "<!-- seconds by layer -->\n", "<!-- end -->\n"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--layer-seconds", type=Path, metavar="FILE", help="add the seconds of each layer to a JSON file")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Prints the layers that are over their budget, which is no failure."""
    seconds: Counter[str] = Counter()
    for report in (one for reports in terminalreporter.stats.values() for one in reports):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid.split("/")[1]] += report.duration
    is_slow = "not slow" not in config.option.markexpr and "slow" in config.option.markexpr
    for layer, took in sorted(seconds.items()):
        budget = BUDGETS.get(layer, (0, 0))[is_slow]
        if budget and took > budget:
            terminalreporter.write_line(f"over budget: {layer} took {took:.0f} s, its budget is {budget} s")
    if (path := config.option.layer_seconds) is not None:
        before = Counter(json.loads(path.read_text())) if path.exists() else Counter()
        path.write_text(json.dumps(before + seconds, indent=1))


def table(everyday: dict[str, float], slow: dict[str, float]) -> str:
    """The layers with their seconds and budgets, in Markdown."""
    rows = ["| layer | `make test`, s | budget, s | `make test-slow`, s | budget, s |", "|---|---|---|---|---|"]
    for layer in sorted(everyday | slow):
        budget = BUDGETS.get(layer, (0, 0))
        cells = (everyday.get(layer, 0), budget[0], slow.get(layer, 0), budget[1])
        rows.append(f"| `{layer}` | {' | '.join(f'{cell:.0f}' for cell in cells)} |")
    sums = (sum(everyday.values()), sum(slow.values()))
    limits = [sum(budget[number] for budget in BUDGETS.values()) for number in (0, 1)]
    rows.append(f"| all | {sums[0]:.0f} | {limits[0]} | {sums[1]:.0f} | {limits[1]} |")
    return "\n".join(rows) + "\n"


def main(everyday: str, slow: str) -> None:
    """Writes the table into docs/testing.md."""
    rows = table(json.loads(Path(everyday).read_text()), json.loads(Path(slow).read_text()))
    text = DOCUMENT.read_text()
    DOCUMENT.write_text(re.sub(f"({BEGIN}).*({END})", lambda found: found[1] + rows + found[2], text, flags=re.DOTALL))
    print(rows, end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
