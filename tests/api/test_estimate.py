"""The estimate of a prompt's tokens."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.api.prompt_estimate import estimate_prompt_tokens


def tokens(text: str) -> int:
    return estimate_prompt_tokens([{"role": "user", "content": text}])


def test_the_estimate_follows_the_published_ratios() -> None:
    base = tokens("")
    assert tokens("a" * 1000) - base == pytest.approx(1000 * 0.3 * 1.1, abs=1)
    assert tokens("中" * 1000) - base == pytest.approx(1000 * 0.6 * 1.1, abs=1)
    assert tokens("a中" * 1000) - base == pytest.approx(1000 * 0.9 * 1.1, abs=1)


def test_a_short_request_is_estimated_modestly() -> None:
    """A high estimate would make small token limits useless."""
    assert 5 <= tokens("Hello, who are you?") <= 30
    assert estimate_prompt_tokens([]) >= 1


def test_names_and_tool_calls_count() -> None:
    plain = {"role": "assistant", "content": ""}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "x" * 1000}}
    assert estimate_prompt_tokens([{**plain, "tool_calls": [call]}]) > estimate_prompt_tokens([plain]) + 300
    assert estimate_prompt_tokens([{**plain, "name": "x" * 100}]) > estimate_prompt_tokens([plain]) + 30


some = st.text("aé中\u3000 😀\ud800\x00")


@given(some, some)
def test_more_text_is_never_fewer_tokens(text: str, more: str) -> None:
    assert tokens(text + more) >= tokens(text) >= 1


@pytest.mark.parametrize(
    "text", ["a" * 10**6, "中" * 10**6, "a中" * 500_000, "é " * 500_000], ids=["ascii", "chinese", "mixed", "accents"]
)
def test_a_megabyte_is_estimated_without_a_step_of_python_for_each_character(text: str) -> None:
    steps = 0

    def trace(frame: FrameType, event: str, of: Any) -> Any:
        nonlocal steps
        steps += 1
        return trace

    sys.settrace(trace)
    try:
        tokens(text)
    finally:
        sys.settrace(None)
    assert 0 < steps < 1000
