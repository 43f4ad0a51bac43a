from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from serve_app.contracts.generation import SamplingParams
from serve_app.engine.sampling import draw, logits_processing
from serve_app.engine.sampling.draw import DEAD_END, INVALID
from serve_app.engine.sampling.sampler import SampledToken, SamplerState, sample

VOCAB = 1000
EOS = 0


def state(prompt: tuple[int, ...] = (), vocab: int = VOCAB, **options: object) -> SamplerState:
    params = SamplingParams(**{"max_tokens": 10, "seed": 1, **options})  # type: ignore[arg-type]
    return SamplerState(params, prompt, frozenset({EOS}), vocab)


def logits(rows: int = 1, spread: float = 3.0, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def sample_one_each(given: torch.Tensor, states: list[SamplerState]) -> list[int]:
    return [entry[0].token for entry in sample(given.clone(), states, [()] * len(states))]


def tokens_of(entry: list[SampledToken]) -> list[int]:
    return [sampled.token for sampled in entry]


def support(row: torch.Tensor, **options: object) -> set[int]:
    """The tokens that these options can ever choose: those that would be kept if they were drawn."""
    params = state(**options).params
    blocks, names = draw.as_blocks(row.clone()), torch.arange(row.shape[1] + -row.shape[1] % draw.BLOCK)[None]
    peaks = blocks.amax(-1)
    if bucket := draw._bucket(params.top_k, peaks.shape[1]):
        blocks, peaks, numbers = draw._top_k(blocks, peaks, [params.top_k], bucket)
        names = names.view(-1, draw.BLOCK)[numbers[0]].view(1, -1)
    weights, peaks = draw._weigh(blocks, peaks, [params])
    drawn = weights.flatten()[:, None]
    mass = (weights.double().sum() * params.top_p if params.top_p < 1 else torch.tensor(torch.inf)).expand(drawn.shape)
    rows = torch.zeros(len(drawn), dtype=torch.long)
    rejected, _, _ = draw.check_drawn(weights, peaks, rows, drawn, torch.full_like(drawn, params.min_p), mass)
    return set(names[0, ~rejected & (drawn[:, 0] > 0)].tolist())


def test_temperature_zero_takes_the_likeliest() -> None:
    given = logits(3)
    assert sample_one_each(given, [state(temperature=0.0) for _ in range(3)]) == given.argmax(-1).tolist()


def test_of_equally_likely_tokens_greedy_takes_the_first_as_argmax_does() -> None:
    given = torch.zeros(1, VOCAB)
    given[0, [700, 130, 131, 900]] = 5.0
    assert sample_one_each(given, [state(temperature=0.0)]) == [130]


@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0])
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 5}, {"top_k": 400}, {"top_k": 5000}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_p": 0.999},
        {"top_k": 40, "top_p": 0.5, "min_p": 0.02}, {"top_p": 0.9, "min_p": 0.001}, {"top_p": 0.3, "min_p": 0.5},
    ],
    ids=str,
)  # fmt: skip
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


def distribution(row: torch.Tensor, **options: float) -> torch.Tensor:
    """Returns the probabilities that transformers' filters leave of a row."""
    scores = TemperatureLogitsWarper(options.get("temperature", 1.0))(None, row)
    if "top_k" in options:
        scores = TopKLogitsWarper(int(options["top_k"]))(None, scores)
    if "top_p" in options:
        scores = TopPLogitsWarper(options["top_p"])(None, scores)
    if "min_p" in options:
        scores = MinPLogitsWarper(options["min_p"])(None, scores)
    return scores.softmax(-1)[0]


def assert_drawn_from(tokens: list[int], expected: torch.Tensor) -> None:
    """Pearson's chi-square; the bound is passed by chance once in about ten thousand seeds."""
    counts = torch.bincount(torch.tensor(tokens), minlength=len(expected)).double()
    wanted = expected.double() * len(tokens)
    assert not counts[wanted == 0].any()
    common = wanted >= 5  # rarer tokens are joined into one class: the statistic's distribution needs 5
    counts = torch.cat([counts[common], counts[~common].sum()[None]])
    wanted = torch.cat([wanted[common], wanted[~common].sum()[None]])
    keep = wanted > 0
    statistic = float(((counts[keep] - wanted[keep]) ** 2 / wanted[keep]).sum())
    freedom = int(keep.sum()) - 1
    if not freedom:
        return  # a single token
    # Wilson and Hilferty's approximation of the 0.9999 quantile.
    bound = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < bound, (statistic, bound)


