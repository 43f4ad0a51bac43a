"""Computes the GPUs for a model and its users: memory with the planner that replicas use, speed with an estimate.

Memory is counted. Speed is not measured: a step reads all weights that it uses, and the K and V of its sequences, at a
share of the card's bandwidth. A measured figure in `replica_tokens_s` replaces the estimate.
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
from serve_app.engine.loading import checkpoint, memory_plan, placement
from serve_app.engine.loading.memory_plan import GIB, Demand, Device, MemoryPlan

SHARE_OF_BANDWIDTH = 0.5  # share of the card's stated bandwidth that a step reaches
GPUS = (1, 2, 4, 8)  # common numbers of GPUs per replica


@dataclass(frozen=True, slots=True)
class Card:
    memory: int  # bytes
    bandwidth: float  # bytes a second


def _card(mib: int, gb_per_s: int) -> Card:
    return Card(mib * 2**20, gb_per_s * 1e9)


#: Memory as nvidia-smi shows it.
CARDS = {
    "l4": _card(23034, 300),
    "a10g": _card(23028, 600),
    "rtx4090": _card(24564, 1008),
    "a100-40": _card(40960, 1555),
    "l40s": _card(46068, 864),
    "a100-80": _card(81920, 2039),
    "h100": _card(81559, 3350),
    "h200": _card(143771, 4800),
    "b200": _card(183359, 8000),
}

_GQA = {"num_key_value_heads": 8, "max_position_embeddings": 131072}
#: Figures from the config.json of published models.
MODELS: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": _GQA | {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16,
                            "num_attention_heads": 32, "intermediate_size": 8192, "vocab_size": 128256,
                            "tie_word_embeddings": True},
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
    sequences: int  # concurrent, of one replica
    replica_tokens_s: float
    for_users: int  # replicas
    for_tokens: int

    @property
    def replicas(self) -> int:
        return max(self.for_users, self.for_tokens)


def read_model(name: str) -> tuple[str, Mapping[str, Any], Mapping[str, int]]:
    """Returns the name, config.json, and elements of each tensor of a known model, a folder, or a config.json.

    Raises:
        ModelError: there is no such model, or its config.json alone does not determine its size.
    """
    if name.lower() in MODELS:
        config = MODELS[name.lower()]
        return name.lower(), config, tensor_sizes(config)
    path = Path(name).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ModelError(f"{name} is not a file or folder, and not one of {', '.join(MODELS)}.")
    try:
        config = json.loads(file.read_text())
        if path.is_dir() and any(path.glob("*.safetensors")):
            return path.name, config, checkpoint.tensor_sizes(path)
        return file.parent.name or name, config, tensor_sizes(config)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"Cannot size {file}: {error!r}; use a folder that also contains the weights.") from None


def tensor_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """Returns the elements of each part, from config.json alone.

    It covers decoders with gated feed-forward layers. Biases are left out.

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
    dtype: str = "bfloat16",
    gpus: int | None = None,
    replica_tokens_s: float | None = None,
) -> Size:
    """Sizes a service. `gpus` are of one replica; None: the number that needs the fewest GPUs in total.

    Raises:
        ModelError: the model does not fit; the message has the smallest change that makes it fit.
    """
    label, config, sizes = read_model(name)
    running = min(wanted.users, wanted.most_running)
    settings = EngineSettings.model_validate(
        {"model": name, "dtype": dtype, "device_map": "auto", "max_context": wanted.context, "max_running": running}
    )
    longest = int(config.get("max_position_embeddings") or wanted.context)
    if wanted.context > longest:
        raise ModelError(f"{label} has a context of {longest} tokens: lower the context to that.")
    try:
        demand = memory_plan.demand_of(label, config, sizes, placement.weight_bytes(sizes, dtype), settings)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"the config.json of {label} has an unusual form: {error!r}.") from None
    fitting, refusal = [], None
    for count in GPUS if gpus is None else (gpus,):
        try:
            plan = memory_plan.plan(demand, [Device(f"cuda:{index}", card.memory) for index in range(count)], None)
        except ModelError as error:
            refusal = error
            continue
        sequences = min(running, plan.kv // demand.kv_token // wanted.context)
        speed = replica_tokens_s or _tokens_s(demand, config, sequences, wanted.context, card)
        for_users, for_tokens = ceil(wanted.users / sequences), ceil(wanted.tokens_s / speed)
        fitting.append(Size(plan, count, sequences, speed, for_users, for_tokens))
    if not fitting:
        assert refusal is not None
        raise refusal
    return min(fitting, key=lambda one: (one.replicas * one.gpus, one.gpus))


def _experts(config: Mapping[str, Any]) -> int:
    return int(config.get("num_local_experts") or config.get("num_experts") or 1)


def _tokens_s(demand: Demand, config: Mapping[str, Any], sequences: int, context: int, card: Card) -> float:
    """Estimates tokens per second of a replica.

    A step gives each sequence a token. It reads the experts that its sequences choose, as if they all differed.
    """
    experts = _experts(config)
    chosen = min(experts, sequences * int(config.get("num_experts_per_tok") or experts))
    read = demand.weights * chosen / experts + sequences * context / 2 * demand.kv_token
    return sequences * card.bandwidth * SHARE_OF_BANDWIDTH / read


def assumptions(found: Size, card: Card, *, measured: bool) -> list[str]:
    """Returns the assumptions behind the figures, as text."""
    speed = (
        "tokens per second of a replica as you measured them"
        if measured
        else f"tokens per second are an estimate: each step reads the weights and half a context per sequence at "
        f"{SHARE_OF_BANDWIDTH:.0%} of {card.bandwidth / 1e9:,.0f} GB/s; measure a replica and use --replica-tokens"
    )
    lines = [
        f"all of the card's {card.memory / GIB:.1f} GiB are free; weights, K and V are counted, activations estimated",
        "every user has a sequence of the whole context; shorter ones leave room for more",
        speed,
        "prompts are not in the estimate; time for them lowers the tokens per second",
    ]
    if found.gpus > 1:
        lines.append("the layers are divided among a replica's GPUs, which adds memory and no speed (vLLM is faster)")
    return lines
