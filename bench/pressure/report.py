"""Renders the results of a simulation as Markdown tables, and writes them into docs/benchmarks.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.harness import document
from bench.harness.tables import table
from bench.pressure import plot

BEGIN = "<!-- simulated: written by `python -m bench.pressure --docs`, not by hand -->"
END = "<!-- end of what bench.pressure simulated -->"


def write_docs(path: Path, results: dict[str, Any]) -> None:
    """Replaces the text between the two marks. Plots and records go into the folder with the document's name.

    Raises:
        ValueError: the document has no marks.
    """
    text = path.read_text()
    document.check(text, BEGIN, END)
    folder = path.with_suffix("")
    folder.mkdir(exist_ok=True)
    pictures = plot.draw(results, folder)
    (folder / "pressure.json").write_text(json.dumps(_rounded(results), separators=(",", ":")) + "\n")
    shown = "\n\n".join(f"![{alt}]({folder.name}/{name})" for name, alt in pictures.items())
    path.write_text(document.renewed(text, BEGIN, END, markdown(results, shown)))


def promises(results: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """Returns each promise, what is needed, the result of the worst run, and whether it holds."""
    runs = results["overload"]
    goodput = min(run["goodput"] for run in runs)
    share = max(run["worst_share"] for run in runs)
    late = sum(run["late"] for run in runs)
    longest = max(run["longest_wait_s"] for run in runs)
    admitted = sum(run["admitted"] for run in runs)
    return [
        ("goodput, as a share of the capacity", "at least 90%", f"{goodput:.1%}", goodput >= 0.9),
        ("deviation of an account's share from its share by weight", "at most 10%", f"{share:.1%}", share <= 0.1),
        (
            "admitted requests that waited past their deadline of 120 s",
            "none",
            f"{late} of {admitted:,}; the longest wait was {longest:.1f} s",
            late == 0,
        ),
    ]


def markdown(results: dict[str, Any], pictures: str = "") -> str:
    """The whole report."""
    rows = [[what, needed, found, "yes" if kept else "**no**"] for what, needed, found, kept in promises(results)]
    runs = len(results["overload"])
    sections = [
        "Ten accounts with the weights " + ", ".join(map(str, results["weights"])) + " request three times the "
        f"capacity of four replicas, for ten minutes after a minute of warm-up. Worst of {runs} seeds:",
        table(["", "target", "simulated", "met"], rows),
        _day(results),
        pictures,
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _day(results: dict[str, Any]) -> str:
    day, scaling = results["day"], results["scaling"]
    totals = day["totals"]
    refusals = ", ".join(f"{count:,} × {kind}" for kind, count in sorted(totals["refusals"].items()) if count) or "none"
    given_up = totals["given_up_by_the_crowd"] / max(1, totals["crowd_requests"])
    rows = [
        ["accounts", f"{day['accounts']:,}"],
        ["requests of the crowd", f"{totals['crowd_requests']:,}"],
        ["share of them given up after two retries", f"{given_up:.2%}"],
        ["capacity of a replica, tokens per second", f"{day['capacity_per_replica']:,.0f}"],
        ["replicas", f"{scaling['least']} to {scaling['most']}, {scaling['start_s']:.0f} s to start one"],
        [
            "goodput / capacity while an account was limited, mean and minimum over 5 minutes",
            f"{_percent(totals['busy_goodput'])}, {_percent(totals['least_busy_goodput'])}",
        ],
        [
            "Jain's index of tokens per weight of limited accounts, mean and minimum over 5 minutes",
            f"{_number(totals['fairness'])}, {_number(totals['least_fairness'])}",
        ],
        ["longest wait of an admitted request", f"{totals['longest_wait_s']:.1f} s"],
        ["refused attempts", refusals],
    ]
    return f"The day (seed {results['seed']}):\n\n{table(['', ''], rows)}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list) else value
