"""Plans a model's memory before anything is loaded: weights, K and V, and the activations of a step.

Weights, K and V are counted. Activations, and the memory that CUDA reserves, are estimates that no GPU has confirmed
yet. A model on several devices is split at layer boundaries, so each device gets whole layers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from serve_app.contracts.units import GIB
from serve_app.engine.config import EngineSettings
from serve_app.engine.errors import ModelError
from serve_app.engine.loading import checkpoint, placement

SPARE = 0.05  # share of a device's free memory that allocators cannot use
CUDA_BYTES = 600 * 2**20  # per process and GPU: context, kernels, workspaces
ITEM = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}  # bytes of one value
_STEP = 8  # a step holds, for each token, this many vectors of `hidden_size` and three of `intermediate_size`
_LOGITS = 3  # copies of a step's logits in float32


@dataclass(frozen=True, slots=True)
class Device:
    name: str  # cpu, cuda:0
    free: int  # bytes

    @property
    def usable(self) -> int:
        return max(0, int(self.free * (1 - SPARE)) - (CUDA_BYTES if self.name.startswith("cuda") else 0))


@dataclass(frozen=True, slots=True)
class Demand:
    """The memory that a model needs; sizes are in bytes."""

    name: str
    dtype: str
    weights: int
    layers: int  # number of layers
    layer: int  # mean weights of one layer
    largest: int  # the larger of `layer` and the largest tensor outside the layers
    kv_token: int  # K and V of one token, over all layers
    step: int  # activations of a step, on each device
    context: int  # tokens of the longest sequence
    most_tokens: int  # maximum tokens in the KV cache: all running sequences at full length

    @property
    def least_kv(self) -> int:
        """Minimum bytes of K and V: one sequence of the full context length."""
        return self.context * self.kv_token

    @property
    def most_kv(self) -> int:
        """Maximum bytes of K and V; more would never be used."""
        return self.most_tokens * self.kv_token


@dataclass(frozen=True, slots=True)
class Part:
    """One device's part of the model; sizes are in bytes."""

    device: Device
    layers: int
    weights: int
    kv: int
    step: int

    @property
    def left(self) -> int:
        return self.device.free - self.weights - self.kv - self.step


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    demand: Demand
    kv: int  # bytes of K and V, over all devices
    parts: tuple[Part, ...]

    def lines(self) -> list[str]:
        """The plan as human-readable lines."""
        demand, tokens = self.demand, self.kv // self.demand.kv_token
        return [
            f"Memory of {demand.name} as {demand.dtype}: weights {_gib(demand.weights)}, "
            f"K and V {_gib(self.kv)} for {tokens:,} tokens",
            *(
                f"  {part.device.name}: {part.layers} of {demand.layers} layers, weights {_gib(part.weights)}, K and V "
                f"{_gib(part.kv)}, activations {_gib(part.step)}, left {_gib(part.left)} of {_gib(part.device.free)}"
                for part in self.parts
            ),
        ]


def for_model(name: str, folder: Path, settings: EngineSettings) -> MemoryPlan | None:
    """The plan for the model in `folder` on this machine's devices. The caller has checked the files.

    None if the settings assign memory or layers to devices (`max_memory`, or `device_map` as a mapping), or if
    config.json has an unusual form.

    Raises:
        ModelError: the model does not fit.
    """
    found = placement.devices_of(settings)
    if found is None:
        return None
    sizes = checkpoint.tensor_sizes(folder)
    weights = placement.weight_bytes(sizes, settings.dtype)
    kv = None if settings.kv_cache_memory == "auto" else settings.kv_cache_memory
    try:
        demand = demand_of(name, json.loads((folder / "config.json").read_text()), sizes, weights, settings)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        # The config.json is unusual, but transformers may support it. So only weights, K and V are checked, in total.
        needed = weights + (0 if kv is None else kv)
        remedy = "lower kv_cache_memory, or choose a smaller model"
        placement.require_memory(needed, f"{name} with its K and V", remedy, sum(free for _, free in found))
        return None
    return plan(demand, [Device(*one) for one in found], kv)


