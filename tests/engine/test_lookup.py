"""Prompt lookup: the guess is what followed the longest agreement, and text without repeats costs nearly nothing."""

from __future__ import annotations

import itertools
import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.engine.scheduling.lookup import (
    _CANDIDATES,
    _LONGEST,
    _LONGEST_PAUSE,
    GuessLength,
    PairIndex,
    PromptLookup,
)


def by_hand(tokens: list[int], count: int) -> tuple[int, ...]:
    """The same by comparing everything with everything."""
    end = len(tokens) - 1
    best, agreed, looked = -1, 1, 0
    for place in range(end - 1, 0, -1):
        length = 0
        while length < min(_LONGEST, place + 1) and tokens[place - length] == tokens[end - length]:
            length += 1
        looked += length >= 2
        if looked > _CANDIDATES:
            break
        if length > agreed:
            best, agreed = place, length
    if best < 0 or count < 1:
        return ()
    text = list(tokens)
    for step in range(count):
        text.append(text[best + 1 + step])
    return tuple(text[len(tokens) :])


def test_what_followed_the_last_tokens_before_is_the_guess() -> None:
    assert PairIndex([1, 2, 3, 4, 5, 1, 2]).continuation(3) == (3, 4, 5)
    assert PairIndex([1, 2, 3, 4, 5, 9, 2]).continuation(3) == ()
    assert PairIndex([1, 2]).continuation(3) == ()
    assert PairIndex([]).continuation(3) == ()


def test_the_longest_agreement_wins_and_among_equals_the_latest() -> None:
    assert PairIndex([7, 1, 2, 3, 10, 1, 2, 3, 20, 8, 2, 3, 30, 7, 1, 2, 3]).continuation(1) == (10,)
    assert PairIndex([1, 2, 10, 1, 2, 20, 1, 2]).continuation(1) == (20,)


def test_a_cycle_is_continued_as_one() -> None:
    assert PairIndex([5, 5, 5]).continuation(4) == (5, 5, 5, 5)
    assert PairIndex([9, 1, 2, 3, 1, 2, 3]).continuation(7) == (1, 2, 3, 1, 2, 3, 1)


@given(st.lists(st.integers(0, 3), max_size=80), st.integers(0, 9), st.lists(st.integers(1, 5), max_size=30))
def test_an_index_that_grows_finds_what_a_search_from_scratch_finds(
    tokens: list[int], count: int, growth: list[int]
) -> None:
    seen: list[int] = []
    index = PairIndex(seen)
    for piece in [*growth, len(tokens)]:
        seen += tokens[len(seen) : len(seen) + piece]
        assert index.continuation(count) == by_hand(seen, count)


def test_an_index_of_a_long_context_is_small_and_a_token_is_looked_at_once() -> None:
    chance = random.Random(0)
    tokens = [chance.randrange(50_000) for _ in range(32_768)]
    index = PairIndex(tokens)
    index.continuation(4)
    entries = len(index._latest)
    size = sys.getsizeof(index._latest) + sys.getsizeof(index._before) + entries * (sys.getsizeof(1 << 40) + 32)
    assert size < 160 * len(tokens)
    before = dict(index._latest)
    tokens.append(1)
    index.continuation(4)
    assert len(index._latest.items() - before.items()) == 1


def test_a_guess_gets_longer_while_it_is_right_and_one_more_than_was_right_when_not() -> None:
    length = GuessLength(8)
    lengths = []
    for right in (2, 4, 8, 8, 3, 4, 8):
        lengths.append(length.next())
        length.learn(lengths[-1], right)
    assert lengths == [2, 4, 8, 8, 8, 4, 8]


def test_misses_are_followed_by_pauses_that_double() -> None:
    length = GuessLength(8)
    asked = []
    for step in range(1000):
        if guess := length.next():
            asked.append(step)
            length.learn(guess, 0)
    gaps = [b - a for a, b in itertools.pairwise(asked)]
    assert gaps[:7] == [2, 3, 5, 9, 17, 33, 65]
    assert set(gaps[7:]) == {_LONGEST_PAUSE + 1}
    while not length.next():
        pass
    length.learn(1, 1)
    assert length.next() == 2
    length.learn(2, 0)
    assert [length.next() for _ in range(2)] == [0, 1]


def test_text_that_matches_and_never_follows_costs_few_rows() -> None:
    """A thousand steps in which a match can always be found, and is always wrong."""
    chance = random.Random(1)
    tokens = [chance.randrange(4) for _ in range(100)]
    lookup, rows = PromptLookup(tokens, 8), 0
    for _ in range(1000):
        guess = lookup.guess(8)
        rows += len(guess)
        if guess:
            lookup.learn(guess, 0)
        tokens.append((guess[0] + 1 + chance.randrange(3)) % 4 if guess else chance.randrange(4))
    assert 0 < rows <= 30


@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_guess_is_never_longer_than_its_bounds(most: int) -> None:
    lookup = PromptLookup([1, 2, 3, 1, 2, 3, 1, 2], most)
    for limit in (5, 2, 1, 0):
        guess = lookup.guess(limit)
        assert len(guess) <= min(most, limit)
        if guess:
            lookup.learn(guess, len(guess))
