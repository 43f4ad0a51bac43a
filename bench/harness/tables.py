"""Formats results as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable

from bench.harness.promises import Verdict
from bench.harness.results import Results, Spread, client_counts, measured, spread, title


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def show(spread: Spread | None, form: str, scale: float = 1.0) -> str:
    """Median and range. Only the median if the range is 0 at this precision."""
    if spread is None:
        return ""
    middle, low, high = (form.format(value * scale) for value in (spread.median, spread.low, spread.high))
    return middle if low == high else f"{middle} ({low} to {high})"


def figure_table(results: Results, workload: str, figure: str, form: str, scale: float = 1.0) -> str:
    """A table of one figure: a row for each server, a column for each number of clients."""
    counts = client_counts(results, workload)
    head = ["", *(f"{count} client{'s' if count > 1 else ''}" for count in counts)]
    rows = [
        [title(results, name), *(show(spread(results, name, workload, n, figure), form, scale) for n in counts)]
        for name in measured(results, workload)
    ]
    return table(head, rows)


def promise_table(verdicts: Iterable[Verdict]) -> str:
    """A table with a row for each promise and its figure."""
    rows = []
    for verdict in verdicts:
        promise = verdict.promise
        needed = f"{'at most' if promise.at_most else 'at least'} {promise.needed:.2f}"
        if promise.goal is not None:
            needed += f", goal {promise.goal:g}"
        kept = {True: "yes", False: "**no**", None: "not measured"}[verdict.kept]
        rows.append([promise.text, needed, show(verdict.measured, "{:.2f}"), kept])
    return table(["", "target", "measured", "met"], rows)
