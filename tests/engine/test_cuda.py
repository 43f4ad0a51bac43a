"""Tests for GPUs: the torch runner on CUDA devices, and the floor that its speed is compared with."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from bench.gpu_check import engine as measured
from bench.gpu_check import models
from serve_app.contracts.generation import SamplingParams
from serve_app.engine.engine import Engine
from serve_app.engine.models.choose_runner import create_runner
from serve_app.engine.models.torch_runner import TorchRunner
from serve_app.engine.request import GenerationRequest
from serve_app.engine.scheduling.sequence import Chunk
from serve_app.engine.text.detokenizer import Vocabulary
from tests.engine.fakes import Inbox, byte_tokenizer, submit
from tests.engine.families import FAMILIES, Blocks, make_model, prefill, reference_logits, settings, tokens_of

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two CUDA devices")

MIB = 2**20


def on(device: str, model: Any, dtype: str = "float32", **options: Any) -> TorchRunner:
    placed = copy.deepcopy(model).to(device, getattr(torch, dtype))
    runner = create_runner(placed, settings(dtype=dtype, **options))
    assert isinstance(runner, TorchRunner)
    return runner


def decode(runner: TorchRunner, lengths: list[int], steps: int) -> tuple[list[list[int]], torch.Tensor]:
    """Greedy tokens of some prompts, and the logits of all steps."""
    blocks = Blocks(runner.num_blocks, 4)
    sequences = [blocks.sequence(tokens_of(n, n), room=steps) for n in lengths]
    logits = []
    for _ in range(steps):
        logits.append(runner.execute([prefill(s) for s in sequences]))
        for sequence, token in zip(sequences, logits[-1].argmax(-1).tolist(), strict=True):
            sequence.num_computed = len(sequence.tokens)
            sequence.tokens.append(token)
    return [s.tokens[s.num_prompt :] for s in sequences], torch.stack(logits)


@needs_cuda
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_computes_what_the_cpu_computes(family: str) -> None:
    model = make_model(family)
    torch.backends.cuda.matmul.allow_tf32 = False
    gpu, cpu = on("cuda", model), on("cpu", model)
    for lengths in ([9], [1, 30, 4], [60, 61, 2, 3, 4, 5, 6]):
        tokens, logits = decode(gpu, lengths, 12)
        wanted_tokens, wanted = decode(cpu, lengths, 12)
        torch.testing.assert_close(logits.cpu(), wanted, atol=1e-3, rtol=1e-3)
        assert tokens == wanted_tokens


@needs_cuda
def test_a_gpu_verifies_drafts_as_the_cpu_does() -> None:
    model = make_model()
    results = []
    for device in ("cuda", "cpu"):
        runner = on(device, model)
        blocks = Blocks(runner.num_blocks, 4)
        one, two = (blocks.sequence(tokens_of(n, n)) for n in (14, 30))
        runner.execute([prefill(one, 13), prefill(two, 29)])
        results.append(runner.execute([Chunk(one, 13, 4, (7, 8, 9)), Chunk(two, 29, 1)]).cpu())
    torch.testing.assert_close(*results, atol=1e-3, rtol=1e-3)


@needs_cuda
def test_bfloat16_decoding_stays_near_float32() -> None:
    model = make_model().to(torch.bfloat16).float()  # weights that both types hold exactly
    _, logits = decode(on("cuda", model, "bfloat16"), [20, 5], 2)
    wanted = torch.stack([reference_logits(model, tokens_of(n, n))[-1] for n in (20, 5)])
    assert torch.nn.functional.cosine_similarity(logits[0].cpu(), wanted).min() > 0.999


@needs_cuda
def test_steps_keep_no_memory() -> None:
    runner = on("cuda", make_model(num_hidden_layers=4))
    decode(runner, [20] * 8, 2)
    allocated = torch.cuda.memory_allocated()
    for _ in range(5):
        decode(runner, [20] * 8, 20)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - allocated < MIB


@needs_cuda
def test_the_engine_generates_the_same_on_a_gpu_and_on_the_cpu() -> None:
    replies = []
    for device in ("cuda", "cpu"):
        chosen = settings(dtype="float32")
        runner = create_runner(make_model(vocab_size=257).to(device), chosen)
        engine = Engine(runner, Vocabulary(byte_tokenizer()), frozenset(), chosen)
        try:
            inboxes = [Inbox() for _ in range(8)]
            for number, inbox in enumerate(inboxes):
                params = SamplingParams(max_tokens=24, temperature=0.0)
                submit(engine, GenerationRequest(str(number), tuple(tokens_of(9 + number)), params), inbox)
            for inbox in inboxes:
                inbox.wait()
            replies.append([inbox.text for inbox in inboxes])
        finally:
            engine.close()
    assert replies[0] == replies[1]


@needs_two
def test_layers_and_their_cache_lie_on_their_own_devices() -> None:
    model = make_model()
    expected = reference_logits(model, tokens_of(20))[-1]
    placed = copy.deepcopy(model)
    for part in (placed.model.embed_tokens, placed.model.rotary_emb, placed.model.layers[0]):
        part.to("cuda:0")
    for part in (placed.model.layers[1], placed.model.norm, placed.lm_head):
        part.to("cuda:1")
    runner = create_runner(placed, settings())
    assert isinstance(runner, TorchRunner)
    assert [k.device.index for k, _ in runner.cache.layers.values()] == [0, 1]
    got = runner.execute([prefill(Blocks(runner.num_blocks, 4).sequence(tokens_of(20)))])[0]
    torch.testing.assert_close(got.cpu(), expected, atol=1e-3, rtol=1e-3)


def test_the_floor_counts_every_matrix_once() -> None:
    for shape, billions in (("1b", 1.24), ("7b", 6.61)):
        with torch.device("meta"):
            model = models.make_model(shape, torch.device("meta"), torch.bfloat16)
        assert measured.bytes_of_step(model, 0) == pytest.approx(2e9 * billions, rel=0.01)
        per_token = 2 * 2 * model.config.num_hidden_layers * model.config.num_key_value_heads * model.config.head_dim
        assert measured.bytes_of_step(model, 10) - measured.bytes_of_step(model, 0) == 10 * per_token
