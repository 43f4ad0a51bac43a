"""vLLM's memory on GPUs: what its tensor-parallel groups divide, and the smallest changes for what does not fit."""

from __future__ import annotations

import pytest

from serve_app.contracts.units import GIB
from serve_app.engine.errors import ModelError
from serve_app.engine.loading import sizing, vllm_memory
from serve_app.engine.loading.checkpoint import Tensor
from serve_app.engine.loading.memory_plan import Demand, Device

QWEN_7B = sizing.MODELS["qwen2.5-7b"]
CONTEXT = 32768


def tensors(config: dict[str, object]) -> dict[str, Tensor]:
    return {name: Tensor("BF16", size, 2 * size) for name, size in sizing.tensor_sizes(config).items()}


def demand(gpus: int = 1, config: dict[str, object] = QWEN_7B) -> Demand:
    weights = vllm_memory.weight_bytes(tensors(config))
    return vllm_memory.demand_of("m", config, weights, context=CONTEXT, gpus=gpus)


def test_k_and_v_of_a_token_are_counted_from_the_heads() -> None:
    assert demand().kv_token == 28 * 2 * 4 * 128 * 2  # layers, K and V, heads, values, bytes
    assert demand(4).kv_token == demand().kv_token
    assert demand(8).kv_token == 2 * demand().kv_token  # 4 heads: each is on two GPUs
    deepseek = QWEN_7B | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert demand(2, deepseek).kv_token == 28 * (512 + 64) * 2 * 2  # compressed, on each GPU


def test_a_gpu_holds_its_share_of_every_layer() -> None:
    devices = [Device(f"cuda:{index}", 20 * GIB) for index in range(2)]
    plan = vllm_memory.plan(demand(2), devices)
    assert [part.layers for part in plan.parts] == [28, 28]
    assert sum(part.weights for part in plan.parts) == pytest.approx(demand(2).weights, abs=2)
    for part in plan.parts:
        assert part.weights + part.kv + part.step <= 20 * GIB
    # The smaller card decides.
    smaller = vllm_memory.plan(demand(2), [devices[0], Device("cuda:1", 15 * GIB)])
    assert smaller.kv == pytest.approx(plan.kv - 2 * 5 * GIB, abs=4)


def test_weights_count_as_vllm_loads_them() -> None:
    found = {
        "model.embed_tokens.weight": Tensor("BF16", 100, 200),
        "model.layers.0.mlp.up_proj.qweight": Tensor("I32", 10, 40),  # packed
        "model.layers.0.norm.weight": Tensor("F32", 8, 32),
    }
    assert vllm_memory.weight_bytes(found) == 200 + 40 + 16  # float32 is loaded as bfloat16
    plain = {"model.embed_tokens.weight": Tensor("BF16", 100, 200), "model.layers.0.w": Tensor("BF16", 10, 20)}
    assert vllm_memory.weight_bytes(plain, vllm_memory.FP8) == 200 + 10


def test_what_does_not_fit_is_refused_with_its_parts() -> None:
    with pytest.raises(ModelError, match=r"may use 14\.0 GiB of each, but needs about .* for K and V of 32,768 tokens"):
        vllm_memory.plan(demand(), [Device("cuda:0", 14 * GIB)])


@pytest.mark.parametrize(
    ("model", "budget", "fp8", "changes"),
    [
        ("qwen2.5-7b", 18.2, False, ["CONTEXT=16384", "GPUS=2", ""]),
        ("qwen2.5-7b", 13.0, True, ["GPUS=2", "QUANTIZATION=fp8_per_tensor", ""]),
        ("qwen2.5-7b", 13.0, False, ["GPUS=2", ""]),
        ("llama-3.3-70b", 20.0, True, []),
    ],
)
def test_each_change_alone_makes_it_fit_and_the_smallest_is_first(
    model: str, budget: float, fp8: bool, changes: list[str]
) -> None:
    config = sizing.MODELS[model]
    found = vllm_memory.changes(
        "m",
        config,
        tensors(config),
        context=CONTEXT,
        step=8192,
        sequences=256,
        budget=int(budget * GIB),
        gpus=1,
        computes_fp8=fp8,
        most_gpus=4,
    )
    assert [change.variable for change in found] == changes


def test_a_model_that_is_quantized_is_not_quantized_again() -> None:
    config = QWEN_7B | {"quantization_config": {"quant_method": "awq"}}
    found = vllm_memory.changes(
        "m", config, tensors(QWEN_7B), context=CONTEXT, step=2048, sequences=8, budget=12 * GIB, gpus=1,
        computes_fp8=True,
    )  # fmt: skip
    assert [change.variable for change in found] == ["GPUS=2"]


def test_a_card_decides_how_many_tokens_a_step_has() -> None:
    sizes = {name: vllm_memory.step_tokens(card.memory, card.name) for name, card in sizing.CARDS.items()}
    assert (sizes["l4"], sizes["a100-80"], sizes["h100"], sizes["b200"]) == (2048, 2048, 8192, 16384)
