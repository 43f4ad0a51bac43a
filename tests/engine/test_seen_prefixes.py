"""Tests of the estimate of what an engine has in its prefix cache."""

from __future__ import annotations

from serve_app.engine.scheduling.seen_prefixes import BLOCK, SeenPrefixes


def prompt(blocks: int, start: int = 0) -> tuple[int, ...]:
    return tuple(range(start, start + blocks * BLOCK))


def test_the_common_beginning_is_found_in_whole_blocks() -> None:
    seen = SeenPrefixes(10_000)
    assert seen.count_seen("a", prompt(4)) == 0
    assert seen.count_seen("a", prompt(2) + prompt(3, start=5000)) == 2 * BLOCK
    assert seen.count_seen("a", (*prompt(3)[:-1], 0)) == 2 * BLOCK


def test_a_prompt_that_is_known_whole_has_one_token_to_compute() -> None:
    seen = SeenPrefixes(10_000)
    seen.count_seen("a", prompt(2))
    assert seen.count_seen("a", prompt(2)) == 2 * BLOCK - 1


def test_the_same_block_behind_another_beginning_is_not_found() -> None:
    seen = SeenPrefixes(10_000)
    seen.count_seen("a", prompt(2))
    assert seen.count_seen("a", prompt(1, start=5000) + prompt(2)[BLOCK:]) == 0


def test_owners_do_not_share() -> None:
    seen = SeenPrefixes(10_000)
    seen.count_seen("a", prompt(2))
    assert seen.count_seen("b", prompt(2)) == 0


def test_the_prompt_that_was_unused_longest_is_forgotten_from_its_end() -> None:
    seen = SeenPrefixes(6 * BLOCK)
    seen.count_seen("a", prompt(4))
    seen.count_seen("a", prompt(3, start=5000))
    assert seen.count_seen("a", prompt(4)) == 3 * BLOCK


def test_an_engine_without_a_cache_has_nothing() -> None:
    seen = SeenPrefixes(0)
    seen.count_seen("a", prompt(2))
    assert seen.count_seen("a", prompt(2)) == 0
