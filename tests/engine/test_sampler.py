from __future__ import annotations

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from serve_app.engine import sampler
from serve_app.engine.request import SamplingParams
from serve_app.engine.sampler import INVALID, SamplerState

VOCAB = 1000


def state(prompt: tuple[int, ...] = (), **options: object) -> SamplerState:
    params = SamplingParams(**{"max_tokens": 10, "seed": 1, **options})  # type: ignore[arg-type]
    return SamplerState(params, prompt, frozenset({0}), VOCAB)


def logits(rows: int = 1, spread: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def sample(given: torch.Tensor, states: list[SamplerState]) -> list[int]:
    return [entry[0].token for entry in sampler.sample(given, states, [()] * len(states))]


def support(row: torch.Tensor, **options: object) -> set[int]:
    """The tokens that these options can ever choose."""
    return set(sampler._weights(row, [state(**options).params]).nonzero()[:, 1].tolist())


def test_temperature_zero_takes_the_likeliest() -> None:
    given = logits(3)
    assert sample(given.clone(), [state(temperature=0.0) for _ in range(3)]) == given.argmax(-1).tolist()


@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0])
@pytest.mark.parametrize(
    "options",
    [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.5, "min_p": 0.02}, {"top_p": 0.999}],
    ids=str,
)
def test_the_choice_is_from_the_same_tokens_as_in_transformers(options: dict[str, float], spread: float) -> None:
    row = logits(spread=spread)
    expected = TemperatureLogitsWarper(0.8)(None, row)
    if "top_k" in options:
        expected = TopKLogitsWarper(int(options["top_k"]))(None, expected)
    if "top_p" in options:
        expected = TopPLogitsWarper(options["top_p"])(None, expected)
    if "min_p" in options:
        expected = MinPLogitsWarper(options["min_p"])(None, expected)
    assert support(row, temperature=0.8, **options) == set((expected > -torch.inf).nonzero()[:, 1].tolist())


def test_tokens_come_as_often_as_their_probability_says() -> None:
    row = torch.full((1, VOCAB), -torch.inf)
    row[0, 10:14] = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    drawn = sample(row.repeat(8000, 1), [state(seed=seed) for seed in range(8000)])
    shares = torch.bincount(torch.tensor(drawn), minlength=VOCAB)[10:14] / 8000
    assert torch.allclose(shares, torch.tensor([0.1, 0.2, 0.3, 0.4]), atol=0.02)


def test_a_seeded_row_is_the_same_alone_and_in_any_batch() -> None:
    given = logits(8, spread=1.0)
    options: list[dict[str, object]] = [
        {}, {"top_p": 0.9}, {"top_k": 7}, {"min_p": 0.05}, {"temperature": 0.0}, {"top_k": 400, "top_p": 0.95},
        {"presence_penalty": 1.0}, {"repetition_penalty": 1.3},
    ]  # fmt: skip
    together = sample(given.clone(), [state(seed=i, **o) for i, o in enumerate(options)])
    alone = [sample(given[i : i + 1].clone(), [state(seed=i, **o)])[0] for i, o in enumerate(options)]
    assert together == alone


def test_without_a_seed_two_requests_differ() -> None:
    assert state(seed=None).seed != state(seed=None).seed


def test_positions_draw_different_numbers() -> None:
    one = state()
    numbers = []
    for _ in range(50):
        numbers.append(one.uniform())
        one.advance(1)
    assert len(set(numbers)) == 50
    assert all(0 <= number < 1 for number in numbers)


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    given, one = logits(), state(prompt=(3, 4, 5), repetition_penalty=1.7)
    one.advance(9)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[3, 4, 5, 9]]), given.clone())
    sampler._penalise(given, [one])
    assert torch.allclose(given, expected)


def test_frequency_counts_and_presence_does_not() -> None:
    given, one = torch.zeros(1, VOCAB), state(prompt=(8,), frequency_penalty=0.5, presence_penalty=0.25)
    for token in (3, 3, 4):
        one.advance(token)
    sampler._penalise(given, [one])
    assert given[0, [3, 4, 5, 8]].tolist() == [-1.25, -0.75, 0.0, 0.0]


@pytest.mark.parametrize("options", [{"min_tokens": 2}, {"ignore_eos": True}], ids=str)
def test_the_end_may_not_come_before_min_tokens(options: dict[str, object]) -> None:
    given, one = torch.zeros(1, VOCAB), state(temperature=0.0, **options)
    given[0, 0] = 9.0
    for _ in range(2):
        assert sample(given.clone(), [one]) != [0]
        one.advance(1)
    assert (sample(given.clone(), [one]) == [0]) == ("min_tokens" in options)


def test_a_row_of_nan_is_marked_and_harms_no_neighbour() -> None:
    given = logits(3)
    given[1, 17] = torch.nan
    chosen = sample(given.clone(), [state(temperature=t) for t in (0.0, 1.0, 0.0)])
    assert chosen[1] == INVALID
    assert chosen[0] == given[0].argmax()
