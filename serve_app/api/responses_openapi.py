"""Builds the OpenAPI schema of a request to POST /responses from the declarations of its fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from serve_app.api.chat_openapi import REF, Schema, object_schema, require
from serve_app.api.responses_request import ResponsesRequest

NAME: Final = "ResponsesRequest"
_PREFIX: Final = "Responses"  # begins all schema names, because other doors also have schemas for functions and tools


def responses_request_schemas(identifiers: Sequence[str]) -> dict[str, Schema]:
    """Returns the schemas by name. The schema of the request is `ResponsesRequest`."""
    generated = ResponsesRequest.model_json_schema(ref_template=REF + _PREFIX + "{model}")
    parts = {name: object_schema(_any_of(model)) for name, model in generated.pop("$defs").items()}
    body = object_schema(_any_of(generated), null_is_absent=True)
    body["properties"]["model"]["enum"] = list(identifiers)
    require(parts["ItemReference"], "type")
    parts["ContentPart"]["anyOf"] = [
        {"title": "text", "properties": {"type": {"not": {"const": "refusal"}}, "text": _STRING}, "required": ["text"]},
        {
            "title": "a refusal",
            "properties": {"type": {"const": "refusal"}, "refusal": _STRING},
            "required": ["refusal"],
        },
    ]
    parts["TextFormat"]["anyOf"] = [
        {"title": "without a schema", "properties": {"type": {"enum": ["text", "json_object"]}}},
        {
            "title": "with a schema",
            "properties": {"type": {"const": "json_schema"}, "name": _STRING, "schema": {"type": "object"}},
            "required": ["name", "schema"],
        },
    ]
    parts["ToolChoice"]["anyOf"] = [
        {
            "title": "one tool",
            "properties": {"type": {"enum": ["function", "custom"]}, "name": _STRING},
            "required": ["name"],
        },
        {
            "title": "several tools",
            "properties": {"type": {"const": "allowed_tools"}, "mode": _STRING, "tools": {"type": "array"}},
            "required": ["mode", "tools"],
        },
    ]
    parts.pop("OtherItem", None)
    return {NAME: body, **{_PREFIX + name: schema for name, schema in parts.items()}}


_STRING: Final[Schema] = {"type": "string"}


def _any_of(schema: Any) -> Any:
    """Returns the schema with `anyOf` in place of `oneOf`, and without `OtherItem`, which is always refused."""
    if isinstance(schema, list):
        return [_any_of(one) for one in schema if one != {"$ref": f"{REF}{_PREFIX}OtherItem"}]
    if not isinstance(schema, dict):
        return schema
    return {("anyOf" if name == "oneOf" else name): _any_of(value) for name, value in schema.items()}
