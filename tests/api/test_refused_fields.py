"""Fields of other services that would change a reply: refused with what to send, unless their value changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serve_app.api.refused_fields import REFUSED
from tests.api.requests import parse, refused

SET: dict[str, Any] = {
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "bad_words": ["a"],
    "best_of": 2,
    "modalities": ["text", "audio"],
    "audio": {"voice": "alloy", "format": "wav"},
    "web_search_options": {},
    "length_penalty": 1.2,
    "use_beam_search": True,
    "echo": True,
    "truncate_prompt_tokens": -1,
}


@pytest.mark.parametrize("field", REFUSED)
def test_a_field_that_would_change_the_reply_is_refused_with_what_to_send(field: str) -> None:
    error = refused(**{field: SET.get(field, "x")})
    assert (error.status, error.param) == (422, field)
    assert error.message.startswith(field)
    assert (
        "Send " in error.message
        or "Leave it out" in error.message
        or "Write " in error.message
        or "Join " in error.message
    )


@pytest.mark.parametrize("field", REFUSED)
def test_a_value_that_changes_nothing_is_accepted(field: str) -> None:
    for value in (None, False, [], "", *REFUSED[field].harmless):
        assert parse(**{field: value}) == parse()


def test_the_first_refused_field_of_the_table_is_named() -> None:
    assert refused(echo=True, bad_words=["a"]).param == "bad_words"


def test_the_document_lists_each_refused_field() -> None:
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    listed = text.split("### Fields that are refused")[1].split("\n#")[0]
    assert [field for field in REFUSED if f"`{field}`" not in listed] == []
