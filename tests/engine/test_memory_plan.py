"""The memory plan for models of 1 to 120 B on fake devices: it fits, or is refused with a change that makes it fit."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import infer_auto_device_map, init_empty_weights
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from serve_app.engine.config import EngineSettings
from serve_app.engine.errors import ModelError
from serve_app.engine.loading import memory_plan, placement
from serve_app.engine.loading.memory_plan import GIB, Demand, Device, MemoryPlan

# As published; (type, sizes).
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "1 B": ("llama", {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
                      "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True}),
    "8 B": ("llama", {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
                      "intermediate_size": 14336, "vocab_size": 128256}),
    "32 B": ("qwen2", {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 40,
                       "num_key_value_heads": 8, "intermediate_size": 27648, "vocab_size": 152064}),
    "47 B": ("mixtral", {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
                         "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000}),
    "70 B": ("llama", {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
                       "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256}),
    "117 B": ("gpt_oss", {"hidden_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64,
                          "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880,
                          "num_local_experts": 128, "vocab_size": 201088}),
}  # fmt: skip
SETTINGS = EngineSettings(model="m", dtype="bfloat16", device_map="auto")


@cache
def empty(name: str) -> Any:
    kind, sizes = MODELS[name]
    config = AutoConfig.for_model(kind, max_position_embeddings=131072, **sizes)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.tie_weights()
    return model


@cache
def demand(name: str) -> Demand:
    model = empty(name)
    sizes = {tensor: parameter.numel() for tensor, parameter in model.named_parameters()}
    weights = placement.weight_bytes(sizes, "bfloat16")
    return memory_plan.demand_of(name, model.config.to_dict(), sizes, weights, SETTINGS)


def gpus(number: int, gib: int) -> list[Device]:
    return [Device(f"cuda:{index}", gib * GIB) for index in range(number)]


def check(plan: MemoryPlan) -> None:
    assert sum(part.layers for part in plan.parts) == plan.demand.layers
    assert sum(part.weights for part in plan.parts) == pytest.approx(plan.demand.weights, rel=0.01)
    for part in plan.parts:
        assert part.weights + part.kv + part.step <= part.device.usable * 1.001
        assert part.left > 0


@pytest.mark.parametrize("gib", [24, 48, 80, 141])
@pytest.mark.parametrize("number", [1, 2, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_each_model_fits_or_is_refused_with_a_change_that_makes_it_fit(name: str, number: int, gib: int) -> None:
    devices, needs = gpus(number, gib), demand(name)
    try:
        plan = memory_plan.plan(needs, devices, None)
    except ModelError as refusal:
        message = str(refusal)
    else:
        check(plan)
        assert needs.least_kv <= plan.kv <= needs.most_kv
        return
    assert needs.weights + needs.least_kv + number * needs.step > number * devices[0].usable - needs.layer * number
    assert f"{number * gib}.0 GiB are free" in message
    if found := re.search(r"use (\d+) such GPUs", message):
        check(memory_plan.plan(needs, gpus(int(found[1]), gib), None))
        with pytest.raises(ModelError):
            memory_plan.plan(needs, gpus(int(found[1]) - 1, gib), None)
    else:
        found = re.search(r"lower max_context to (\d+), and kv_cache_memory to (\d+) MiB", message)
        assert found, message
        check(memory_plan.plan(replace(needs, context=int(found[1])), devices, int(found[2]) * 2**20))


@pytest.mark.parametrize(
    ("name", "number", "gib", "fits"),
    [
        ("1 B", 1, 24, True), ("8 B", 1, 24, True), ("32 B", 1, 48, False), ("32 B", 1, 80, True),
        ("47 B", 1, 80, False), ("47 B", 2, 80, True), ("70 B", 1, 141, False), ("70 B", 2, 80, True),
        ("70 B", 2, 141, True), ("70 B", 4, 48, True), ("70 B", 8, 24, True), ("117 B", 2, 141, True),
        ("117 B", 2, 80, False), ("117 B", 4, 80, True),
    ],
)  # fmt: skip
def test_what_is_known_to_fit_fits_and_nothing_else_does(name: str, number: int, gib: int, fits: bool) -> None:
    try:
        memory_plan.plan(demand(name), gpus(number, gib), None)
    except ModelError:
        assert not fits
    else:
        assert fits


@pytest.mark.parametrize(("name", "number", "gib"), [("8 B", 2, 24), ("70 B", 4, 80), ("117 B", 8, 48)])
def test_accelerate_places_all_weights_within_what_the_plan_leaves_for_them(name: str, number: int, gib: int) -> None:
    plan = memory_plan.plan(demand(name), gpus(number, gib), None)
    limits = memory_plan.applied(SETTINGS, plan).max_memory
    model = empty(name)
    placed = infer_auto_device_map(
        model, max_memory=dict(limits or {}), no_split_module_classes=list(model._no_split_modules)
    )
    assert set(placed.values()) <= set(range(number))


def test_a_cache_that_is_too_large_is_refused_with_the_size_that_fits() -> None:
    with pytest.raises(ModelError, match="lower kv_cache_memory to") as refusal:
        memory_plan.plan(demand("8 B"), gpus(1, 24), 16 * GIB)
    found = re.search(r"kv_cache_memory to (\d+) MiB", str(refusal.value))
    assert found
    check(memory_plan.plan(demand("8 B"), gpus(1, 24), int(found[1]) * 2**20))


def test_a_float32_model_that_would_fit_as_bfloat16_says_so() -> None:
    needs = demand("8 B")
    wide = replace(
        needs, dtype="float32", weights=2 * needs.weights, layer=2 * needs.layer, kv_token=2 * needs.kv_token,
        step=2 * needs.step,
    )  # fmt: skip
    with pytest.raises(ModelError, match="set dtype to bfloat16"):
        memory_plan.plan(wide, gpus(1, 24), wide.least_kv)


def test_the_plan_says_where_everything_goes() -> None:
    lines = memory_plan.plan(demand("70 B"), gpus(4, 80), 40 * GIB).lines()
    assert lines[0] == "Memory of 70 B as bfloat16: weights 131.4 GiB, K and V 40.0 GiB for 131,072 tokens"
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["cuda", "cuda", "cuda", "cuda"]
    assert "20 of 80 layers" in lines[1]


def test_a_model_with_a_config_of_an_unusual_form_is_refused_for_what_is_certain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"weight": torch.zeros(2**20)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unusual", "depth": 3}))
    settings = EngineSettings(model="m", kv_cache_memory="1GiB")
    assert memory_plan.for_model("m", tmp_path, settings) is None
    monkeypatch.setattr(placement, "available_memory", lambda: GIB)
    with pytest.raises(ModelError, match=r"1\.0 GiB are available, m with its K and V needs 1\.0 GiB: lower kv_cache"):
        memory_plan.for_model("m", tmp_path, settings)