SMALL = 300  # not a multiple of a block

FILTERS = [
    {}, {"temperature": 2.0}, {"top_k": 9}, {"top_p": 0.8}, {"top_p": 0.25}, {"min_p": 0.2},
    {"top_k": 60, "top_p": 0.7, "min_p": 0.1, "temperature": 1.5}, {"top_p": 0.95, "temperature": 0.8},
]  # fmt: skip


MANY = [pytest.mark.slow, pytest.mark.long]


@pytest.mark.parametrize("count", [4000, pytest.param(20_000, marks=MANY)])
@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_tokens_come_as_often_as_their_probability_says(options: dict[str, float], count: int) -> None:
    row = logits(spread=1.5, vocab=SMALL)
    states = [state(seed=seed, vocab=SMALL, **options) for seed in range(count)]
    drawn = sample_one_each(row.expand(len(states), -1), states)
    assert_drawn_from(drawn, distribution(row, **options))


@pytest.mark.parametrize("count", [2500, pytest.param(10_000, marks=MANY)])
@pytest.mark.parametrize("options", [{}, {"top_k": 9}, {"top_p": 0.25}, FILTERS[6]], ids=str)
def test_tokens_come_as_often_as_their_probability_says_with_any_drafts(options: dict[str, float], count: int) -> None:
    # The model's distribution depends on the last token alone, so that both tokens of a pair can be checked.
    table = logits(SMALL, spread=1.5, vocab=SMALL)
    first = distribution(table[:1], **options)
    likely = int(first.argmax())
    states = [state(seed=seed, vocab=SMALL, **options) for seed in range(count)]
    draft = (likely, 3)
    given = table[[0, *draft]].repeat(len(states), 1)
    entries = sample(given, states, [draft] * len(states))
    assert_drawn_from([entry[0].token for entry in entries], first)
    accepted = [entry[1].token for entry in entries if entry[0].token == likely]
    assert all(len(entry) == 1 for entry in entries if entry[0].token != likely)
    assert_drawn_from(accepted, distribution(table[likely : likely + 1], **options))


OPTIONS = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.3, 0.8, 1.0, 2.0]), "seed": st.integers(0, 2**63)},
    optional={
        "top_k": st.sampled_from([1, 2, 7, 50, 400, 2000]),
        "top_p": st.sampled_from([0.05, 0.5, 0.9, 0.999]),
        "min_p": st.sampled_from([0.01, 0.3, 1.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.3]),
        "frequency_penalty": st.sampled_from([-2.0, 1.5]),
        "presence_penalty": st.sampled_from([-1.0, 2.0]),
        "min_tokens": st.integers(0, 5),
        "ignore_eos": st.booleans(),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=4).map(
            lambda bias: tuple(bias.items())
        ),
        "logprobs": st.integers(0, 20),
    },
)


class Model:
    """Logits that depend on the last token and on how many there are; `grid` makes many of them equal."""

    def __init__(self, seed: int, spread: float, grid: float | None) -> None:
        table = logits(64, spread, seed)
        self.table = table if grid is None else (table / grid).round() * grid

    def row(self, output: list[int]) -> torch.Tensor:
        return self.table[(sum(output[-1:]) * 7 + len(output)) % len(self.table)]


def generate(
    model: Model, options: list[dict[str, object]], drafts: list[list[tuple[int, ...]]] | None, length: int
) -> list[list[SampledToken]]:
    """Run requests of these options together; `drafts` are per request, taken in turn, cut where they are too long."""
    states = [state(prompt=(5, 6, 7), **o) for o in options]
    outputs: list[list[SampledToken]] = [[] for _ in states]
    step = 0
    while live := [i for i, output in enumerate(outputs) if len(output) < length]:
        offered = []
        for i in live:
            draft = drafts[i][step % len(drafts[i])] if drafts is not None and drafts[i] else ()
            offered.append(draft[: length - len(outputs[i]) - 1])
        rows = [
            model.row([s.token for s in outputs[i]] + list(draft[:j]))
            for i, draft in zip(live, offered, strict=True)
            for j in range(1 + len(draft))
        ]
        for i, entry in zip(live, sample(torch.stack(rows), [states[i] for i in live], offered), strict=True):
            outputs[i] += entry
            for sampled in entry:
                states[i].advance(sampled.token)
        step += 1
    return outputs


