"""The tables of fields in the pages of the doors have each field with the range of its declaration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from serve_app.api.chat_openapi import chat_request_schemas
from serve_app.api.messages_door import ERRORS
from serve_app.api.messages_openapi import messages_schemas
from serve_app.api.messages_request import BLOCKS
from serve_app.api.tokenize_door import tokenize_schemas

DOCS = Path(__file__).parents[2] / "docs"
HEAD = "| field | type | default | allowed |\n|---|---|---|---|\n"
CHAT = chat_request_schemas(["svc-chat"], 4096)["ChatCompletionRequest"]
SCHEMAS = {**messages_schemas(["svc-chat"]), **tokenize_schemas(CHAT, ["svc-chat"])}
TABLES = [
    ("messages.md", 1, "MessagesRequest"),
    ("tokenize.md", 1, "TokenizeRequest"),
    ("tokenize.md", 2, "DetokenizeRequest"),
]


def rows(page: str, number: int) -> dict[str, list[str]]:
    table = (DOCS / page).read_text().split(HEAD)[number].split("\n\n")[0]
    found = {}
    for line in table.replace("\\|", "").splitlines():
        names, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        found.update(dict.fromkeys(re.findall(r"`([a-z_]+)`", names), cells))
    return found


@pytest.mark.parametrize(("page", "number", "name"), TABLES)
def test_a_table_has_each_field_of_its_body_with_its_type_and_range(page: str, number: int, name: str) -> None:
    fields: dict[str, Any] = SCHEMAS[name]["properties"]
    found = rows(page, number)
    assert set(found) == set(fields)
    for field, (kind, default, allowed) in found.items():
        schema = fields[field]
        if kind.startswith("as in"):
            continue
        if isinstance(schema.get("type"), list):
            assert kind.startswith(schema["type"][0])
        assert ("required" in kind) is (field in SCHEMAS[name].get("required", ()))
        if "default" in schema and isinstance(schema["default"], bool):
            assert default == str(schema["default"]).lower()
        if "exclusiveMinimum" in schema:
            assert f"above {schema['exclusiveMinimum']}, at most {schema['maximum']}" in allowed
        elif "maximum" in schema:
            assert f"{schema['minimum']} to {schema['maximum']}" in allowed
        for bound in re.findall(r"'maxItems': (\d+)", str(schema)):
            assert f"at most {bound}" in allowed


def test_the_page_of_messages_has_each_block_and_each_error() -> None:
    text = (DOCS / "messages.md").read_text()
    for _, kind, required in BLOCKS.values():
        table = text.split("### Content blocks")[1].split("\n- ")[0].splitlines()
        [row] = [line for line in table if line.startswith("|") and f"`{kind}`" in line.split("|")[1]]
        assert all(f"`{field}`" in row for field in required)
    assert dict(re.findall(r"^\| (\d{3}) \| `(\w+)` \|", text, re.MULTILINE)) == {
        str(status): kind for status, kind in ERRORS.items()
    }
