"""Measures the quality loss of int8: perplexity of two texts in int8 and in float32, with the engine's runners.

    python -m bench.perplexity [--model FOLDER] [--dtypes float32 int8] [--groups 64 4096] [--rows 32] [--json OUT]

Each token is predicted from all tokens before it. The next tokens are given as a correct draft, `--rows` at a time, so
the kernels and the paged cache that serve requests are measured. The exit status is 1 when int8 is worse than `LIMIT`
times float32 on any text.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from serve_app.contracts.generation import SamplingParams
from serve_app.engine.config import EngineSettings
from serve_app.engine.loading import loader
from serve_app.engine.models import quantize
from serve_app.engine.models.choose_runner import create_runner
from serve_app.engine.request import GenerationRequest
from serve_app.engine.scheduling.sequence import Chunk, TokenSequence
from serve_app.model.bundled import ensure_bundled_model
from serve_app.settings import home_dir

TEXTS = Path(__file__).with_name("texts")
REFERENCE = "float32"
LIMIT = 1.05  # maximum ratio that the engine promises for int8


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.perplexity", description=__doc__)
    parser.add_argument("--model", help="folder, GGUF file or hub name; default: the bundled model")
    parser.add_argument("--dtypes", nargs="+", default=[REFERENCE, "int8"])
    parser.add_argument(
        "--groups", nargs="+", type=int, default=[], help="also int8 in plain torch, with these scale groups"
    )
    parser.add_argument("--rows", type=int, default=32, help="tokens per step; 1 always uses the decoding path")
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args(arguments)
    model = options.model or str(ensure_bundled_model(home_dir(), lambda line: print(line, file=sys.stderr)))
    results = measure(model, options.dtypes, options.groups, options.rows)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))
    worst = max((ratio(results, "int8", text) or 0.0 for text in results["tokens"]), default=0.0)
    if worst > LIMIT:
        print(f"int8 is worse than {LIMIT} times {REFERENCE}", file=sys.stderr)
        return 1
    return 0


def measure(model: str, dtypes: list[str], groups: list[int], rows: int) -> dict[str, Any]:
    """Perplexity of each text under each dtype, one model at a time in memory."""
    found: dict[str, Any] = {"rows": rows, "tokens": {}, "runners": {}, "perplexity": {}}
    kinds: list[tuple[str, dict[str, Any], int]] = [(dtype, {"dtype": dtype}, quantize.GROUP) for dtype in dtypes]
    kinds += [(f"int8, {group} to a scale", {"dtype": "int8", "native": False}, group) for group in groups]
    for name, chosen, group in kinds:
        settings = EngineSettings(model=model, kv_cache_memory="256MiB", max_running=1, **chosen)  # type: ignore[arg-type]
        loaded = loader.load(settings)
        with _activations_to_a_scale(group):
            runner = create_runner(loaded.model, settings, loaded.weights)
            found["runners"][name] = type(runner).__name__
            found["perplexity"][name] = {}
            for path in sorted(TEXTS.glob("*.txt")):
                tokens = loaded.tokenizer(path.read_text(), add_special_tokens=False)["input_ids"]
                found["tokens"][path.stem] = len(tokens)
                found["perplexity"][name][path.stem] = perplexity(runner, settings.block_size, tokens, rows)
        del loaded, runner
    return found


@contextlib.contextmanager
def _activations_to_a_scale(group: int) -> Iterator[None]:
    """Changes the group size of int8 in plain torch. The native kernels only have the engine's group size."""
    own, quantize.GROUP = quantize.GROUP, group
    try:
        yield
    finally:
        quantize.GROUP = own


def perplexity(runner: Any, block_size: int, tokens: list[int], rows: int) -> float:
    """exp of the mean negative log-likelihood of all tokens but the first.

    Raises:
        ValueError: fewer than two tokens, or more than the runner's cache holds.
    """
    blocks = -(-len(tokens) // block_size)
    if len(tokens) < 2 or blocks > runner.num_blocks:
        raise ValueError(f"a text of {len(tokens)} tokens can't be measured")
    sequence = TokenSequence(
        GenerationRequest("text", tuple(tokens[:1]), SamplingParams(max_tokens=1)), 0, 0.0, len(tokens)
    )
    sequence.block_table = list(range(blocks))
    total = 0.0
    for start in range(0, len(tokens) - 1, rows):
        known = tokens[: start + 1]
        sequence.tokens[:] = known
        guess = tuple(tokens[start + 1 : min(start + rows, len(tokens) - 1)])
        logits = runner.execute([Chunk(sequence, start, 1 + len(guess), draft=guess)])
        truth = tokens[start + 1 : start + 1 + len(logits)]
        picked = logits.double().log_softmax(-1)[torch.arange(len(truth)), truth]
        total -= float(picked.sum())
        sequence.num_computed = start + len(logits)
    return math.exp(total / (len(tokens) - 1))


def ratio(results: dict[str, Any], dtype: str, text: str) -> float | None:
    """Ratio of the perplexity to the reference's; None if either was not measured."""
    values = results["perplexity"]
    if dtype not in values or REFERENCE not in values:
        return None
    return float(values[dtype][text] / values[REFERENCE][text])


def table(results: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    texts = list(results["tokens"])
    lines = ["| |" + "|".join(f" {text} ({results['tokens'][text]} tokens) " for text in texts) + "|"]
    lines.append("|---" * (len(texts) + 1) + "|")
    for dtype, values in results["perplexity"].items():
        cells = []
        for text in texts:
            against = ratio(results, dtype, text)
            times = "" if against is None or dtype == REFERENCE else f", {against:.4f} times {REFERENCE}"
            cells.append(f" {values[text]:.4f}{times} ")
        lines.append(f"| {dtype} ({results['runners'][dtype]}) |" + "|".join(cells) + "|")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
