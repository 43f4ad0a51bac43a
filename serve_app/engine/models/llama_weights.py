"""The shape and weights of a llama-like decoder, extracted from a transformers model.

Llama, Mistral, Qwen2, Qwen3 and SmolLM2 share one architecture: RMSNorm, grouped-query attention with rotary positions,
and a SiLU-gated feed-forward part. Biases on q, k and v (Qwen2), norms on q and k (Qwen3) and sliding windows are
optional.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from serve_app.engine.models.quantize import Int8Weight, quantize_rows

Weight = torch.Tensor | Int8Weight  # (out, in)

MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})


@dataclass(frozen=True, slots=True)
class LlamaShape:
    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    norm_eps: float
    windows: tuple[int | None, ...]  # per layer: tokens that a query sees, including itself; None means all


@dataclass(slots=True)
class LlamaLayer:
    """Weights of one layer. Matrices with the same input are joined: one for q, k and v, one for gate and up."""

    input_norm: torch.Tensor  # (hidden,)
    qkv: Weight  # ((heads + 2 kv_heads) * head_dim, hidden): q, then k, then v
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None  # (head_dim,)
    k_norm: torch.Tensor | None
    output: Weight  # (hidden, heads * head_dim)
    output_bias: torch.Tensor | None
    post_norm: torch.Tensor  # (hidden,)
    gate_up: Weight  # (2 * intermediate, hidden): gate, then up
    down: Weight  # (hidden, intermediate)


@dataclass(slots=True)
class LlamaWeights:
    """The weights of a decoder. `head` may share its memory with `embedding`."""

    shape: LlamaShape
    embedding: torch.Tensor  # (vocab, hidden)
    layers: list[LlamaLayer]
    final_norm: torch.Tensor  # (hidden,)
    head: Weight  # (vocab, hidden)


def why_not(model: Any) -> str | None:
    """The reason why the engine's forward passes cannot run this transformers model, or None.

    A model without weights, entirely on the meta device, is judged by its architecture.
    """
    config = model.config
    if config.model_type not in MODEL_TYPES:
        return f"models of type {config.model_type} run through their own code"
    if config.hidden_act != "silu":
        return f"the activation {config.hidden_act} is not fused"
    if any(map(_is_offloaded, model.modules())):
        return "some of its weights are offloaded and fetched by the model's own code"
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        feed_forward = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, *feed_forward):
            if type(linear) is not nn.Linear:  # another library has quantized or adapted it
                return f"its matrices are of type {type(linear).__name__}"
        if any(linear.bias is not None for linear in feed_forward):
            return "biases in the feed-forward part are not fused"
    if type(model.get_output_embeddings()) is not nn.Linear:
        return f"its head is of type {type(model.get_output_embeddings()).__name__}"
    if model.get_output_embeddings().bias is not None:
        return "a bias of the head is not fused"
    if 2 * model.model.rotary_emb.inv_freq.numel() != shape_of(config).head_dim:
        return "only a part of each head is rotated"
    return None


def _is_offloaded(module: nn.Module) -> bool:
    """Whether accelerate loads this module's weights for each call (`AlignDevicesHook`, alone or in a chain)."""
    hook = getattr(module, "_hf_hook", None)
    return any(getattr(part, "offload", False) for part in (hook, *getattr(hook, "hooks", ())))


def shape_of(config: Any) -> LlamaShape:
    """The shape from a transformers configuration of one of MODEL_TYPES."""
    layers = config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    # In the models' own code, Llama has no windows, and Mistral has the configured window, if any, in all layers.
    kinds = (
        {
            "llama": ["full_attention"] * layers,
            "mistral": ["sliding_attention"] * layers,
        }.get(config.model_type)
        or getattr(config, "layer_types", None)
        or ["full_attention"] * layers
    )
    return LlamaShape(
        num_layers=layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        norm_eps=config.rms_norm_eps,
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
    )


@torch.inference_mode()
def extract_weights(model: Any, *, int8: bool = False, on_layer: Callable[[int], None] | None = None) -> LlamaWeights:
    """Join the weights of a transformers model for which `why_not` is None.

    `int8` quantizes every matrix except the embedding.

    Each layer's weights stay on its device. The model's matrices are freed layer by layer (their modules stay empty),
    so peak memory is one layer above the model's size. `on_layer` receives the number of finished layers.
    """
    head = model.get_output_embeddings().weight
    embedding = model.get_input_embeddings().weight.detach()
    weights = LlamaWeights(
        shape=shape_of(model.config),
        embedding=embedding,
        layers=[],
        final_norm=model.model.norm.weight.detach(),
        head=quantize_rows(head) if int8 else head.detach(),
    )
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
        biases = [linear.bias for linear in qkv]
        weights.layers.append(
            LlamaLayer(
                input_norm=layer.input_layernorm.weight.detach(),
                qkv=_join(qkv, int8),
                qkv_bias=torch.cat(biases) if biases[0] is not None else None,
                q_norm=_weight_of(attention, "q_norm"),
                k_norm=_weight_of(attention, "k_norm"),
                output=_join([attention.o_proj], int8),
                output_bias=None if attention.o_proj.bias is None else attention.o_proj.bias.detach(),
                post_norm=layer.post_attention_layernorm.weight.detach(),
                gate_up=_join([mlp.gate_proj, mlp.up_proj], int8),
                down=_join([mlp.down_proj], int8),
            )
        )
        for linear in (*qkv, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            linear.weight = None
        if on_layer is not None:
            on_layer(len(weights.layers))
    return weights


def _join(linears: list[Any], int8: bool) -> Weight:
    joined = torch.cat([linear.weight for linear in linears]) if len(linears) > 1 else linears[0].weight.detach()
    return quantize_rows(joined) if int8 else joined


def _weight_of(module: Any, name: str) -> torch.Tensor | None:
    part = getattr(module, name, None)
    return None if part is None else part.weight.detach()
