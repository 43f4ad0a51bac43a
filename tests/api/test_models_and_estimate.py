"""Bodies of the read-only endpoints, and the estimate of a prompt's tokens."""

from __future__ import annotations

import time

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.api import balance_body, estimate_prompt_tokens, model_body, model_list, usage_body


def test_models_show_lengths_and_recommended_temperatures() -> None:
    chat = model_body("svc-chat", context_length=32768, max_output_length=4096, fingerprints=["fp_a"])
    coder = model_body("svc-coder", context_length=32768, max_output_length=4096, fingerprints=["fp_a"])
    assert (chat["id"], chat["object"], chat["context_length"], chat["max_output_length"]) == (
        "svc-chat",
        "model",
        32768,
        4096,
    )
    assert list(chat["recommended_temperatures"].values()) == [0.0, 0.7, 1.0, 1.1, 1.25]
    assert list(coder["recommended_temperatures"].values()) == [1.0]
    listed = model_list([chat, coder])
    assert (listed["object"], [model["id"] for model in listed["data"]]) == ("list", ["svc-chat", "svc-coder"])
    for model in listed["data"]:
        openai.types.Model.model_validate(model)


def test_the_balance_is_told_in_decimal_strings() -> None:
    assert balance_body(available=True, currency="USD", total="3.5", granted="1", topped_up="2.5") == {
        "is_available": True,
        "balance_infos": [
            {"currency": "USD", "total_balance": "3.5", "granted_balance": "1", "topped_up_balance": "2.5"}
        ],
    }


def test_usage_leaves_out_what_the_grouping_leaves_out() -> None:
    row = {"day": "2026-01-31", "model": None, "prompt_tokens": 5, "completion_tokens": 0}
    assert usage_body([row])["data"] == [{"day": "2026-01-31", "prompt_tokens": 5, "completion_tokens": 0}]


def tokens(text: str) -> int:
    return estimate_prompt_tokens([{"role": "user", "content": text}])


def test_the_estimate_follows_the_published_ratios() -> None:
    base = tokens("")
    assert tokens("a" * 1000) - base == pytest.approx(1000 * 0.3 * 1.1, abs=1)
    assert tokens("中" * 1000) - base == pytest.approx(1000 * 0.6 * 1.1, abs=1)
    assert tokens("a中" * 1000) - base == pytest.approx(1000 * 0.9 * 1.1, abs=1)


def test_a_short_request_is_estimated_modestly() -> None:
    """So that small token limits are of use."""
    assert 5 <= tokens("Hello, who are you?") <= 30
    assert estimate_prompt_tokens([]) >= 1


def test_names_and_tool_calls_count() -> None:
    plain = {"role": "assistant", "content": ""}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "x" * 1000}}
    assert estimate_prompt_tokens([{**plain, "tool_calls": [call]}]) > estimate_prompt_tokens([plain]) + 300
    assert estimate_prompt_tokens([{**plain, "name": "x" * 100}]) > estimate_prompt_tokens([plain]) + 30


@given(st.text(st.characters(categories=["L", "Cs", "Zs", "So"])), st.text())
def test_more_text_is_never_fewer_tokens(text: str, more: str) -> None:
    assert tokens(text + more) >= tokens(text) >= 1


@pytest.mark.parametrize(
    "text", ["a" * 10**6, "中" * 10**6, "a中" * 500_000, "é " * 500_000], ids=["ascii", "chinese", "mixed", "accents"]
)
def test_a_megabyte_is_estimated_in_milliseconds(text: str) -> None:
    start = time.process_time()
    tokens(text)
    assert time.process_time() - start < 0.05
