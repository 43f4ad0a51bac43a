"""The table of request fields in docs/api.md has each field with the type, default and range of its declaration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from serve_app.api.chat_openapi import chat_request_schemas

DOCUMENT = Path(__file__).parents[2] / "docs" / "api.md"
FIELDS: dict[str, dict[str, Any]] = chat_request_schemas(["svc-chat"], 4096)["ChatCompletionRequest"]["properties"]


def rows() -> dict[str, tuple[str, str, str]]:
    """Type, default and what is allowed, by field of the body; fields inside others have no rule here."""
    found = {}
    lines = DOCUMENT.read_text().split("| field | type | default | allowed |\n|---|---|---|---|\n")[1].split("\n\n")[0]
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
    if isinstance(schema.get("type"), list):
        assert kind.startswith(schema["type"][0])
    declared = schema.get("default")
    if isinstance(declared, bool):
        assert default.startswith(str(declared).lower())
    elif declared is not None:
        assert float(default.split(",")[0]) == declared
    if "exclusiveMinimum" in schema:
        assert f"above {schema['exclusiveMinimum']}, at most {schema['maximum']}" in allowed
    elif "minimum" in schema and "maximum" not in schema:
        assert f"at least {schema['minimum']}" in allowed
    elif "minimum" in schema and field != "seed":
        assert f"{schema['minimum']} to {schema['maximum']}" in allowed
    for bound in re.findall(r"'maxItems': (\d+)", str(schema)):
        assert f"at most {bound}" in allowed
