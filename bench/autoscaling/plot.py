"""Plots the paid replicas on the first day of each shape, under each policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.autoscaling.days import WINDOW_S
from bench.autoscaling.traffic import SHAPES, arrivals
from bench.harness.command import say

#: Distinct with any colour vision.
COLOURS = {"rule": "#000000", "serve": "#d55e00", "keda": "#56b4e9"}
LABELS = {"rule": "the rule", "serve": "Serve's policy, tuned", "keda": "KEDA on queue depth, tuned"}


def draw(results: dict[str, Any], folder: Path) -> dict[str, str]:
    """Writes the SVG file. Returns its caption by file name, or nothing if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        say("no plot: matplotlib is missing (pip install -e '.[bench]')")
        return {}
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "autoscaling"  # the same figures give the same file
    import matplotlib.pyplot as plt

    records = results["records"]
    shapes = [shape for shape in SHAPES if any(one["shape"] == shape for one in records)]
    seed = min(one["seed"] for one in records)
    figure, axes = plt.subplots(len(shapes), 1, figsize=(11, 3 * len(shapes)), sharex=True, squeeze=False)
    for axis, shape in zip(axes[:, 0], shapes, strict=True):
        axis.fill_between(*_requests(shape, seed), color="#cccccc", step="mid", label="requests per second")
        for policy, colour in COLOURS.items():
            for one in records:
                if (one["shape"], one["policy"], one["seed"]) == (shape, policy, seed):
                    hours = [(number + 0.5) * WINDOW_S / 3600.0 for number in range(len(one["replicas"]))]
                    axis.plot(hours, one["replicas"], color=colour, linewidth=1.2, label=LABELS[policy])
        axis.set(ylabel=f"{SHAPES[shape].title}\nreplicas", xlim=(0, 24), ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[0, 0].legend(loc="upper left", frameon=False, fontsize=8)
    axes[-1, 0].set(xlabel="hour")
    figure.tight_layout()
    figure.savefig(folder / "autoscaling.svg", metadata={"Date": None})
    plt.close(figure)
    return {"autoscaling.svg": "Paid replicas over a simulated day of each shape, under each policy"}


def _requests(shape: str, seed: int) -> tuple[list[float], list[float]]:
    counts: dict[int, int] = {}
    for one in arrivals(SHAPES[shape], seed):
        counts[int(one.at // WINDOW_S)] = counts.get(int(one.at // WINDOW_S), 0) + 1
    numbers = range(max(counts) + 1)
    return [(number + 0.5) * WINDOW_S / 3600.0 for number in numbers], [counts.get(n, 0) / WINDOW_S for n in numbers]
