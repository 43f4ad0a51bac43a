"""Shares of traffic are exact to a hundredth of a percent, and the others keep their proportions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.admin.traffic_shares import TOTAL_WEIGHT, OnlyBackend, with_share


@pytest.mark.parametrize(
    ("before", "percent", "after"),
    [
        ({"old": 100}, 5, {"old": 95, "new": 5}),
        ({"old": 95, "new": 5}, 50, {"old": 50, "new": 50}),
        ({"old": 50, "new": 50}, 100, {"new": 100}),
        ({"old": 50, "new": 50}, 0, {"old": 100}),
        ({"a": 3, "b": 1}, 20, {"a": 60, "b": 20, "new": 20}),
        ({"old": 7, "off": 0}, 0.5, {"old": 9950, "new": 50}),
        ({"old": 1}, 1e-9, {"old": 9999, "new": 1}),
    ],
)
def test_a_share_takes_from_the_others_in_proportion(
    before: dict[str, int], percent: float, after: dict[str, int]
) -> None:
    assert with_share(before, "new", percent) == after


def test_a_part_for_the_only_backend_is_an_error() -> None:
    with pytest.raises(OnlyBackend):
        with_share({"new": 100, "off": 0}, "new", 50)


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 10**6), min_size=1), st.floats(0.01, 99.99))
def test_no_weight_is_lost(before: dict[str, int], percent: float) -> None:
    after = with_share(before, "new", percent)
    whole = sum(after.values())
    assert whole in (100, TOTAL_WEIGHT)
    assert abs(after["new"] / whole - percent / 100) <= 0.5 / TOTAL_WEIGHT + 1e-12
    rest = whole - after["new"]
    for name, weight in before.items():
        assert abs(after.get(name, 0) - rest * weight / sum(before.values())) <= 1