BATCHES = given(
    options=st.lists(OPTIONS, min_size=1, max_size=6),
    seed=st.integers(0, 1000),
    spread=st.sampled_from([0.05, 1.0, 4.0]),
    grid=st.sampled_from([None, 0.5]),
    with_drafts=st.booleans(),
    data=st.data(),
)


@settings(max_examples=20, phases=[Phase.generate])  # to make a failure smaller takes minutes
@BATCHES
def test_a_seeded_request_generates_the_same_alone_and_in_any_batch_with_and_without_drafts(**drawn: Any) -> None:
    check_batch(**drawn)


@pytest.mark.slow
@pytest.mark.long
@settings(max_examples=150)
@BATCHES
def test_many_seeded_requests_generate_the_same_alone_and_in_any_batch(**drawn: Any) -> None:
    check_batch(**drawn)


def check_batch(
    options: list[dict[str, object]],
    seed: int,
    spread: float,
    grid: float | None,
    with_drafts: bool,
    data: st.DataObject,
) -> None:
    model, length = Model(seed, spread, grid), 8
    alone = [generate(model, [o], None, length)[0] for o in options]
    drafts = None
    if with_drafts:
        drafts = []
        for said in alone:
            # Drafts that are right, wrong, and right at first.
            right = tokens_of(said)
            cuts = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=3))
            drafts.append([(*right[cut : cut + 2], *right[cut : cut + 1]) for cut in cuts] + [tuple(right[:3])])
    together = generate(model, options, drafts, length)
    assert [tokens_of(said) for said in together] == [tokens_of(said) for said in alone]
    for one, other in zip(together, alone, strict=True):
        for sampled, expected in zip(one, other, strict=True):
            assert [token for token, _ in sampled.top] == [token for token, _ in expected.top]
            assert sampled.logprob == pytest.approx(expected.logprob, abs=1e-5)


def test_accepted_drafts_come_with_the_token_after_them_and_a_wrong_one_ends_the_entry() -> None:
    given = logits(9)
    best = given.argmax(-1).tolist()
    states = [state(temperature=0.0) for _ in range(3)]
    wrong = (best[3] + 1) % VOCAB
    entries = sample(given, states, [(best[0], best[1]), (wrong, best[4]), (best[6], (best[7] + 1) % VOCAB)])
    assert [tokens_of(entry) for entry in entries] == [best[:3], best[3:4], best[6:8]]


def test_penalties_and_bans_count_the_draft_tokens_before_a_row() -> None:
    given = torch.zeros(2, VOCAB)
    given[:, 10], given[:, 20], given[:, EOS] = 5.0, 4.0, 9.0
    one = state(temperature=0.0, presence_penalty=2.0, min_tokens=1)
    assert tokens_of(sample(given.clone(), [one], [(10,)])[0]) == [10, EOS]
    one = state(temperature=0.0, presence_penalty=2.0, min_tokens=2)
    assert tokens_of(sample(given.clone(), [one], [(10,)])[0]) == [10, 20]
    assert one.position == 0
    assert one.tally is not None
    assert not len(one.tally.with_draft(())[0])


def test_without_a_seed_two_requests_differ() -> None:
    assert state(seed=None).seed != state(seed=None).seed


def test_positions_and_attempts_draw_different_numbers() -> None:
    numbers = {state().uniform(position, attempt) for position in range(50) for attempt in range(4)}
    assert len(numbers) == 200
    assert all(0 <= number < 1 for number in numbers)


def penalised(given: torch.Tensor, one: SamplerState) -> torch.Tensor:
    assert one.tally is not None
    logits_processing.penalise(given, [(0, one.params, *one.tally.with_draft(()))])
    return given


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    given, one = logits(), state(prompt=(3, 4, 5, 4), repetition_penalty=1.7)
    one.advance(9)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[3, 4, 5, 9]]), given.clone())
    assert torch.allclose(penalised(given, one), expected)


def test_frequency_counts_and_presence_does_not() -> None:
    one = state(prompt=(8,), frequency_penalty=0.5, presence_penalty=0.25)
    for token in (3, 3, 4):
        one.advance(token)
    assert penalised(torch.zeros(1, VOCAB), one)[0, [3, 4, 5, 8]].tolist() == [-1.25, -0.75, 0.0, 0.0]


