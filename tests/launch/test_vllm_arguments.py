"""vLLM's own command line accepts the configuration that `make serve MODEL=…` writes."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: `make test-vllm`")

from vllm.config import CacheConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
from vllm.utils.argparse_utils import FlexibleArgumentParser

from serve_app.engine.loading import vllm_memory
from serve_app.engine.vllm_adapter.start import engine_arguments
from serve_app.settings import ModelArgs, parse

from .test_one_model import H100, L4, choose, facts, machine


def parsed(arguments: dict[str, Any]) -> AsyncEngineArgs:
    """Returns what vLLM's parser makes of the same arguments on its command line."""
    line: list[str] = []
    for name, value in arguments.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            line.append(option if value else f"--no-{option[2:]}")
        elif value is not None:
            line += [option, json.dumps(value) if isinstance(value, dict) else str(value)]
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    return AsyncEngineArgs.from_cli_args(parser.parse_args(line))


@pytest.mark.parametrize(
    ("model", "cards", "wish"),
    [
        ("qwen2.5-7b", [H100], {}),
        ("qwen2.5-14b", [L4, L4], {}),
        ("qwen2.5-7b", [L4], {"quantization": vllm_memory.FP8, "context": 8192}),
        ("qwen2.5-0.5b", [], {"engine": "vllm"}),
    ],
)
def test_the_engines_arguments_are_those_of_vllms_parser(
    model: str, cards: list[Any], wish: dict[str, Any], tmp_path: Path
) -> None:
    choice = choose(facts(model), machine(*cards), **wish)
    settings = parse(ModelArgs, choice.args, "args")
    arguments = engine_arguments(settings, settings.vllm, tmp_path, "auto")
    ours, theirs = AsyncEngineArgs(**arguments), parsed(arguments)
    for field in fields(AsyncEngineArgs):
        if field.name in arguments:
            mine, parsed_one = getattr(ours, field.name), getattr(theirs, field.name)
            if isinstance(mine, dict):  # the parser makes an object of it
                parsed_one = {name: getattr(parsed_one, name) for name in mine}
            assert mine == parsed_one, field.name
    assert ours.tensor_parallel_size == max(1, len(cards))


def test_what_the_arithmetic_assumes_is_what_vllm_does() -> None:
    assert CacheConfig().gpu_memory_utilization == vllm_memory.UTILIZATION
    assert vllm_memory.FP8 in QUANTIZATION_METHODS
    assert AsyncEngineArgs.gpu_memory_utilization == vllm_memory.UTILIZATION
