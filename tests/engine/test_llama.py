"""Which models the fused paths support, and what they extract from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from serve_app.engine.models.choose_runner import create_runner
from serve_app.engine.models.llama_weights import extract_weights, shape_of, why_not
from serve_app.engine.models.quantize import Int8Weight
from serve_app.engine.models.transformers_runner import TransformersRunner
from tests.engine.families import FAMILIES, Blocks, make_model, prefill, reference_logits, settings, tokens_of


@pytest.mark.parametrize("family", FAMILIES)
def test_llama_like_models_are_fused(family: str) -> None:
    assert why_not(make_model(family)) is None


def test_other_models_are_not() -> None:
    config = AutoConfig.for_model("gpt2", vocab_size=97, n_embd=32, n_layer=1, n_head=2)
    assert why_not(AutoModelForCausalLM.from_config(config)) == "models of type gpt2 run through their own code"


def test_a_model_with_unsupported_parts_is_not_fused() -> None:
    assert "activation" in str(why_not(make_model(hidden_act="gelu")))
    assert "feed-forward" in str(why_not(make_model(mlp_bias=True)))

    class Quantized(nn.Linear):
        pass

    model = make_model()
    model.model.layers[1].self_attn.k_proj.__class__ = Quantized
    assert why_not(model) == "its matrices are of type Quantized"
    half = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    model = make_model()
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq[::2]
    assert why_not(model) == "only a part of each head is rotated", half


@pytest.mark.parametrize(
    ("part", "to_disk"),
    [("model.layers.1", True), ("model.embed_tokens", False), ("lm_head", True), ("", False)],
    ids=lambda value: str(value) or "all",
)
def test_offloaded_layers_keep_the_models_own_code(part: str, to_disk: bool, tmp_path: Any) -> None:
    model = make_model(max_position_embeddings=32)
    tokens = tokens_of(20)
    expected = reference_logits(model, tokens)[-1]
    cpu = torch.device("cpu")
    if to_disk:
        disk_offload(model.get_submodule(part), str(tmp_path), execution_device=cpu)
    else:
        cpu_offload(model.get_submodule(part), execution_device=cpu)
    assert "offloaded" in str(why_not(model))
    runner = create_runner(model, settings(max_context=64))
    assert isinstance(runner, TransformersRunner)
    got = runner.execute([prefill(Blocks(runner.num_blocks, 4).sequence(tokens))])[0]
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


def test_a_model_made_without_weights_is_judged_by_its_architecture() -> None:
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(make_model().config)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert why_not(model) is None


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (LlamaConfig(num_hidden_layers=3), (None, None, None)),
        (LlamaConfig(num_hidden_layers=2, sliding_window=9, layer_types=["sliding_attention"] * 2), (None, None)),
        (MistralConfig(num_hidden_layers=2, sliding_window=9), (9, 9)),
        (MistralConfig(num_hidden_layers=2, sliding_window=None), (None, None)),
        (Qwen2Config(num_hidden_layers=2, sliding_window=9), (None, None)),
        (Qwen2Config(num_hidden_layers=2, sliding_window=9, use_sliding_window=True, max_window_layers=1), (None, 9)),
        (Qwen3Config(num_hidden_layers=2, sliding_window=9, use_sliding_window=True, max_window_layers=0), (9, 9)),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_windows_are_those_that_the_models_own_code_applies(config: Any, windows: tuple[int | None, ...]) -> None:
    assert shape_of(config).windows == windows


@pytest.mark.parametrize("int8", [False, True])
def test_weights_are_joined_and_the_models_own_are_freed(int8: bool) -> None:
    model = make_model("qwen2")
    attention, mlp = model.model.layers[1].self_attn, model.model.layers[1].mlp
    q, k, v = (getattr(attention, f"{name}_proj").weight.detach().clone() for name in "qkv")
    up = mlp.up_proj.weight.detach().clone()
    weights = extract_weights(model, int8=int8)
    layer = weights.layers[1]
    assert [weight.shape for weight in (layer.qkv, layer.output, layer.gate_up, layer.down)] == [
        (128, 64),
        (64, 64),
        (224, 64),
        (64, 112),
    ]
    assert layer.qkv_bias is not None
    assert layer.qkv_bias.shape == (128,)
    if int8:
        assert isinstance(layer.qkv, Int8Weight)
        assert isinstance(weights.head, Int8Weight)
    else:
        assert isinstance(layer.qkv, torch.Tensor)
        assert isinstance(layer.gate_up, torch.Tensor)
        assert torch.equal(layer.qkv, torch.cat((q, k, v)))
        assert torch.equal(layer.gate_up[112:], up)
    assert attention.q_proj.weight is None
    assert mlp.down_proj.weight is None


def test_a_shared_head_is_not_stored_twice() -> None:
    weights = extract_weights(make_model(tie_word_embeddings=True))
    assert isinstance(weights.head, torch.Tensor)
    assert weights.head.data_ptr() == weights.embedding.data_ptr()