def test_penalties_of_a_long_output_are_those_of_counting_it() -> None:
    one = state(prompt=tuple(range(100, 400)), frequency_penalty=0.1, presence_penalty=0.2, repetition_penalty=1.1)
    output = [(i * i) % 701 for i in range(900)]
    for token in output[:-5]:
        one.advance(token)
    assert one.tally is not None
    tokens, counts = one.tally.with_draft(output[-5:])
    assert sorted(tokens) == sorted({*output, *range(100, 400)})
    assert [output.count(token) for token in tokens] == counts.tolist()


def test_a_bias_is_added_and_minus_a_hundred_bans() -> None:
    given = torch.zeros(1, VOCAB)
    given[0, 3], given[0, 4], given[0, 5] = 500.0, 6.0, 5.0
    assert sample_one_each(given, [state(temperature=0.0, logit_bias=((3, -100.0),))]) == [4]
    assert sample_one_each(given, [state(temperature=0.0, logit_bias=((3, -100.0), (5, 1.5)))]) == [5]
    assert sample_one_each(given, [state(temperature=0.0, logit_bias=((3, -99.0),))]) == [3]
    for seed in range(50):
        assert sample_one_each(given, [state(seed=seed, temperature=2.0, logit_bias=((3, -100.0), (9, 100.0)))]) == [9]


def test_a_bias_outside_the_vocabulary_or_too_many_logprobs_are_refused() -> None:
    with pytest.raises(ValueError, match=rf"logit_bias has the token id {VOCAB + 5}, .* of {VOCAB} tokens"):
        state(logit_bias=((0, 1.0), (VOCAB + 5, 1.0)))
    with pytest.raises(ValueError, match="logprobs"):
        state(logprobs=21)


@pytest.mark.parametrize("options", [{"min_tokens": 2}, {"ignore_eos": True}], ids=str)
def test_the_end_may_not_come_before_min_tokens(options: dict[str, object]) -> None:
    given, one = torch.zeros(1, VOCAB), state(temperature=0.0, logit_bias=((EOS, 100.0),), **options)
    given[0, EOS] = 9.0
    for _ in range(2):
        assert sample_one_each(given, [one]) != [EOS]
        one.advance(1)
    assert (sample_one_each(given, [one]) == [EOS]) == ("min_tokens" in options)


def test_a_row_of_nan_is_marked_and_harms_no_neighbour() -> None:
    given = logits(4)
    given[1, 17] = torch.nan
    given[2, 18] = torch.inf
    chosen = sample_one_each(given, [state(temperature=t, top_p=0.9) for t in (0.0, 1.0, 0.0, 1.0)])
    assert chosen[1:3] == [INVALID, INVALID]
    assert chosen[0] == given[0].argmax()
    assert chosen[3] == sample_one_each(given[3:], [state(top_p=0.9)])[0]


EXTREMES: dict[str, tuple[float, ...]] = {
    "temperature": (0.0, -0.0, 5e-324, 1e-38, 1e-5, 1.0, 2.0),
    "top_p": (5e-324, 1e-38, 1e-7, 0.5, 1 - 2**-53, 1.0),
    "min_p": (0.0, -0.0, 5e-324, 1e-38, 0.5, 1 - 2**-53, 1.0),
    "top_k": (0, 1, 2, VOCAB, 1_000_000),
    "repetition_penalty": (5e-324, 1e-300, 1e-38, 0.01, 1.0, 10.0, 1e38),
    "frequency_penalty": (-2.0, 0.0, 5e-324, 2.0),
    "presence_penalty": (-2.0, 0.0, 5e-324, 2.0),
    "seed": (-(2**63), -1, 0, 2**63 - 1),
}


def random_bias(rng: random.Random, vocab: int) -> tuple[tuple[int, float], ...]:
    tokens = rng.sample(range(vocab), rng.choice([0, 1, 50, vocab]))
    return tuple((token, rng.choice([-100.0, -99.9, -5e-324, 100.0])) for token in tokens)


