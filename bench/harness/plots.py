"""Plots figures over the number of clients, in one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness.command import say
from bench.harness.results import Results, client_counts, measured, spread, title

OURS = "#000000"  # lines in this color are thicker than the others

Figure = tuple[str, str, float]  # name in the records, label of the axis, factor


def draw(
    results: Results, workload: str, figures: Sequence[Figure], colours: Mapping[str, str], path: Path, *, log: bool
) -> bool:
    """Writes a PNG or SVG file with one axis per figure. Returns False if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        say("no plots: matplotlib is missing (pip install -e '.[bench]')")
        return False
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = path.stem  # the same figures give the same file
    import matplotlib.pyplot as plt

    counts = client_counts(results, workload)
    picture, axes = plt.subplots(1, len(figures), figsize=(13, 4), layout="constrained")
    for axis, (name, label, scale) in zip(axes, figures, strict=True):
        for server in measured(results, workload):
            _line(axis, results, server, workload, name, scale, colours.get(server))
        axis.set(xlabel="clients", ylabel=label, xscale="log", yscale="log" if log else "linear")
        axis.set_xticks(counts, [str(count) for count in counts])
        axis.minorticks_off()
        if not log:
            axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside upper center", ncols=max(1, len(labels)), frameon=False)
    picture.savefig(path, dpi=100, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(picture)
    return True


def _line(
    axis: Any, results: Results, server: str, workload: str, figure: str, scale: float, colour: str | None
) -> None:
    counts = client_counts(results, workload)
    points = [(n, found) for n in counts if (found := spread(results, server, workload, n, figure)) is not None]
    if not points:
        return
    below = [scale * (found.median - found.low) for _, found in points]
    above = [scale * (found.high - found.median) for _, found in points]
    axis.errorbar(
        [n for n, _ in points],
        [scale * found.median for _, found in points],
        yerr=[below, above],
        label=title(results, server),
        color=colour,
        marker="o",
        markersize=4,
        linewidth=2.5 if colour == OURS else 1.5,
        capsize=2,
    )
