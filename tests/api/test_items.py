"""A body's items are counted before it is parsed, and what a body may cost follows from their number."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from serve_app.api import codec
from serve_app.api.codec import has_more_items, have_more_items, parses_in_a_moment
from serve_app.api.errors import ApiError

texts = st.text(alphabet=st.sampled_from('a"\\,[{]}:é\n'), max_size=12)
values = st.recursive(
    st.integers() | texts | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


def items(value: Any) -> int:
    """Brackets and commas that the value has as JSON."""
    if isinstance(value, dict):
        return 1 + max(0, len(value) - 1) + sum(map(items, value.values()))
    if isinstance(value, list):
        return 1 + max(0, len(value) - 1) + sum(map(items, value))
    return 0


@given(values, st.integers(1, 9), st.booleans())
@example(["\\", '\\"', "\\\\"], 1, True)
def test_items_are_counted_exactly_wherever_the_text_is_cut(value: Any, piece: int, is_ascii: bool) -> None:
    raw = json.dumps(value, ensure_ascii=is_ascii).encode()
    count = items(value)
    before, codec._PIECE = codec._PIECE, piece  # type: ignore[misc]
    try:
        assert not has_more_items(raw, count)
        assert count == 0 or has_more_items(raw, count - 1)
    finally:
        codec._PIECE = before  # type: ignore[misc]


def test_what_follows_a_fault_hides_nothing_that_is_parsed_before_it() -> None:
    noise = random.Random(7)
    for _ in range(200):
        rest = bytes(noise.choice(b'\\",[{a') for _ in range(50))
        assert has_more_items(b"[0" + b",0" * 100 + rest, 99)


@pytest.mark.parametrize("piece", [b"[],", b"0,", b'"",', b'{"a":1},', b'"a":1,'])
def test_a_body_of_too_many_items_is_refused_before_it_is_parsed(piece: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "from_json", pytest.fail)
    raw = b'{"user":[' + piece * (4_000_000 // len(piece)) + b"0]}"
    with pytest.raises(ApiError, match="more than 100000 values"):
        codec.parse_object(raw, 4 * 1024 * 1024)


@pytest.mark.parametrize(
    ("body", "quick"),
    [
        ({"messages": [{"role": "user", "content": "x" * 60_000}]}, True),
        ({"messages": [{"role": "user", "content": "x" * 66_000}]}, False),
        ({"messages": [{"role": "user", "content": "Hi"}] * 100}, True),
        ({"messages": [{"role": "user", "content": "Hi"}] * 600}, False),
        ({"user": [[]] * 5000}, False),
    ],
)
def test_only_what_takes_a_moment_is_parsed_at_once(body: Any, quick: bool) -> None:
    assert parses_in_a_moment(json.dumps(body).encode()) is quick


def test_values_of_several_texts_count_together_and_a_fault_in_one_hides_none_of_the_next() -> None:
    texts = [b'{"text": "[1, 2, 3] and , , ,"}', b'["never closed, ', b"[1,2,3]"]
    count = 1 + 1 + 3
    assert not have_more_items(texts, count)
    assert have_more_items(texts, count - 1)
