"""The native int8 decoder against its definition in torch, and against itself in other batches."""

from __future__ import annotations

import math
import platform
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from serve_app.contracts.generation import SamplingParams
from serve_app.engine.config import EngineSettings
from serve_app.engine.errors import ModelError
from serve_app.engine.models.choose_runner import native_folder
from serve_app.engine.models.llama_weights import LlamaWeights, extract_weights
from serve_app.engine.models.native import library
from serve_app.engine.models.native.native_runner import NativeRunner
from serve_app.engine.models.rope import RopeTable
from serve_app.engine.models.torch_runner import TorchRunner
from serve_app.engine.request import GenerationRequest
from serve_app.engine.scheduling.sequence import Chunk, TokenSequence

pytestmark = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler: the torch path runs instead"
)

SIZES = {"hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 2, "vocab_size": 300}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
ARCHITECTURES = ["native", *(["x86-64-v3", "x86-64"] if platform.machine() == "x86_64" else [])]


def llama(**changes: object) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **HEADS, **changes}))


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "llama": llama,
    "llama with one key head each": lambda: llama(num_key_value_heads=6),
    "llama with untied head and wide heads": lambda: llama(head_dim=48, tie_word_embeddings=False),
    "mistral with a window": lambda: MistralForCausalLM(MistralConfig(**SIZES, **HEADS, sliding_window=37)),
    "qwen2 with biases": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, **HEADS)),
    "qwen3 with norms on q and k": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS)),
}


def settings(**changes: object) -> EngineSettings:
    values = {"model": "none", "dtype": "int8", "kv_cache_memory": "8MiB", "max_context": 512, **changes}
    return EngineSettings(**values)  # type: ignore[arg-type]


def built(make: Callable[[], torch.nn.Module]) -> tuple[LlamaWeights, RopeTable]:
    torch.manual_seed(0)
    model = make().eval()
    for parameter in model.parameters():  # biases and norms that do something
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in str(parameter) else 0.3, 0.3)
        else:
            torch.nn.init.normal_(parameter, 0.0, 0.1)
    return extract_weights(model, int8=True), RopeTable(model, 512, torch.float32)


def native(weights: LlamaWeights, table: RopeTable, architecture: str = "native", **changes: object) -> NativeRunner:
    loaded = library.load(native_folder(settings()), architecture)
    assert loaded is not None
    return NativeRunner(loaded, weights, table, settings(**changes))


def sequence(tokens: list[int], first_block: int = 0, block_size: int = 16) -> TokenSequence:
    made = TokenSequence(GenerationRequest("r", tuple(tokens), SamplingParams(max_tokens=1)), 0, 0.0, 1)
    made.block_table = list(range(first_block, first_block + math.ceil((len(tokens) + 8) / block_size)))
    return made


