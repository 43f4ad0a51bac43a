"""The picture of a run: throughput, waits and processor time over the number of clients."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from bench.engine.results import Results, client_counts, measured, spread, title
from bench.gateway.session import WORKLOAD
from bench.gateway.systems import BARE, FULL, LITELLM

#: Told apart with any colour vision; ours is the dark one.
_COLOURS = {FULL: "#000000", BARE: "#0072b2", LITELLM: "#d55e00"}
_FIGURES = (
    ("requests_per_s", "requests per second"),
    ("p50_ms", "ms from request to reply, median"),
    ("cpu_ms", "processor ms per request"),
)


def draw(results: Results, folder: Path) -> dict[str, str]:
    """Write the SVG file; name -> what it shows. Nothing, with one line, where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        print("bench: no plot: matplotlib is missing (pip install -e '.[bench]')", file=sys.stderr)
        return {}
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "gateway"  # the same figures make the same file
    import matplotlib.pyplot as plt

    counts = client_counts(results, WORKLOAD)
    figure, axes = plt.subplots(1, len(_FIGURES), figsize=(12, 3.8), layout="constrained")
    for axis, (name, label) in zip(axes, _FIGURES, strict=True):
        for system in measured(results, WORKLOAD):
            _line(axis, results, system, counts, name)
        axis.set(xlabel="clients", ylabel=label, xscale="log")
        axis.set_xticks(counts, [str(count) for count in counts])
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=max(1, len(labels)), frameon=False)
    figure.savefig(folder / "gateway.svg", metadata={"Date": None})
    plt.close(figure)
    return {"gateway.svg": "Requests per second, waits and processor time per request over the number of clients"}


def _line(axis: Any, results: Results, system: str, counts: list[int], name: str) -> None:
    points = [(n, found) for n in counts if (found := spread(results, system, WORKLOAD, n, name)) is not None]
    if not points:
        return
    axis.errorbar(
        [n for n, _ in points],
        [found.median for _, found in points],
        yerr=[[found.median - found.low for _, found in points], [found.high - found.median for _, found in points]],
        label=title(results, system),
        color=_COLOURS.get(system),
        marker="o",
        markersize=4,
        linewidth=2.5 if system == FULL else 1.5,
        capsize=2,
    )
