"""Plots a simulated day: multiplier of the limits, goodput, fairness and refusals by hour."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from bench.pressure.record import CONTRACT, FULL, LATE, LOST, SHARE, WAIT

#: Distinct with any colour vision.
_COLOURS = {SHARE: "#0072b2", CONTRACT: "#56b4e9", WAIT: "#d55e00", FULL: "#e69f00", LOST: "#999999", LATE: "#000000"}


def draw(results: dict[str, Any], folder: Path) -> dict[str, str]:
    """Writes the SVG file. Returns its caption by file name, or nothing if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        print("bench: no plot: matplotlib is missing (pip install -e '.[bench]')", file=sys.stderr)
        return {}
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "pressure"  # the same figures give the same file
    import matplotlib.pyplot as plt

    day = results["day"]
    hours = day["hours"]
    figure, axes = plt.subplots(4, 1, figsize=(11, 11), sharex=True, layout="constrained")
    level, work, fair, refused = axes
    level.plot(hours, day["multiplier"], color="#000000", label="mean")
    level.plot(hours, day["least_multiplier"], color="#d55e00", linewidth=0.8, label="minimum")
    level.set(ylabel="multiplier of the default\ncontract's tokens", yscale="log")
    work.plot(hours, day["capacity"], color="#999999", label="capacity of the replicas", drawstyle="steps-mid")
    work.plot(hours, day["offered"], color="#0072b2", linewidth=0.8, label="requested by the crowd")
    work.plot(hours, day["goodput"], color="#000000", label="goodput, crowd and batch")
    work.set(ylabel="tokens per second")
    fair.plot(hours, [float("nan") if value is None else value for value in day["fairness"]], color="#009e73")
    fair.set(ylabel="Jain's index of tokens per\nweight, limited accounts", ylim=(0.5, 1.02))
    for kind, counts in day["refusals"].items():
        if any(counts):
            refused.plot(hours, [max(0.5, count) for count in counts], color=_COLOURS[kind], label=kind)
    refused.set(ylabel="refused attempts in 5 minutes", yscale="log", xlabel="hour", xlim=(hours[0], hours[-1]))
    for axis in axes:
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(loc="upper left", frameon=False, fontsize=8)
    figure.savefig(folder / "pressure.svg", metadata={"Date": None})
    plt.close(figure)
    return {"pressure.svg": "Multiplier, goodput against capacity, fairness and refusals over a simulated day"}
