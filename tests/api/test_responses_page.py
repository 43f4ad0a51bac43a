"""docs/responses.md lists each field of a request with the type, default and range of its declaration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from serve_app.api.responses_chat import EXTENSIONS
from serve_app.api.responses_openapi import responses_request_schemas
from serve_app.api.responses_request import ITEM_TAGS, REFUSED

TEXT = (Path(__file__).parents[2] / "docs" / "responses.md").read_text()
FIELDS: dict[str, dict[str, Any]] = responses_request_schemas(["svc-chat"])["ResponsesRequest"]["properties"]


def rows() -> dict[str, tuple[str, str, str]]:
    """Type, default and what is allowed, by field of the body."""
    found = {}
    lines = TEXT.split("| field | type | default | allowed |\n|---|---|---|---|\n")[1].split("\n\n")[0]
    for line in lines.splitlines():
        names, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for name in re.findall(r"`([a-z_]+)[.`]", names):
            found[name] = (cells[0], cells[1], cells[2])
    return found


ROWS = rows()


def test_the_table_has_each_field_and_no_other() -> None:
    assert set(ROWS) == set(FIELDS)


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_a_row_has_the_type_default_and_range_of_the_declaration(field: str) -> None:
    kind, default, allowed = ROWS[field]
    schema = FIELDS[field]
    if isinstance(schema.get("type"), list) and schema["type"][0] != "object" and field != "stream_options":
        assert kind.startswith(schema["type"][0])
    declared = schema.get("default")
    if isinstance(declared, bool):
        assert default.startswith(str(declared).lower())
    elif isinstance(declared, int | float):
        assert float(default) == declared
    elif declared is not None:
        assert default == f"`{declared}`"
    if "exclusiveMinimum" in schema:
        assert f"above {schema['exclusiveMinimum']}, at most {schema['maximum']}" in allowed
    elif "maximum" in schema:
        assert f"{schema['minimum']} to {schema['maximum']}" in allowed


def test_the_page_names_the_extensions_the_refused_fields_and_the_items() -> None:
    for name in (*EXTENSIONS, *REFUSED, *ITEM_TAGS):
        assert f"`{name}`" in TEXT
