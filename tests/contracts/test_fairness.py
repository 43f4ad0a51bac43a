"""Tests of how queued work is counted."""

from __future__ import annotations

import pytest

from serve_app.contracts.fairness import count_fairly


@pytest.mark.parametrize(
    ("amounts", "counted"),
    [([], 0), ([700], 700), ([90_000], 2048), ([90_000, 100, 300], 2448), ([9000, 8000, 7000], 24_000)],
)
def test_a_tenants_queue_counts_up_to_twice_the_mean_of_the_others(amounts: list[int], counted: int) -> None:
    assert count_fairly(amounts, 2048) == counted