def applied(settings: EngineSettings, chosen: MemoryPlan | None) -> EngineSettings:
    """The settings with the plan's decisions: the KV cache size and, with several GPUs, each GPU's limit for weights.

    Raises:
        ModelError: `kv_cache_memory` is auto, and there is no plan.
    """
    if chosen is None:
        if settings.kv_cache_memory == "auto":
            raise ModelError(
                "kv_cache_memory auto is not possible with max_memory, a mapping as device_map, or this model's "
                "config.json: write a size, such as 16GiB."
            )
        return settings
    changes: dict[str, Any] = {"kv_cache_memory": chosen.kv}
    if len(chosen.parts) > 1:  # accelerate would fill the first devices and leave no room for K and V
        limits = [part.device.usable - part.kv - part.step for part in chosen.parts]
        limits[0] += chosen.demand.largest  # accelerate reserves this for offloaded weights; here, there are none
        changes["max_memory"] = dict(enumerate(limits))
    return settings.model_copy(update=changes)


def demand_of(
    name: str, config: Mapping[str, Any], sizes: Mapping[str, int], weights: int, settings: EngineSettings
) -> Demand:
    """The demand. `sizes` has each tensor's number of elements, by name; `weights` is their total bytes when loaded.

    Raises:
        KeyError: the configuration has no layers or heads.
    """
    text = config.get("text_config") or config
    layers, heads = int(_any(text, "num_hidden_layers", "n_layer")), int(_any(text, "num_attention_heads", "n_head"))
    hidden = int(_any(text, "hidden_size", "n_embd"))
    size = int(text.get("head_dim") or hidden // heads)
    values = 2 * int(text.get("num_key_value_heads") or heads) * size
    if text.get("kv_lora_rank"):  # DeepSeek: K and V are stored for each head, uncompressed
        values = heads * int(text["qk_nope_head_dim"] + text["qk_rope_head_dim"] + text["v_head_dim"])
    item = ITEM[settings.compute_dtype]
    kv_item = ITEM["float16"] if settings.dtype == "int8" else item  # the compiled kernels store float16
    wide = int(text.get("intermediate_size") or 4 * hidden)
    rows = settings.prefill_chunk + settings.max_running
    logits = (settings.max_running + settings.speculation_rows) * int(text.get("vocab_size", 0))
    in_layers = sum(number for tensor, number in sizes.items() if is_in_layer(tensor))
    total = max(1, sum(sizes.values()))
    layer = weights * in_layers // total // layers
    return Demand(
        name,
        settings.dtype,
        weights,
        layers,
        layer,
        max(layer, *(number * weights // total for tensor, number in sizes.items() if not is_in_layer(tensor))),
        layers * values * kv_item,
        rows * (_STEP * hidden + 3 * wide) * item + _LOGITS * logits * ITEM["float32"],
        min(settings.max_context, int(text.get("max_position_embeddings") or settings.max_context)),
        settings.max_running * settings.max_context,
    )


def plan(demand: Demand, devices: Sequence[Device], kv: int | None) -> MemoryPlan:
    """The layers and bytes of each device. K and V get `kv` bytes; with None, as many as fit and can be used.

    Raises:
        ModelError: it does not fit; the message has the numbers and a change that makes it fit.
    """
    wanted = kv
    if wanted is None:
        low, high = demand.least_kv, demand.most_kv
        if _fits(demand, devices, low):
            while high - low > demand.kv_token:  # precise to one token
                middle = (low + high) // 2
                low, high = (middle, high) if _fits(demand, devices, middle) else (low, middle)
        wanted = high if _fits(demand, devices, high) else low
    counts = _layer_counts(demand, devices, wanted)
    if counts is None:
        raise ModelError(_refusal(demand, devices, wanted))
    return MemoryPlan(demand, wanted, tuple(_parts(demand, devices, wanted, counts)))


def _fits(demand: Demand, devices: Sequence[Device], kv: int) -> bool:
    return _layer_counts(demand, devices, kv) is not None


def _layer_counts(demand: Demand, devices: Sequence[Device], kv: int) -> list[int] | None:
    """The number of layers of each device, as evenly as the memory allows; None if there is too little memory."""
    around = demand.weights - demand.layers * demand.layer  # embedding, norm, head: on the first and last device
    share = demand.layer + kv / demand.layers
    room = []
    for index, device in enumerate(devices):
        ends = (index == 0) + (index == len(devices) - 1)
        room.append(int(max(0, device.usable - demand.step - around * ends // 2) / share))
    if sum(room) < demand.layers:
        return None
    counts = [0] * len(devices)
    for _ in range(demand.layers):
        open_now = [index for index in range(len(devices)) if counts[index] < room[index]]
        counts[min(open_now, key=lambda index: counts[index])] += 1
    return counts


def _parts(demand: Demand, devices: Sequence[Device], kv: int, counts: Sequence[int]) -> list[Part]:
    around = demand.weights - demand.layers * demand.layer
    parts = []
    for index, (device, count) in enumerate(zip(devices, counts, strict=True)):
        ends = (index == 0) + (index == len(devices) - 1)
        weights = count * demand.layer + around * ends // 2
        parts.append(Part(device, count, weights, kv * count // demand.layers, demand.step))
    return parts


def _refusal(demand: Demand, devices: Sequence[Device], kv: int) -> str:
    there = f"{_gib(sum(device.free for device in devices))} are free on {', '.join(d.name for d in devices)}"
    needed = demand.weights + kv + len(devices) * demand.step
    return (
        f"Too little memory for {demand.name}: {there}, about {_gib(needed)} are needed ({_gib(demand.weights)} for "
        f"weights as {demand.dtype}, {_gib(kv)} for K and V, {_gib(demand.step)} on each device for activations): "
        f"{_remedy(demand, devices, kv)}."
    )


def _remedy(demand: Demand, devices: Sequence[Device], kv: int) -> str:
    """A change that makes the model fit: less K and V, a shorter context, a smaller type, more GPUs, another model."""
    smallest = demand.least_kv
    if kv > smallest and _fits(demand, devices, smallest):
        low, high = smallest, kv
        while high - low > demand.kv_token:
            middle = (low + high) // 2
            low, high = (middle, high) if _fits(demand, devices, middle) else (low, middle)
        return f"lower kv_cache_memory to {low // 2**20} MiB"
    context = demand.context
    while context > 1024:
        context //= 2
        less = context * demand.kv_token
        if less < kv and _fits(demand, devices, less):
            return f"lower max_context to {context}, and kv_cache_memory to {-(-less // 2**20)} MiB"
    if demand.dtype == "float32" and _fits(_halved(demand), devices, kv // 2):
        return "set dtype to bfloat16"
    on_gpus = devices[0].name.startswith("cuda")
    for more in range(1, 33) if on_gpus else ():
        others = [Device(f"cuda:{len(devices) + number}", devices[0].free) for number in range(more)]
        if _fits(demand, [*devices, *others], kv):
            return f"use {len(devices) + more} such GPUs (num_gpus, device_map: auto)"
    return "choose a smaller model" + ("" if on_gpus or demand.dtype == "int8" else ", or set dtype to int8")


def _halved(demand: Demand) -> Demand:
    """The demand of the same model in bfloat16 instead of float32."""
    return replace(
        demand,
        dtype="bfloat16",
        weights=demand.weights // 2,
        layer=demand.layer // 2,
        largest=demand.largest // 2,
        kv_token=demand.kv_token // 2,
        step=demand.step // 2,
    )


def is_in_layer(tensor: str) -> bool:
    """Whether a tensor's name contains a layer's number, as in model.layers.3.mlp.up_proj.weight."""
    return any(part.isdecimal() for part in tensor.split("."))


def _any(config: Mapping[str, Any], name: str, other: str) -> Any:
    return config[name] if name in config else config[other]


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
