"""Pictures of a run: throughput and waits over the number of clients."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from bench.engine import plan
from bench.engine.results import Results, client_counts, measured, spread, title

#: One colour a server, told apart with any colour vision; ours is the dark one.
_COLOURS = {
    plan.OURS: "#000000",
    plan.PLAIN: "#777777",
    "transformers": "#e69f00",
    "transformers-cb": "#d55e00",
    "llama-cpp": "#0072b2",
    "vllm": "#009e73",
}
_FIGURES = (
    ("tokens_per_s", "output tokens per second", 1),
    ("ttft_p50_s", "time to first token, s", 1),
    ("token_p50_s", "ms per token", 1000),
)


def draw(results: Results, folder: Path) -> dict[str, str]:
    """Write the PNG files; name -> what it shows. Nothing, with one line, where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        print("bench: no plots: matplotlib is missing (pip install -e '.[bench]')", file=sys.stderr)
        return {}
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawn = {}
    for workload, prompt in ((plan.SHORT, "short"), (plan.LONG, "long")):
        counts = client_counts(results, workload)
        if not counts:
            continue
        figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
        for axis, (name, label, scale) in zip(axes, _FIGURES, strict=True):
            _lines(axis, results, workload, counts, name, scale)
            axis.set(xlabel="clients", ylabel=label, xscale="log", yscale="log")
            axis.set_xticks(counts, [str(count) for count in counts])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=max(1, len(labels)), frameon=False)
        file = f"engine-{prompt}.png"
        figure.savefig(folder / file, dpi=100)
        plt.close(figure)
        drawn[file] = f"Throughput, time to first token and time per token over the number of clients, {prompt} prompts"
    return drawn


def _lines(axis: Any, results: Results, workload: str, counts: list[int], figure: str, scale: float) -> None:
    for server in measured(results, workload):
        points = [(n, found) for n in counts if (found := spread(results, server, workload, n, figure)) is not None]
        if not points:
            continue
        middle = [scale * found.median for _, found in points]
        below = [scale * (found.median - found.low) for _, found in points]
        above = [scale * (found.high - found.median) for _, found in points]
        axis.errorbar(
            [n for n, _ in points],
            middle,
            yerr=[below, above],
            label=title(results, server),
            color=_COLOURS.get(server),
            marker="o",
            markersize=4,
            linewidth=2.5 if server == plan.OURS else 1.5,
            capsize=2,
        )
