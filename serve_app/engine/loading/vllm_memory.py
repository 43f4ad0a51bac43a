"""Plans the memory of vLLM on GPUs before anything is downloaded or started.

Weights, K and V are counted as vLLM divides them: each GPU of a tensor-parallel group holds its share of every layer.
Activations, CUDA graphs and the context of CUDA are estimates. vLLM measures them when it starts, and uses all
remaining memory for K and V.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.contracts.units import GIB
from serve_app.engine.errors import ModelError
from serve_app.engine.loading.checkpoint import Tensor
from serve_app.engine.loading.memory_plan import CUDA_BYTES, Demand, Device, MemoryPlan, Part, is_in_layer

UTILIZATION = 0.92  # share of a GPU's memory that vLLM uses: its default for gpu_memory_utilization
FP8 = "fp8_per_tensor"  # vLLM's name for quantizing a model's weights while they are loaded
FP8_CAPABILITY = (8, 9)  # CUDA compute capability of the first cards that compute in fp8
GRAPHS_BYTES = 512 * 2**20  # size of the CUDA graphs on each GPU
MIN_CONTEXT = 2048  # tokens; a shorter context is of little use
BYTES_OF_4_BITS = 0.56  # bytes of a 4-bit weight, including its share of the group's scales
_ITEM = 2  # bytes of a value in bfloat16 or float16
_ACTIVATIONS, _LOGITS = 8, 3  # vectors of `hidden_size` per token; copies of a step's logits in float32


def step_tokens(memory: int, card: str = "") -> int:
    """vLLM's default number of tokens per step on a card with this memory, in bytes."""
    if memory >= 160 * GIB:
        return 16384
    return 8192 if memory >= 70 * GIB and "a100" not in card.lower() else 2048


def budget(total: int, free: int | None = None) -> int:
    """Bytes of a GPU that vLLM may use. `free` is the GPU's free memory, if it is known."""
    share = int(total * UTILIZATION)
    return share if free is None else min(share, free)


def weight_bytes(tensors: Mapping[str, Tensor], quantization: str | None = None) -> int:
    """Bytes of the weights as vLLM loads them: as stored, but float32 as bfloat16.

    With `FP8`, a weight in a layer takes one byte.
    """
    total = 0
    for name, tensor in tensors.items():
        if quantization is not None and is_in_layer(name):
            total += tensor.elements
        else:
            total += tensor.elements * _ITEM if tensor.dtype == "F32" else tensor.num_bytes
    return total


def is_quantized(config: Mapping[str, Any]) -> bool:
    """Whether a model's files hold quantized weights."""
    return bool(config.get("quantization_config") or config.get("compression_config"))


def can_divide(config: Mapping[str, Any], gpus: int) -> bool:
    """Whether vLLM can divide the model's attention heads among the GPUs."""
    heads = (config.get("text_config") or config).get("num_attention_heads")
    return heads is None or int(heads) % gpus == 0


