"""Computes how many GPUs a model and its users need.

Memory comes from the engine's planner. Speed is an estimate: a step reads all weights that it uses, and the K and V of
its sequences, at a share of the card's bandwidth. A measured figure in `replica_tokens_s` replaces the estimate.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from serve_app.engine.config import EngineSettings
from serve_app.engine.errors import ModelError
from serve_app.engine.loading import checkpoint, memory_plan, placement, vllm_memory
from serve_app.engine.loading.checkpoint import Tensor
from serve_app.engine.loading.memory_plan import GIB, Demand, Device, MemoryPlan

#: Share of the card's stated bandwidth that a step reaches, by engine. The native engine's was measured on an H200
#: (docs/benchmarks.md); vLLM's is an assumption.
SHARE_OF_BANDWIDTH = {"vllm": 0.5, "native": 0.15}
GPUS = (1, 2, 4, 8)  # common numbers of GPUs per replica


@dataclass(frozen=True, slots=True)
class Card:
    memory: int  # bytes
    bandwidth: float  # bytes per second
    name: str = ""
    computes_fp8: bool = False


def _card(name: str, mib: int, gb_per_s: int) -> Card:
    return Card(mib * 2**20, gb_per_s * 1e9, name, computes_fp8=not name.startswith("a10"))


#: The cards by name, with their memory in MiB, as nvidia-smi shows it, and their bandwidth in GB/s.
CARDS = {
    card.name: card
    for card in (
        _card("l4", 23034, 300),
        _card("a10g", 23028, 600),
        _card("rtx4090", 24564, 1008),
        _card("a100-40", 40960, 1555),
        _card("l40s", 46068, 864),
        _card("a100-80", 81920, 2039),
        _card("h100", 81559, 3350),
        _card("h200", 143771, 4800),
        _card("b200", 183359, 8000),
    )
}

_GQA = {"num_key_value_heads": 8, "max_position_embeddings": 131072}
#: Figures from the config.json of published models.
MODELS: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": _GQA | {"model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24,
                            "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864,
                            "vocab_size": 151936, "max_position_embeddings": 32768, "tie_word_embeddings": True},
    "llama-3.2-1b": _GQA | {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16,
                            "num_attention_heads": 32, "intermediate_size": 8192, "vocab_size": 128256,
                            "tie_word_embeddings": True},
    "qwen2.5-1.5b": _GQA | {"model_type": "qwen2", "hidden_size": 1536, "num_hidden_layers": 28,
                            "num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 8960,
                            "vocab_size": 151936, "max_position_embeddings": 32768, "tie_word_embeddings": True},
    "qwen2.5-3b": _GQA | {"model_type": "qwen2", "hidden_size": 2048, "num_hidden_layers": 36,
                          "num_attention_heads": 16, "num_key_value_heads": 2, "intermediate_size": 11008,
                          "vocab_size": 151936, "max_position_embeddings": 32768, "tie_word_embeddings": True},
    "qwen2.5-7b": _GQA | {"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28,
                          "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944,
                          "vocab_size": 152064, "max_position_embeddings": 32768},
    "llama-3.1-8b": _GQA | {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
                            "num_attention_heads": 32, "intermediate_size": 14336, "vocab_size": 128256},
    "qwen2.5-14b": _GQA | {"model_type": "qwen2", "hidden_size": 5120, "num_hidden_layers": 48,
                           "num_attention_heads": 40, "intermediate_size": 13824, "vocab_size": 152064,
                           "max_position_embeddings": 32768},
    "qwen2.5-32b": _GQA | {"model_type": "qwen2", "hidden_size": 5120, "num_hidden_layers": 64,
                           "num_attention_heads": 40, "intermediate_size": 27648, "vocab_size": 152064,
                           "max_position_embeddings": 32768},
    "mixtral-8x7b": _GQA | {"model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32,
                            "num_attention_heads": 32, "intermediate_size": 14336, "vocab_size": 32000,
                            "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 32768},
    "llama-3.3-70b": _GQA | {"model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80,
                             "num_attention_heads": 64, "intermediate_size": 28672, "vocab_size": 128256},
    "gpt-oss-120b": _GQA | {"model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 36,
                            "num_attention_heads": 64, "head_dim": 64, "intermediate_size": 2880,
                            "vocab_size": 201088, "num_local_experts": 128, "num_experts_per_tok": 4},
}  # fmt: skip
_GATED = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "gemma", "gemma2", "phi3", "gpt_oss", "smollm3")


@dataclass(frozen=True, slots=True)
class Wanted:
    context: int  # tokens of one sequence, prompt and reply
    users: int  # concurrent sequences
    tokens_s: float  # output tokens per second of all sequences together
    most_running: int = 128  # maximum sequences of one replica, even if more fit


@dataclass(frozen=True, slots=True)
class Size:
    plan: MemoryPlan  # per replica
    gpus: int  # per replica
    sequences: int  # maximum concurrent sequences of one replica
    replica_tokens_s: float
    for_users: int  # replicas needed for the concurrent users
    for_tokens: int  # replicas needed for the tokens per second

    @property
    def replicas(self) -> int:
        return max(self.for_users, self.for_tokens)


def read_model(name: str) -> tuple[str, Mapping[str, Any], Mapping[str, Tensor]]:
    """Returns the name, config.json, and the tensors of a known model, a folder, or a config.json.

    Raises:
        ModelError: there is no such model, or its config.json alone does not determine its size.
    """
    if name.lower() in MODELS:
        config = MODELS[name.lower()]
        return name.lower(), config, _stored(config)
    path = Path(name).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ModelError(f"{name} is not a file or folder, and not one of {', '.join(MODELS)}.")
    try:
        config = json.loads(file.read_text())
        if path.is_dir() and any(path.glob("*.safetensors")):
            return path.name, config, checkpoint.tensors(path)
        return file.parent.name or name, config, _stored(config)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"Cannot size {file}: {error!r}; use a folder that also contains the weights.") from None


def _stored(config: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: Tensor("BF16", number, 2 * number) for name, number in tensor_sizes(config).items()}


def tensor_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """Returns the number of elements of each layer and matrix, from config.json alone.

    Supports decoders with gated feed-forward layers. Biases are not counted.

    Raises:
        ValueError: a different model family.
        KeyError: config.json lacks a size.
    """
    if config.get("model_type") not in _GATED:
        raise ValueError(f"model_type {config.get('model_type')!r}")
    hidden, heads, vocabulary = config["hidden_size"], config["num_attention_heads"], config["vocab_size"]
    size = config.get("head_dim") or hidden // heads
    experts = _experts(config)
    attention = 2 * hidden * size * (heads + (config.get("num_key_value_heads") or heads))
    feed_forward = 3 * hidden * config["intermediate_size"]
    layer = attention + experts * feed_forward + (experts > 1) * experts * hidden
    sizes = {f"layers.{number}": layer for number in range(config["num_hidden_layers"])}
    sizes["embed_tokens"] = vocabulary * hidden
    return sizes if config.get("tie_word_embeddings") else sizes | {"lm_head.weight": vocabulary * hidden}


def size(
    name: str,
    wanted: Wanted,
    card: Card,
    *,
    engine: str = "vllm",
    dtype: str = "bfloat16",
    gpus: int | None = None,
    replica_tokens_s: float | None = None,
) -> Size:
    """Sizes a service. `gpus` is the number per replica; None chooses the number that needs the fewest GPUs in total.

    `dtype` is for the native engine. vLLM uses the type of the files.

    Raises:
        ModelError: the model does not fit; the message has a change that makes it fit.
    """
    label, config, tensors = read_model(name)
    running = min(wanted.users, wanted.most_running)
    longest = int(config.get("max_position_embeddings") or wanted.context)
    if wanted.context > longest:
        raise ModelError(f"{label} has a maximum context of {longest} tokens: lower the context.")
    plan_of = _plan_of_vllm if engine == "vllm" else _plan_of_native
    fitting, refusal = [], None
    for count in GPUS if gpus is None else (gpus,):
        try:
            plan = plan_of(label, config, tensors, wanted, card, count, dtype)
        except ModelError as error:
            refusal = error
            continue
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"the config.json of {label} has an unusual form: {error!r}.") from None
        sequences = min(running, plan.kv // plan.demand.kv_token // wanted.context)
        speed = replica_tokens_s or _tokens_s(plan.demand, config, sequences, wanted.context, card, engine, count)
        for_users, for_tokens = ceil(wanted.users / sequences), ceil(wanted.tokens_s / speed)
        fitting.append(Size(plan, count, sequences, speed, for_users, for_tokens))
    if not fitting:
        assert refusal is not None
        raise refusal
    return min(fitting, key=lambda one: (one.replicas * one.gpus, one.gpus))


def _plan_of_native(
    label: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    wanted: Wanted,
    card: Card,
    count: int,
    dtype: str,
) -> MemoryPlan:
    settings = EngineSettings.model_validate(
        {
            "model": label,
            "dtype": dtype,
            "device_map": "auto",
            "max_context": wanted.context,
            "max_running": min(wanted.users, wanted.most_running),
        }
    )
    sizes = {name: tensor.elements for name, tensor in tensors.items()}
    demand = memory_plan.demand_of(label, config, sizes, placement.weight_bytes(sizes, dtype), settings)
    return memory_plan.plan(demand, [Device(f"cuda:{index}", card.memory) for index in range(count)], None)


def _plan_of_vllm(
    label: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    wanted: Wanted,
    card: Card,
    count: int,
    dtype: str,
) -> MemoryPlan:
    if not vllm_memory.can_divide(config, count):
        raise ModelError(
            f"{label} can't be divided among {count} GPUs: its number of attention heads is not a multiple of {count}."
        )
    demand = vllm_memory.demand_of(
        label,
        config,
        vllm_memory.weight_bytes(tensors),
        context=wanted.context,
        gpus=count,
        sequences=min(wanted.users, wanted.most_running),
        step=vllm_memory.step_tokens(card.memory, card.name),
    )
    budget = vllm_memory.budget(card.memory)
    devices = [Device(f"cuda:{index}", budget) for index in range(count)]
    try:
        return vllm_memory.plan(demand, devices)
    except ModelError as error:
        raise ModelError(f"{error}: {_remedy(label, config, tensors, wanted, card, count)}.") from None


def _remedy(
    label: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor], wanted: Wanted, card: Card, count: int
) -> str:
    budget = vllm_memory.budget(card.memory)
    changes = vllm_memory.changes(
        label,
        config,
        tensors,
        context=wanted.context,
        step=vllm_memory.step_tokens(card.memory, card.name),
        sequences=min(wanted.users, wanted.most_running),
        budget=budget,
        gpus=count,
        computes_fp8=card.computes_fp8,
    )
    return ", or ".join(change.text for change in changes) or "choose a smaller model, or a larger card"


def _experts(config: Mapping[str, Any]) -> int:
    return int(config.get("num_local_experts") or config.get("num_experts") or 1)


def _tokens_s(
    demand: Demand, config: Mapping[str, Any], sequences: int, context: int, card: Card, engine: str, gpus: int
) -> float:
    """Estimates tokens per second of a replica.

    A step produces a token for each sequence. It reads the experts that its sequences choose; the estimate assumes that
    they choose different experts. The GPUs of a tensor-parallel group read at the same time. The native engine's GPUs
    read one after another.
    """
    experts = _experts(config)
    chosen = min(experts, sequences * int(config.get("num_experts_per_tok") or experts))
    read = demand.weights * chosen / experts + sequences * context / 2 * demand.kv_token
    at_once = gpus if engine == "vllm" else 1
    return sequences * at_once * card.bandwidth * SHARE_OF_BANDWIDTH[engine] / read


def assumptions(found: Size, card: Card, *, engine: str = "vllm", measured: bool) -> list[str]:
    """Returns the assumptions behind the figures, as text."""
    speed = (
        "tokens per second of a replica as you measured them"
        if measured
        else f"tokens per second are an estimate: each step reads the weights and half a context per sequence at "
        f"{SHARE_OF_BANDWIDTH[engine]:.0%} of {card.bandwidth / 1e9:,.0f} GB/s; measure a replica and use "
        "--replica-tokens"
    )
    usable = vllm_memory.UTILIZATION if engine == "vllm" else 1
    lines = [
        f"{usable * card.memory / GIB:.1f} GiB of the card's {card.memory / GIB:.1f} GiB are usable; weights, K and V "
        "are counted, activations estimated",
        "every user has a sequence of the whole context; shorter sequences leave room for more users",
        speed,
        "prompts are not in the estimate; the time that they take lowers the tokens per second",
    ]
    if found.gpus > 1 and engine == "native":
        lines.append(
            "the layers are divided among a replica's GPUs (device_map: auto), which adds memory but no speed: use "
            "--engine vllm"
        )
    elif found.gpus > 1:
        lines.append("a replica's GPUs are in one machine and exchange data fast enough not to slow down a step")
    return lines
