"""The table of malformed bodies against the parser alone, and JSON that is nearly right in any place."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.api.chat_request import parse_chat_request
from serve_app.api.errors import ApiError
from tests.api.requests import SERVED
from tests.malformed import TABLE, Row, documents, schemas, types, values
from tests.malformed.types import FULL, KINDS, changed, without


def outcome(raw: bytes) -> ApiError | None:
    try:
        parse_chat_request(raw, SERVED)
    except ApiError as error:
        return error
    return None


def test_the_table_has_at_least_150_malformed_bodies() -> None:
    assert sum(row.status != 200 for row in TABLE) >= 150


@pytest.mark.parametrize("kind", [documents, types, values, schemas], ids=["documents", "types", "values", "schemas"])
def test_each_malformed_body_has_its_status_and_names_the_field_and_what_to_change(kind: ModuleType) -> None:
    assert [f"{row.name}: {found}" for row in kind.rows() if (found := wrong(row))] == []


def wrong(row: Row) -> str | None:
    """Returns what is wrong with the answer to a row, or None."""
    error = outcome(row.raw)
    if row.status == 200 or row.by_model:
        return None if error is None else f"refused: {error.message}"
    if error is None:
        return "taken"
    told = (error.status, error.type, error.code, error.param)
    begins = f"{row.param} " if row.status == 400 and row.param else ""
    if (
        told != (row.status, "invalid_request_error", row.expected_code, row.param)
        or not 10 < len(error.message) < 500
        or not error.message.startswith(begins)
        or not all(words in error.message for words in row.says)
    ):
        return f"{told}: {error.message}"
    return None


LONG = [pytest.mark.slow, pytest.mark.long]
PATHS = sorted(KINDS)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


def is_answered(body: Any) -> None:
    error = outcome(json.dumps(body).encode("utf-8", "surrogatepass"))
    assert error is None or (error.status in (400, 422) and 10 < len(error.message) < 2000)
    json.dumps(error.body() if error else None).encode()


@pytest.mark.parametrize("count", [50, pytest.param(500, marks=LONG)])
def test_any_value_at_any_path_of_a_full_body_is_accepted_or_refused(count: int) -> None:
    @settings(max_examples=count)
    @given(st.sampled_from(PATHS), json_values)
    def check(path: str, value: Any) -> None:
        is_answered(changed(path, value))

    check()


def test_a_full_body_without_any_one_member_is_accepted_or_refused() -> None:
    for path in PATHS:
        is_answered(without(path))


@pytest.mark.parametrize("count", [50, pytest.param(500, marks=LONG)])
def test_a_full_body_with_any_bytes_changed_is_accepted_or_refused(count: int) -> None:
    @settings(max_examples=count)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        raw = bytearray(json.dumps(FULL).encode())
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, len(raw) - 1))
            raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        error = outcome(bytes(raw))
        assert error is None or error.status in (400, 422)

    check()
