"""Streams keep at least a third of their speed while prompts are read, for any cost of a step."""

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
def test_steps_take_on_average_at_most_twice_one_without_prompt_tokens(
    rows: int, decode_s: float, token_s: float
) -> None:
    chunks = drive(PrefillPacer(16, 512), rows, decode_s, token_s, 240)
    assert chunks[0] == 0  # measures
    later = chunks[40:]
    seconds = sum(decode_s + token_s * chunk for chunk in later)
    assert seconds <= 2.15 * decode_s * len(later) + token_s * 16  # the last chunk may not be paid back yet
    for chunk in later:
        assert chunk == 0 or 16 <= chunk <= 512
        if chunk > 16:
            assert decode_s + token_s * chunk <= 2.01 * decode_s
        elif chunk == 16:
            assert decode_s + token_s * 17 >= 1.99 * decode_s
    if decode_s + token_s * 16 <= 2 * decode_s:
        assert later.count(0) <= 4, "nothing is owed: only the measuring steps go without"


def test_a_chunk_that_takes_too_long_is_followed_by_steps_without() -> None:
    # Sixteen tokens deep in a long prompt take as long as five steps: the streams get four of their own for each.
    chunks = drive(PrefillPacer(16, 512), 4, 0.01, 0.0025, 200)[40:]
    assert set(chunks) == {0, 16}
    assert chunks.count(16) == pytest.approx(len(chunks) / 4, abs=3)
    assert all(16 in chunks[at : at + 6] for at in range(len(chunks) - 6)), "the prompt is never stopped for long"


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


def test_a_lost_step_does_not_block_later_ones() -> None:
    pacer = PrefillPacer(16, 512)
    assert pacer.chunk(2) == 0
    assert all(pacer.chunk(2) > 0 for _ in range(60))


def test_the_smallest_chunk_is_no_larger_than_the_largest() -> None:
    pacer = PrefillPacer(16, 8)
    assert set(drive(pacer, 1, 0.01, 0.01, 20)) == {0, 8}


def drive_idle(pacer: PrefillPacer, floor_s: float, token_s: float, steps: int) -> int:
    """The chunk after `steps` steps without streams."""
    for _ in range(steps):
        chunk = pacer.idle_chunk()
        pacer.observe(0, chunk, floor_s + token_s * chunk)
    return pacer.idle_chunk()


@given(st.floats(0.001, 0.012), st.floats(0.0001, 0.002))
def test_without_streams_a_short_prompt_waits_for_a_step_of_20_ms_or_the_smallest(
    floor_s: float, token_s: float
) -> None:
    chunk = drive_idle(PrefillPacer(16, 512), floor_s, token_s, 200)
    assert chunk in (16, 512) or floor_s + token_s * chunk == pytest.approx(0.02, rel=0.1)
    assert chunk == 16 or floor_s + token_s * chunk <= 0.022


def test_a_slow_model_computes_long_prompts_in_steps_that_are_worth_their_floor() -> None:
    pacer = PrefillPacer(16, 512)
    pacer.observe(1, 0, 0.1)
    assert drive_idle(pacer, 0.1, 0.001, 200) == pytest.approx(50, abs=2)