def demand_of(
    name: str,
    config: Mapping[str, Any],
    weights: int,
    *,
    context: int,
    gpus: int = 1,
    sequences: int = 256,
    step: int = 8192,
) -> Demand:
    """The demand of one replica. `weights` is in bytes and `step` in tokens; the result's `step` is in bytes per GPU.

    Raises:
        KeyError: the configuration has no layers or heads.
    """
    text = config.get("text_config") or config
    layers, heads, hidden = (int(text[key]) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    size = int(text.get("head_dim") or hidden // heads)
    kv_heads = int(text.get("num_key_value_heads") or heads)
    # Each GPU has at least one head of K and V. With more GPUs than heads, several GPUs have the same head.
    values = 2 * size * max(1, -(-kv_heads // gpus)) * gpus
    if rank := text.get("kv_lora_rank"):  # DeepSeek: compressed, and the same on each GPU
        values = (int(rank) + int(text["qk_rope_head_dim"])) * gpus
    wide = int(text.get("intermediate_size") or 4 * hidden)
    activations = step * (_ACTIVATIONS * hidden + 3 * wide // gpus) * _ITEM
    logits = _LOGITS * min(sequences, step) * int(text.get("vocab_size", 0)) * 4
    return Demand(
        name=name,
        dtype="stored",
        weights=weights,
        layers=layers,
        layer=weights // layers,
        largest=weights // layers,
        kv_token=layers * values * _ITEM,
        step=activations + logits + CUDA_BYTES + GRAPHS_BYTES,
        context=context,
        most_tokens=sequences * context,
    )


@dataclass(frozen=True, slots=True)
class Change:
    """A change that makes a model fit: its text, and the launcher's variable with the new value, if there is one."""

    text: str
    variable: str = ""


def changes(
    name: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    context: int,
    step: int,
    sequences: int,
    budget: int,
    gpus: int,
    computes_fp8: bool,
    most_gpus: int = 8,
) -> list[Change]:
    """Returns changes, each of which alone makes the model fit. `budget` is per GPU, in bytes.

    The order is: a shorter context, more GPUs, fp8, a variant with 4 bits.
    """

    def fits(weights: int, context: int = context, gpus: int = gpus) -> bool:
        demand = demand_of(name, config, weights, context=context, gpus=gpus, sequences=sequences, step=step)
        try:
            plan(demand, [Device(f"cuda:{index}", budget) for index in range(gpus)])
        except ModelError:
            return False
        return True

    stored = weight_bytes(tensors)
    found = []
    shorter = context // 2
    while shorter >= MIN_CONTEXT and not fits(stored, context=shorter):
        shorter //= 2
    if shorter >= MIN_CONTEXT:
        found.append(Change(f"lower the context to {shorter}", f"CONTEXT={shorter}"))
    more = (number for number in range(gpus + 1, most_gpus + 1) if can_divide(config, number))
    if (enough := next((number for number in more if fits(stored, gpus=number)), None)) is not None:
        found.append(Change(f"use {enough} such GPUs", f"GPUS={enough}"))
    if not is_quantized(config):
        if computes_fp8 and fits(weight_bytes(tensors, FP8)):
            found.append(Change("quantize the weights to fp8 while they are loaded", f"QUANTIZATION={FP8}"))
        in_layers = sum(tensor.elements for key, tensor in tensors.items() if is_in_layer(key))
        rest = weight_bytes({key: tensor for key, tensor in tensors.items() if not is_in_layer(key)})
        if fits(int(in_layers * BYTES_OF_4_BITS) + rest):
            found.append(Change("choose a variant of the model that is quantized to 4 bits (AWQ or GPTQ)"))
    return found


def plan(demand: Demand, devices: Sequence[Device]) -> MemoryPlan:
    """The bytes of each GPU of one replica. `Device.free` is the GPU's `budget`.

    Raises:
        ModelError: a sequence of `demand.context` tokens does not fit.
    """
    each = demand.weights // len(devices) + demand.step
    kv = max(0, min(device.free for device in devices) - each) * len(devices)
    if kv < demand.least_kv:
        needed = each + demand.least_kv // len(devices)
        raise ModelError(
            f"Too little memory for {demand.name} on {len(devices)} GPU{'s' * (len(devices) > 1)}: vLLM may use "
            f"{min(device.free for device in devices) / GIB:.1f} GiB of each, but needs about {needed / GIB:.1f} GiB "
            f"({demand.weights / len(devices) / GIB:.1f} GiB for weights, "
            f"{demand.least_kv / len(devices) / GIB:.1f} GiB for K and V of {demand.context:,} tokens, "
            f"{demand.step / GIB:.1f} GiB for activations and CUDA)"
        )
    parts = [
        Part(device, demand.layers, demand.weights // len(devices), kv // len(devices), demand.step)
        for device in devices
    ]
    return MemoryPlan(demand, kv, tuple(parts))
