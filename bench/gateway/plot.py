"""Plots throughput, waits and processor time against the number of clients."""

from __future__ import annotations

from pathlib import Path

from bench.gateway.session import WORKLOAD
from bench.gateway.systems import BARE, FULL, LITELLM
from bench.harness import plots
from bench.harness.results import Results

_COLOURS = {FULL: plots.OURS, BARE: "#0072b2", LITELLM: "#d55e00"}
_FIGURES = (
    ("requests_per_s", "requests per second", 1.0),
    ("p50_ms", "ms from request to reply, median", 1.0),
    ("cpu_ms", "processor ms per request", 1.0),
)


def draw(results: Results, folder: Path) -> dict[str, str]:
    """Writes the SVG file. Returns its caption by file name, or nothing if matplotlib is not installed."""
    if not plots.draw(results, WORKLOAD, _FIGURES, _COLOURS, folder / "gateway.svg", log=False):
        return {}
    return {"gateway.svg": "Requests per second, waits and processor time per request over the number of clients"}
