"""The example requests of the API reference: each operation has them, and they run as they are pasted."""

from __future__ import annotations

import ast
import json
import shlex
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from serve_app.admin.code_samples import BASE, FIELD, add_code_samples, literal
from serve_app.admin.document import build_document
from serve_app.settings import GatewaySettings
from tests.gateway.world import FULL_SETTINGS

DOCUMENT = add_code_samples(build_document(GatewaySettings.model_validate(FULL_SETTINGS).models))
OPERATIONS = [(m, path, one) for path, item in DOCUMENT["paths"].items() for m, one in item.items()]


@pytest.mark.parametrize(("method", "path", "operation"), OPERATIONS)
def test_each_operation_has_a_request_in_three_languages(method: str, path: str, operation: dict[str, Any]) -> None:
    curl, python, node = (one["source"] for one in operation[FIELD])
    assert [one["label"] for one in operation[FIELD]] == ["curl", "Python", "Node"]
    words = shlex.split(curl.replace("\\\n", " "))
    assert any(word.startswith(BASE) for word in words), path
    assert ("-d" in words) == ("requestBody" in operation)
    assert ("-X" in words) == (method in ("patch", "put", "delete") or (method == "post" and "-d" not in words))
    ast.parse(python)
    assert "{" + "id}" not in curl + python + node
    if "-d" in words:
        content = operation["requestBody"]["content"]["application/json"]
        schema = {**content["schema"], "components": DOCUMENT["components"]}
        body = json.loads(words[words.index("-d") + 1])
        Draft202012Validator(schema).validate(body)


def test_a_literal_is_the_value_in_each_language() -> None:
    value = {"a": [1, 2.5, True, None], "b-c": {"text": "it's"}, "long": ["x" * 40, "y" * 40], "empty": {}}
    assert ast.literal_eval(literal(value, "python")) == value
    assert json.loads(literal(value, "json")) == value
    assert literal({"a": None, "b-c": True}, "node") == '{ a: null, "b-c": true }'