def prompt(length: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def whole(s: TokenSequence) -> Chunk:
    return Chunk(s, 0, len(s.tokens))


@pytest.fixture(scope="module")
def small() -> tuple[LlamaWeights, RopeTable]:
    return built(llama)


@pytest.mark.parametrize("name", MODELS)
def test_the_native_kernels_compute_what_torch_computes(name: str) -> None:
    weights, table = built(MODELS[name])
    ours, torchs = native(weights, table), TorchRunner(weights, table, settings())
    for length in (1, 5, 64, 150):
        s = sequence(prompt(length))
        got, want = ours.execute([whole(s)]), torchs.execute([whole(s)])
        # Rounding to int8 may fall the other way where keys were stored in half precision: near, not equal.
        assert (got - want).norm() / want.norm() < 0.03


def test_a_window_ends_where_it_should() -> None:
    weights, table = built(lambda: MistralForCausalLM(MistralConfig(**{**SIZES, **HEADS, "num_hidden_layers": 1})))
    weights.shape = replace(weights.shape, windows=(37,))
    runner, tokens = native(weights, table), prompt(120)
    want = runner.execute([whole(sequence(tokens))]).clone()
    for position, seen in ((119 - 37, False), (119 - 36, True)):
        changed = [*tokens[:position], (tokens[position] + 1) % 300, *tokens[position + 1 :]]
        assert torch.equal(runner.execute([whole(sequence(changed))]), want) is not seen


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_instruction_set_gives_the_same(small: tuple[LlamaWeights, RopeTable], architecture: str) -> None:
    with open("/proc/cpuinfo") as file:
        if architecture == "x86-64-v3" and "avx2" not in file.read():
            pytest.skip("this processor has no AVX2")
    s = sequence(prompt(100))
    reference = native(*small).execute([whole(s)]).clone()
    got = native(*small, architecture).execute([whole(s)])
    assert (got - reference).norm() / reference.norm() < 0.01


def test_a_prompt_in_chunks_gives_the_same_bits(small: tuple[LlamaWeights, RopeTable]) -> None:
    runner, s = native(*small), sequence(prompt(150))
    at_once = runner.execute([whole(s)]).clone()
    for size in (1, 7, 16, 64):
        for start in range(0, 150, size):
            last = runner.execute([Chunk(s, start, min(size, 150 - start))])
        assert torch.equal(last, at_once)


def test_a_sequence_gives_the_same_bits_in_any_company(small: tuple[LlamaWeights, RopeTable]) -> None:
    runner = native(*small)
    sequences = [sequence(prompt(20 + 9 * i, seed=i), first_block=16 * i) for i in range(16)]
    alone = [runner.execute([whole(s)]).clone() for s in sequences]
    together = runner.execute([whole(s) for s in sequences])
    assert torch.equal(together, torch.cat(alone))
    decoded = runner.execute([Chunk(s, len(s.tokens) - 1, 1) for s in sequences])
    assert torch.equal(decoded, torch.cat(alone))


def test_drafts_have_logits_of_their_own(small: tuple[LlamaWeights, RopeTable]) -> None:
    runner, tokens = native(*small), prompt(40)
    known = sequence(tokens[:36])
    known.block_table = list(range(4))
    with_drafts = runner.execute([Chunk(known, 0, 40, draft=tuple(tokens[36:]))]).clone()
    assert with_drafts.shape == (5, 300)
    for extra in range(5):
        assert torch.equal(runner.execute([whole(sequence(tokens[: 36 + extra]))])[0], with_drafts[extra])


def test_what_a_block_held_before_never_takes_part(small: tuple[LlamaWeights, RopeTable]) -> None:
    runner, s = native(*small), sequence(prompt(50))
    clean = runner.execute([whole(s)]).clone()
    runner._cache[:] = 0x7E00  # NaN in half precision
    assert torch.equal(runner.execute([whole(s)]), clean)
    runner._cache[:] = 0x7E00
    runner.clear_blocks([0, 1])
    assert not runner._cache[:, :, :2].any()
    assert runner._cache[:, :, 2:].all()


def test_nan_comes_out_as_nan(small: tuple[LlamaWeights, RopeTable]) -> None:
    runner, s = native(*small), sequence(prompt(20))
    runner.execute([whole(s)])
    runner._cache[:, :, 0] = 0x7E00
    assert runner.execute([Chunk(s, 19, 1)]).isnan().all()


@pytest.mark.parametrize("block_size", [1, 3, 16, 48, 256])
def test_any_block_size_gives_the_same_bits(small: tuple[LlamaWeights, RopeTable], block_size: int) -> None:
    tokens = prompt(130)
    want = native(*small).execute([whole(sequence(tokens))]).clone()
    s = sequence(tokens, block_size=block_size)
    s.block_table.reverse()
    assert torch.equal(native(*small, block_size=block_size).execute([whole(s)]), want)


def test_a_step_that_samples_nothing_stores_its_keys(small: tuple[LlamaWeights, RopeTable]) -> None:
    runner, s = native(*small), sequence(prompt(60))
    want = runner.execute([whole(s)]).clone()
    runner.clear_blocks(range(8))
    assert runner.execute([Chunk(s, 0, 59)]).shape == (0, 300)
    assert torch.equal(runner.execute([Chunk(s, 59, 1)]), want)


def test_memory_below_one_block_is_refused(small: tuple[LlamaWeights, RopeTable]) -> None:
    with pytest.raises(ModelError, match="kv_cache_memory"):
        native(*small, kv_cache_memory=100)


def test_the_cache_stays_within_its_setting(small: tuple[LlamaWeights, RopeTable]) -> None:
    runner = native(*small, kv_cache_memory="1MiB")
    assert runner._cache.nbytes <= 2**20


def test_the_library_is_compiled_once_and_found_again(tmp_path: Path, copied_kernels: list[Path]) -> None:
    said: list[str] = []
    library.prepare(tmp_path, said.append)
    assert len(said) == 1
    library.prepare(tmp_path, said.append)
    assert library.load(tmp_path) is not None
    assert len(said) == 1
    assert list(tmp_path.iterdir()) == copied_kernels
    assert len(copied_kernels) == 1


def test_without_a_compiler_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert library.load(tmp_path) is None
    [record] = caplog.records
    assert "install g++" in record.message


def test_a_failed_compilation_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        if "--version" in command:
            return subprocess.CompletedProcess(command, 0, "a compiler", "")
        raise subprocess.CalledProcessError(1, command, stderr="details\nfatal error: out of ideas")

    monkeypatch.setattr(subprocess, "run", fail)
    assert library.load(tmp_path) is None
    [record] = caplog.records
    assert "out of ideas" in record.message
    assert list(tmp_path.iterdir()) == []
