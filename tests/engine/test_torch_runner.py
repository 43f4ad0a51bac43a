"""The fused forward pass against transformers' own code, on tiny models of each family."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from serve_app.engine.errors import ModelError
from serve_app.engine.models import quantize
from serve_app.engine.models.choose_runner import create_runner
from serve_app.engine.models.torch_runner import TorchRunner
from serve_app.engine.models.transformers_runner import TransformersRunner
from serve_app.engine.scheduling.sequence import Chunk
from tests.engine.families import FAMILIES, Blocks, make_model, prefill, reference_logits, settings, tokens_of


def fused(model: Any, **options: Any) -> TorchRunner:
    runner = create_runner(copy.deepcopy(model), settings(**{"native": False, **options}))
    assert isinstance(runner, TorchRunner)
    return runner


def check_mixed_steps(runner: TorchRunner | TransformersRunner, model: Any, atol: float = 2e-5) -> None:
    """Prompts whole and in pieces, decoding, and drafts, all in the same steps, against one whole forward pass each."""
    blocks = Blocks(runner.num_blocks, 4)
    long, short, third = blocks.sequence(tokens_of(41)), blocks.sequence(tokens_of(3, 4)), blocks.sequence([5])
    expected = {s: reference_logits(model, s.tokens + tokens_of(8, s.arrival)) for s in (long, short, third)}

    def step(*chunks: Chunk) -> None:
        logits = runner.execute(chunks)
        rows = [
            expected[c.sequence][c.start + c.length - c.num_logits : c.start + c.length] for c in chunks if c.num_logits
        ]
        wanted = torch.cat(rows) if rows else logits[:0]
        assert logits.dtype == torch.float
        torch.testing.assert_close(logits, wanted, atol=atol, rtol=1e-4)
        for chunk in chunks:
            chunk.sequence.num_computed += chunk.length

    def grow(*sequences: Any) -> list[Chunk]:
        """The next token of each, and its chunk."""
        for sequence in sequences:
            sequence.tokens.append(tokens_of(8, sequence.arrival)[sequence.num_output])
        return [prefill(sequence) for sequence in sequences]

    step(prefill(long, 13))
    step(prefill(long, 30), prefill(short))
    step(*grow(short), prefill(third), prefill(long))
    step(*grow(long, short, third))
    (chunk,) = grow(long)
    at = long.num_output
    draft = tuple(tokens_of(8, long.arrival)[at : at + 3])
    step(Chunk(long, chunk.start, 1 + len(draft), draft), *grow(short))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_what_its_own_code_computes(family: str) -> None:
    model = make_model(family)
    check_mixed_steps(fused(model), model)


@pytest.mark.parametrize(("kv_heads", "tied"), [(1, True), (2, False), (4, True), (8, False)])
def test_heads_may_be_grouped_and_the_output_matrix_shared(kv_heads: int, tied: bool) -> None:
    model = make_model(num_attention_heads=8, num_key_value_heads=kv_heads, tie_word_embeddings=tied)
    check_mixed_steps(fused(model), model)


def test_the_plain_path_computes_the_same() -> None:
    model = make_model()
    runner = create_runner(copy.deepcopy(model), settings(fused=False))
    assert isinstance(runner, TransformersRunner)
    check_mixed_steps(runner, model)


def test_sequences_of_longer_classes_use_their_own_frequencies() -> None:
    model = make_model(max_position_embeddings=32)
    plain, quick = TransformersRunner(copy.deepcopy(model), settings(max_context=128)), fused(model, max_context=128)
    assert plain.class_bounds == quick.class_bounds == (32, 64, 128)
    results = []
    for runner in (plain, quick):
        blocks = Blocks(runner.num_blocks, 4)
        sequences = [blocks.sequence(tokens_of(n, n), length_class=c) for n, c in ((20, 0), (50, 1), (100, 2))]
        results.append(runner.execute([prefill(s) for s in sequences]))
    torch.testing.assert_close(results[0], results[1], atol=2e-5, rtol=1e-4)


def test_bfloat16_stays_within_its_rounding() -> None:
    model = make_model().to(torch.bfloat16)
    tokens = tokens_of(60)
    theirs = reference_logits(model, tokens)
    exact = reference_logits(copy.deepcopy(model).float(), tokens)
    runner = fused(model, dtype="bfloat16")
    sequence = Blocks(runner.num_blocks, 4).sequence(tokens[:1], room=60)
    ours = runner.execute([Chunk(sequence, 0, 60, tuple(tokens[1:]))])
    assert runner.cache.layers[0][0].dtype == torch.bfloat16
    assert (ours - exact).abs().mean() < 1.2 * (theirs - exact).abs().mean()


class RoundedLinear(nn.Linear):
    """The plain meaning of an int8 matrix: rounded input times rounded weights, in float64."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        int8 = quantize.quantize_rows(self.weight)
        rows = quantize.round_activations(x.flatten(0, -2)).double()
        product = rows @ (int8.values.double() * int8.scales.double()[:, None]).T
        out = product.float().unflatten(0, x.shape[:-1])
        return out if self.bias is None else out + self.bias


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3, heads wider than the model"])
def test_int8_computes_what_its_definition_says(family: str) -> None:
    model = make_model(family)
    runner = fused(model, dtype="int8")
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = RoundedLinear
    blocks = Blocks(runner.num_blocks, 4)
    logits = []
    wanted = []
    for number in range(5):
        sequence = blocks.sequence(tokens_of(10, number), room=0)
        logits.append(runner.execute([prefill(sequence)])[0])
        wanted.append(reference_logits(model, sequence.tokens)[-1])
    error, spread = (torch.stack(logits) - torch.stack(wanted)).abs(), torch.stack(wanted).std()
    # A value at the edge between two levels may be rounded either way, which is one part in 127 of its group.
    assert error.median() < 1e-4 * spread
    assert error.max() < 0.05 * spread


