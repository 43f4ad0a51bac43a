"""Streams keep at least a third of their speed while prompts are read, whatever a step costs on this machine."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.engine.scheduling.pacing import PrefillPacer


def drive(pacer: PrefillPacer, rows: int, decode_s: float, token_s: float, steps: int, noise: float = 0.0) -> list[int]:
    """The chunks of `steps` steps on a machine with these costs."""
    chance, chunks = random.Random(0), []
    for _ in range(steps):
        chunks.append(pacer.chunk(rows))
        seconds = decode_s + token_s * chunks[-1]
        pacer.observe(rows, chunks[-1], seconds * (1 + noise * chance.random()))
    return chunks


@given(st.integers(1, 64), st.floats(0.005, 0.3), st.floats(0.0001, 0.01))
def test_a_step_with_prompt_tokens_takes_at_most_twice_one_without(rows: int, decode_s: float, token_s: float) -> None:
    chunks = drive(PrefillPacer(16, 512), rows, decode_s, token_s, 40)
    assert chunks[0] == 0  # measures
    for chunk in chunks[10:]:
        assert 16 <= chunk <= 512
        assert decode_s + token_s * chunk <= 2.01 * decode_s or chunk == 16
        assert decode_s + token_s * (chunk + 1) >= 1.99 * decode_s or chunk == 512


def test_the_chunk_follows_the_number_of_streams() -> None:
    pacer = PrefillPacer(16, 512)
    many = drive(pacer, 32, 0.034, 0.001, 20)[-1]
    few = drive(pacer, 1, 0.016, 0.001, 20)
    assert many == pytest.approx(34, abs=1)
    assert few[0] == 0  # not yet measured with so few
    assert few[-1] == pytest.approx(16, abs=1)
    assert drive(pacer, 32, 0.034, 0.001, 2)[0] == pytest.approx(many, abs=1)


def test_what_was_measured_long_ago_is_measured_again() -> None:
    pacer = PrefillPacer(1, 512)
    drive(pacer, 4, 0.01, 0.001, 20)
    chunks = drive(pacer, 4, 0.05, 0.001, 400)
    assert 3 <= chunks.count(0) <= 8
    assert chunks[-1] > 30


def test_one_slow_step_does_not_stop_prompts_nor_streams() -> None:
    pacer = PrefillPacer(16, 512)
    usual = drive(pacer, 4, 0.02, 0.0005, 20, noise=0.1)[-1]
    pacer.observe(4, usual, 5.0)
    assert pacer.chunk(4) > usual / 2.5
    pacer.observe(4, 0, 5.0)
    assert pacer.chunk(4) < usual * 2
    assert drive(pacer, 4, 0.02, 0.0005, 200, noise=0.1)[-1] == pytest.approx(usual, rel=0.5)


def test_a_step_that_was_lost_is_not_waited_for() -> None:
    pacer = PrefillPacer(16, 512)
    assert pacer.chunk(2) == 0
    assert all(pacer.chunk(2) > 0 for _ in range(60))


def test_the_smallest_chunk_is_no_larger_than_the_largest() -> None:
    pacer = PrefillPacer(16, 8)
    assert drive(pacer, 1, 0.01, 0.01, 5)[1:] == [8] * 4