def test_no_extreme_value_of_any_field_makes_a_row_look_broken() -> None:
    rng = random.Random(20)
    prompt = tuple(range(0, VOCAB, 2))
    for number in range(150):
        given = logits(1, spread=rng.choice([0.0, 1.0, 30.0, 1e4, 1e37]), seed=number)
        given[0, rng.randrange(VOCAB)] = rng.choice([-torch.inf, 0.0, 3e38, -3e38])
        options = {name: rng.choice(values) for name, values in EXTREMES.items()}
        chosen = state(prompt, logit_bias=random_bias(rng, VOCAB), min_tokens=rng.choice([0, 4096]), **options)
        for _ in range(rng.choice([0, 10])):
            chosen.advance(rng.randrange(VOCAB))
        [token] = sample_one_each(given, [chosen])
        assert 0 <= token < VOCAB, (options, number)


@pytest.mark.parametrize("fault", [torch.nan, torch.inf])
@pytest.mark.parametrize("penalty", [0.01, 10.0])
def test_a_row_is_broken_by_the_models_own_logits_whatever_penalties_do_to_them(fault: float, penalty: float) -> None:
    given = logits()
    given[0, 5] = fault
    chosen = state((5,), repetition_penalty=penalty, frequency_penalty=2.0, logit_bias=((5, -100.0),))
    assert sample_one_each(given, [chosen]) == [INVALID]


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 10.0},
        {"frequency_penalty": 2.0},
        {"frequency_penalty": -2.0},
    ],
    ids=str,
)
def test_no_penalty_outdoes_a_ban(options: dict[str, float]) -> None:
    given = torch.full((1, VOCAB), -torch.inf)
    given[0, [EOS, 7, 8]] = torch.tensor([200.0, 30.0, -30.0])
    chosen = state((EOS, 7), temperature=0.0, min_tokens=10_000, logit_bias=((7, -100.0),), **options)
    for _ in range(8000):
        chosen.advance(8)
    assert sample_one_each(given, [chosen]) == [8]


def test_a_row_that_allows_nothing_is_marked_and_not_drawn_from() -> None:
    given = logits(2)
    given[1] = -torch.inf
    for temperature in (0.0, 1.0):
        assert sample_one_each(given, [state(temperature=temperature, top_p=0.9)] * 2)[1] == DEAD_END


def test_nan_after_an_accepted_draft_ends_the_entry() -> None:
    given = logits(3)
    given[1] = torch.nan
    best = int(given[0].argmax())
    (entry,) = sample(given, [state(temperature=0.0)], [(best, 5)])
    assert tokens_of(entry) == [best, INVALID]


def test_logprobs_are_those_of_the_row_before_any_change() -> None:
    given = logits(2)
    expected = given.log_softmax(-1)
    top = expected.topk(5)
    options = {"temperature": 0.3, "top_k": 3, "logit_bias": ((7, 50.0),), "presence_penalty": 2.0, "logprobs": 5}
    first, second = sample(given.clone(), [state(**options), state(logprobs=0)], [(), ()])
    assert first[0].token == 7
    assert first[0].logprob == pytest.approx(float(expected[0, 7]), abs=1e-5)
    assert [token for token, _ in first[0].top] == top.indices[0].tolist()
    assert [value for _, value in first[0].top] == pytest.approx(top.values[0].tolist(), abs=1e-5)
    assert second[0].logprob == pytest.approx(float(expected[1, second[0].token]), abs=1e-5)
    assert second[0].top == ()


def test_a_request_without_logprobs_gets_none() -> None:
    first, second = sample(logits(2), [state(), state(logprobs=20)], [(), ()])
    assert first[0].logprob is None
    assert len(second[0].top) == 20


@pytest.mark.parametrize("vocab", [49152, 50257])
def test_a_rows_weights_are_the_same_to_the_last_bit_alone_in_a_batch_and_on_other_threads(vocab: int) -> None:
    given = logits(5, vocab=vocab)
    params = [state(vocab=vocab, temperature=t).params for t in (0.05, 0.7, 0.8, 1.0, 1.9)]
    threads = torch.get_num_threads()

    def weigh(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = draw.as_blocks(given[rows].clone())
        weights, _ = draw._weigh(blocks, blocks.amax(-1), params[rows])
        return weights, weights.sum(-1)

    try:
        torch.set_num_threads(2)
        together, sums = weigh(slice(0, 5))
        for count in (1, 2):
            torch.set_num_threads(count)
            for row in range(5):
                alone, own = weigh(slice(row, row + 1))
                assert torch.equal(alone[0], together[row])
                assert torch.equal(own[0], sums[row])
    finally:
        torch.set_num_threads(threads)