def test_int8_is_close_to_the_weights_it_came_from() -> None:
    model = make_model()
    tokens = tokens_of(30)
    wanted = reference_logits(model, tokens)[-1]
    runner = fused(model, dtype="int8")
    got = runner.execute([prefill(Blocks(runner.num_blocks, 4).sequence(tokens))])[0]
    assert torch.nn.functional.cosine_similarity(got, wanted, dim=0) > 0.995


def test_a_step_that_samples_nothing_returns_no_logits_and_stores_everything() -> None:
    model = make_model()
    runner = fused(model)
    sequence = Blocks(runner.num_blocks, 4).sequence(tokens_of(20))
    first = prefill(sequence, 12)
    assert runner.execute([first]).shape == (0, 97)
    sequence.num_computed = 12
    torch.testing.assert_close(
        runner.execute([prefill(sequence)])[0], reference_logits(model, sequence.tokens)[-1], atol=2e-5, rtol=1e-4
    )


@pytest.mark.parametrize("use_fused", [True, False])
def test_cleared_blocks_are_as_new(use_fused: bool) -> None:
    runner = create_runner(make_model(), settings(fused=use_fused))
    sequence = Blocks(runner.num_blocks, 4).sequence(tokens_of(6), room=0)
    runner.execute([prefill(sequence)])
    touched = [t for pair in runner.cache.layers.values() for t in pair]
    assert all(t.abs().sum() > 0 for t in touched)
    runner.clear_blocks(sequence.block_table)
    assert all(t.abs().sum() == 0 for t in touched)


def test_int8_of_a_model_that_is_not_fused_is_refused_in_one_line() -> None:
    with pytest.raises(ModelError, match=r"^int8 is not possible here: the setting 'fused' is off\. Choose dtype"):
        create_runner(make_model(), settings(dtype="int8", fused=False))


def test_the_cache_takes_the_memory_it_was_given() -> None:
    runner = fused(make_model(), kv_cache_memory="64KiB")
    per_block = 4 * 2 * 2 * (2 * 16) * 4  # tokens, layers, K and V, heads and size, bytes
    assert runner.num_blocks == 2**16 // per_block
