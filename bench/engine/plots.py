"""Pictures of a run: throughput and waits over the number of clients."""

from __future__ import annotations

from pathlib import Path

from bench.engine import plan
from bench.harness import plots
from bench.harness.results import Results, client_counts

#: One colour per server, distinct with any colour vision.
_COLOURS = {
    plan.OURS: plots.OURS,
    plan.PLAIN: "#777777",
    "transformers": "#e69f00",
    "transformers-cb": "#d55e00",
    "llama-cpp": "#0072b2",
    "vllm": "#009e73",
    plan.ON_VLLM: "#cc79a7",
}
_FIGURES = (
    ("tokens_per_s", "output tokens per second", 1.0),
    ("ttft_p50_s", "time to first token, s", 1.0),
    ("token_p50_s", "ms per token", 1000.0),
)


def draw(results: Results, folder: Path) -> dict[str, str]:
    """Writes a PNG file for each workload. Returns captions by file name, or nothing if matplotlib is not installed."""
    drawn = {}
    for workload in (plan.SHORT, plan.LONG):
        file = f"engine-{workload}.png"
        if client_counts(results, workload) and plots.draw(
            results, workload, _FIGURES, _COLOURS, folder / file, log=True
        ):
            about = "Throughput, time to first token and time per token over the number of clients"
            drawn[file] = f"{about}, {workload} prompts"
    return drawn
