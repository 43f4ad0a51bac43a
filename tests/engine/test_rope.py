from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from serve_app.contracts.generation import SamplingParams
from serve_app.engine.config import EngineSettings
from serve_app.engine.loading.loader import LoadedModel
from serve_app.engine.models import rope
from serve_app.engine.models.choose_runner import create_runner
from serve_app.engine.models.transformers_runner import TransformersRunner
from serve_app.engine.request import GenerationRequest
from serve_app.engine.scheduling.sequence import Chunk, TokenSequence
from tests.engine.families import VOCAB, Blocks, make_model, prefill, reference_logits, settings, tokens_of


class PlainRope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (10000.0 ** (torch.arange(0, 64, 2).float() / 64)))

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        freqs = position_ids[..., None].float() * self.inv_freq
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos(), emb.sin()


class TinyModel(nn.Module):
    def __init__(self, rope_type: str = "default") -> None:
        super().__init__()
        self.rotary_emb = PlainRope()
        parameters = {"rope_type": rope_type, "rope_theta": 10000.0}
        self.config = SimpleNamespace(max_position_embeddings=8192, rope_parameters=parameters)


def test_classes_double_from_the_trained_context_to_the_promised_one() -> None:
    assert rope.class_bounds(8192, 32768) == (8192, 16384, 32768)
    assert rope.class_bounds(8192, 20000) == (8192, 16384, 20000)
    assert rope.class_bounds(8192, 4096) == (4096,)


def test_sequences_within_the_trained_context_are_rotated_bit_for_bit_as_before() -> None:
    model, plain = TinyModel(), PlainRope()
    assert rope.install(model, 32768) == (8192, 16384, 32768)
    positions, x = torch.arange(100, 140)[None], torch.zeros(1)
    expected = plain(x, positions)
    for classes in (None, torch.zeros(40, dtype=torch.long), torch.tensor([0] * 20 + [1] * 20)):
        model.rotary_emb.token_classes = classes
        got = model.rotary_emb(x, positions)
        assert torch.equal(got[0][:, :20], expected[0][:, :20])
        assert torch.equal(got[1][:, :20], expected[1][:, :20])
    assert not torch.equal(got[0][:, 20:], expected[0][:, 20:])


def test_installing_again_starts_from_the_models_own_rope() -> None:
    model = TinyModel()
    rope.install(model, 32768)
    assert rope.install(model, 16384) == (8192, 16384)
    assert isinstance(model.rotary_emb.inner, PlainRope)
    assert rope.install(model, 4096) == (4096,)
    assert isinstance(model.rotary_emb, PlainRope)


@pytest.mark.parametrize("kind", ["yarn", "dynamic"])
def test_a_rope_of_another_kind_keeps_its_own_context(kind: str) -> None:
    model = TinyModel(kind)
    assert rope.install(model, 32768) == (8192,)
    assert isinstance(model.rotary_emb, PlainRope)


@pytest.mark.model
def test_a_neighbour_of_another_class_changes_nothing(tiny: LoadedModel, tiny_path: Path) -> None:
    settings = EngineSettings(model=str(tiny_path), kv_cache_memory="1MiB")
    runner = TransformersRunner(tiny.model, settings)

    def chunk(number: int, length_class: int) -> Chunk:
        request = GenerationRequest(str(number), tuple(range(500, 548)), SamplingParams(1))
        sequence = TokenSequence(request, number, 0.0, 1, length_class=length_class)
        sequence.block_table = list(range(3 * number, 3 * number + 3))
        return Chunk(sequence, 0, 48)

    alone = [runner.execute([chunk(0, 0)])[0], runner.execute([chunk(0, 2)])[0]]
    together = runner.execute([chunk(0, 0), chunk(1, 2)])
    assert torch.allclose(together[0], alone[0], atol=1e-3)
    assert torch.allclose(together[1], alone[1], atol=1e-3)
    assert not torch.allclose(alone[0], alone[1], atol=1e-1)


@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16])
def test_the_table_holds_what_the_models_own_module_gives_bit_for_bit(dtype: torch.dtype) -> None:
    model = make_model(max_position_embeddings=32)
    own = model.model.rotary_emb
    table = rope.RopeTable(model, 128, dtype)
    assert table.bounds == (32, 64, 128)
    longer = rope.LengthClassRope(own, rope.plan(model, 128).frequencies)
    for length_class, bound in enumerate(table.bounds):
        positions = torch.randint(0, bound, (7,))
        longer.token_classes = torch.full((7,), length_class)
        for module in (own, longer) if length_class == 0 else (longer,):
            cos, sin = module(torch.empty(0, dtype=dtype), positions[None])
            rows = torch.tensor([table.row(length_class, int(p)) for p in positions])
            assert torch.equal(torch.cat((table.cos[rows],) * 2, -1), cos[0])
            assert torch.equal(torch.cat((table.sin[rows],) * 2, -1), sin[0])


def test_longrope_reaches_as_far_as_its_model_and_each_length_has_its_own_frequencies() -> None:
    """As in transformers' forward pass over a whole sequence, which takes the long factors beyond 16 tokens."""
    model = longrope_model(original=16, longest=64)
    expected = {n: reference_logits(model, tokens_of(n, n))[-1] for n in (16, 17, 40)}
    runner = create_runner(model, settings(max_context=4096))
    assert isinstance(runner, TransformersRunner)
    assert runner.class_bounds == (16, 64)
    blocks = Blocks(runner.num_blocks, 4)
    sequences = {n: blocks.sequence(tokens_of(n, n)) for n in expected}
    for length, sequence in sequences.items():
        sequence.length_class = int(length > 16)
    got = runner.execute([prefill(sequence) for sequence in sequences.values()])
    for row, length in zip(got, expected, strict=True):
        torch.testing.assert_close(row, expected[length], atol=1e-4, rtol=1e-3)


def longrope_model(original: int, longest: int) -> Any:
    torch.manual_seed(0)
    half = 4  # of a head's size
    rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 4.0, 8.0],
        "original_max_position_embeddings": original,
    }
    config = AutoConfig.for_model(
        "phi3",
        vocab_size=VOCAB,
        hidden_size=8 * half,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=longest,
        original_max_position_embeddings=original,
        rope_parameters=rope_parameters,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def test_a_draft_past_the_end_of_the_table_takes_its_last_row() -> None:
    table = rope.RopeTable(make_model(), 128, torch.float)
    assert table.bounds == (128,)
    assert table.row(0, 127) == table.row(0, 500) == len(table.cos) - 1
