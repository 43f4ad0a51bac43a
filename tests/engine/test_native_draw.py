"""Drawing in C++ against drawing in torch: the same tokens for the same random numbers."""

from __future__ import annotations

import math
import platform
import shutil

import pytest
import torch

from serve_app.contracts.generation import SamplingParams
from serve_app.engine.config import EngineSettings
from serve_app.engine.models.choose_runner import native_folder
from serve_app.engine.models.native import library
from serve_app.engine.models.native.native_runner import NativeDraw
from serve_app.engine.sampling import draw
from serve_app.engine.sampling.draw import DEAD_END, INVALID
from serve_app.engine.sampling.sampler import SamplerState, sample

pytestmark = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler: the torch path runs instead"
)

ARCHITECTURES = ["native", *(["x86-64-v3", "x86-64"] if platform.machine() == "x86_64" else [])]
OPTIONS: list[dict[str, float]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.3},
    {"temperature": 1.8},
    {"top_p": 0.9},
    {"top_p": 0.2, "min_p": 0.05},
    {"min_p": 0.3},
    {"top_k": 20},
    {"top_k": 3, "top_p": 0.8},
]


def native(architecture: str = "native", threads: int = 1) -> NativeDraw:
    loaded = library.load(native_folder(EngineSettings(model="none")), architecture)
    assert loaded is not None
    return NativeDraw(loaded, threads)


def logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def states(vocab: int, seed: int, options: list[dict[str, float]]) -> list[SamplerState]:
    return [
        SamplerState(SamplingParams(max_tokens=9, seed=seed + i, **o), (), frozenset(), vocab)  # type: ignore[arg-type]
        for i, o in enumerate(options)
    ]


def tokens(given: torch.Tensor, chosen: list[SamplerState], kernel: NativeDraw | None) -> list[int]:
    return [entry[0].token for entry in sample(given.clone(), chosen, [()] * len(chosen), kernel)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("vocab", [1000, 49152])
def test_the_same_random_numbers_give_the_tokens_that_torch_draws(architecture: str, vocab: int) -> None:
    kernel = native(architecture)
    for seed in range(15 if vocab == 1000 else 2):
        given, chosen = logits(len(OPTIONS), vocab, seed), states(vocab, seed, OPTIONS)
        assert tokens(given, chosen, kernel) == tokens(given, chosen, None)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_sums_and_peaks_are_those_of_torch_but_for_rounding(architecture: str) -> None:
    given = logits(4, 1024) * 5
    given[1, 100:700] = -torch.inf
    steepness = [1.0, 3.0, 0.5, 100.0]
    blocks = draw.as_blocks(given.clone())
    first = native(architecture).draw(blocks, steepness, [0.5] * 4)
    best = given.amax(-1, keepdim=True)
    expected = ((given - best) * torch.tensor(steepness)[:, None]).double().exp()
    assert torch.allclose(blocks.flatten(1).double(), expected, rtol=1e-6, atol=2e-34)
    assert torch.allclose(first.sums.double(), draw.as_blocks(expected).sum(-1), rtol=1e-5, atol=1e-30)
    assert torch.equal(first.peaks, blocks.amax(-1))
    assert torch.equal(first.drawn, blocks.flatten(1).gather(1, first.tokens[:, None])[:, 0])


def test_rows_that_are_not_drawn_from_stay_as_they_are_and_give_the_first_of_the_likeliest() -> None:
    given = logits(3, 640)
    given[1, [5, 300, 639]] = 50.0
    given[2] = 1.0
    blocks = draw.as_blocks(given.clone())
    first = native().draw(blocks, [0.0] * 3, [0.0] * 3)
    assert torch.equal(blocks.flatten(1), given)
    assert torch.equal(first.peaks, blocks.amax(-1))
    assert first.tokens.tolist() == [int(given[0].argmax()), 5, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("place", [0, 127, 128, 999])
def test_rows_without_a_token_are_marked_as_torch_marks_them(temperature: float, place: int) -> None:
    given = logits(4, 1000)
    given[0, place] = math.nan
    given[1, place] = math.inf
    given[2] = -math.inf
    chosen = states(1000, 1, [{"temperature": temperature}] * 4)
    found = tokens(given, chosen, native())
    assert found[:3] == [INVALID, INVALID, DEAD_END]
    assert found == tokens(given, chosen, None)


def test_a_rows_result_is_the_same_to_the_last_bit_alone_in_a_batch_and_on_other_threads() -> None:
    given = logits(5, 5000)
    steepness, numbers = [0.5, 1.0, 1.3, 2.0, 20.0], [0.0, 0.3, 0.6, 0.9, 1 - 2**-53]
    together = draw.as_blocks(given.clone())
    first = native(threads=2).draw(together, steepness, numbers)
    for row in range(5):
        alone = draw.as_blocks(given[row : row + 1].clone())
        own = native().draw(alone, steepness[row : row + 1], numbers[row : row + 1])
        assert torch.equal(alone[0], together[row])
        assert all(torch.equal(mine[0], theirs[row]) for mine, theirs in zip(own, first, strict=True))


def test_every_token_comes_as_often_as_its_probability_says() -> None:
    row = logits(1, 200, seed=4)
    count = 4096
    numbers = [(i + 0.5) / count for i in range(count)]
    found = native().draw(draw.as_blocks(row.expand(count, -1).clone()), [1.0] * count, numbers).tokens
    # Evenly spread numbers hit a token as often as its share says, but for the ends of its stretch.
    often = torch.bincount(found, minlength=200) / count
    assert torch.allclose(often, row.softmax(-1)[0], atol=1.01 / count)
