"""Writes the table of docs/deploy/which-gpu.md with the arithmetic of `serve-app size`: `python -m docs.gpu_table`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from serve_app.contracts.units import GIB
from serve_app.engine.errors import ModelError
from serve_app.engine.loading import sizing, vllm_memory
from serve_app.engine.loading.sizing import CARDS, GPUS, Wanted

PATH: Final = Path(__file__).parent / "deploy" / "which-gpu.md"
BEGIN: Final = "<!-- begin: written by `python -m docs.gpu_table`, not by hand -->"
END: Final = "<!-- end -->"
CONTEXT: Final = 32768
MODELS: Final = (
    "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b", "llama-3.1-8b", "qwen2.5-14b", "qwen2.5-32b",
    "llama-3.3-70b",
)  # fmt: skip
NAMES: Final = {
    "l4": "L4", "a10g": "A10G", "l40s": "L40S", "a100-80": "A100 80", "h100": "H100 80", "h200": "H200 141",
    "b200": "B200 180",
}  # fmt: skip


def table() -> str:
    """Returns the table as Markdown."""
    cards = "".join(f" {name} |" for name in NAMES.values())
    lines = [f"| model, weights |{cards}", f"|---|{'---|' * len(NAMES)}"]
    for model in MODELS:
        _, _, tensors = sizing.read_model(model)
        weights = vllm_memory.weight_bytes(tensors) / GIB
        lines.append(f"| {model}, {weights:.1f} GiB |" + "".join(f" {_cell(model, card)} |" for card in NAMES))
    return "\n".join(lines)


def _cell(model: str, card: str) -> str:
    """Returns the sequences of the whole context on the fewest GPUs that hold one."""
    for gpus in GPUS:
        try:
            found = sizing.size(model, Wanted(CONTEXT, 32, 0.0), CARDS[card], gpus=gpus)
        except ModelError:
            continue
        sequences = found.plan.kv // found.plan.demand.kv_token // CONTEXT
        return str(sequences) if gpus == 1 else f"{gpus} GPUs: {sequences}"
    return "–"


def page(text: str) -> str:
    """Returns the page's text with a new table."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PATH.write_text(page(PATH.read_text(encoding="utf-8")), encoding="utf-8")
