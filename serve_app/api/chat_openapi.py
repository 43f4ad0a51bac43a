"""Builds the OpenAPI schema of a chat request from the declarations of its fields."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from serve_app.api.chat_messages import MESSAGES
from serve_app.api.chat_request import ChatRequest
from serve_app.api.codec import Shape
from serve_app.api.field_checks import OnlyWith, Range

Schema = dict[str, Any]

REF: Final = "#/components/schemas/"


def chat_request_schemas(identifiers: Sequence[str], most_output: int) -> dict[str, Schema]:
    """Returns the schemas by name. The schema of the request is `ChatCompletionRequest`.

    `identifiers` may contain aliases. `most_output` is the models' maximum output in tokens.
    """
    schemas = body_schemas(ChatRequest, "ChatCompletionRequest", identifiers, most_output)
    schemas |= _messages(schemas.pop("Message"))
    _complete_variants(schemas)
    return schemas


def body_schemas(kind: type[Shape], name: str, identifiers: Sequence[str], most_output: int = 0) -> dict[str, Schema]:
    """Builds the schemas of a body from the declarations of its fields. The body's own schema is called `name`."""
    generated = kind.model_json_schema(ref_template=REF + "{model}")
    schemas = {one: object_schema(model) for one, model in generated.pop("$defs", {}).items()}
    body = schemas[name] = object_schema(generated, null_is_absent=True)
    fields = body["properties"]
    fields["model"] |= _names(identifiers)
    body["allOf"] = []  # rules that involve two fields
    for attribute, declared in kind.model_fields.items():
        field = declared.alias or attribute
        for marker in declared.metadata:
            if isinstance(marker, Range) and marker.high is None:
                fields[field]["maximum"] = most_output
            elif isinstance(marker, OnlyWith):
                unset = {"properties": {field: {"type": "null"}}}  # absent or null
                flag = {"properties": {marker.flag: {"const": True}}, "required": [marker.flag]}
                body["allOf"].append({"anyOf": [unset, flag]})
    if not body["allOf"]:
        del body["allOf"]
    return schemas


def _names(identifiers: Sequence[str]) -> Schema:
    """Returns the schema of a model's name."""
    exact = [name for name in identifiers if not name.endswith("*")]
    prefixes = [re.escape(name[:-1]) for name in identifiers if name.endswith("*")]
    return {"anyOf": [{"enum": exact}, {"pattern": f"^({'|'.join(prefixes)})"}]} if prefixes else {"enum": exact}


def object_schema(model: Schema, null_is_absent: bool = False) -> Schema:
    """Converts pydantic's schema of an object for the document. With `null_is_absent`, optional fields may be null."""
    required = model.get("required", [])
    fields = {
        name: _field(schema, null_is_absent and name not in required) for name, schema in model["properties"].items()
    }
    description = _on_one_line(model["description"].split("\n\n")[0])  # later paragraphs are for developers
    schema = {"type": "object", "description": description, "properties": fields}
    return schema | ({"required": required} if required else {})


def _field(generated: Schema, nullable: bool) -> Schema:
    """Returns the schema of one field, with a flat list of its types. With `nullable`, null is one of them.

    Null and empty defaults are dropped.
    """
    kept = {name: value for name, value in generated.items() if name not in ("title", "anyOf", "oneOf")}
    if kept.get("default") in (None, [], {}):
        kept.pop("default", None)
    if "description" in kept:
        kept["description"] = _on_one_line(kept["description"])
    kinds = _kinds(generated)
    if kinds == [generated]:
        kinds = [{name: kept.pop(name) for name in list(kept) if name not in ("description", "default")}]
    nullable = nullable or {"type": "null"} in kinds
    kinds = [kind for kind in kinds if kind != {"type": "null"}]
    if len(kinds) > 1 or (nullable and "$ref" in kinds[0]):
        return {"anyOf": [*kinds, *([{"type": "null"}] if nullable else [])], **kept}
    if nullable and "enum" in kept:
        kept["enum"] = [*kept["enum"], None]
    [kind] = kinds
    return {**kind, **({"type": [kind["type"], "null"]} if nullable and "type" in kind else {}), **kept}


def _on_one_line(text: str) -> str:
    return " ".join(text.split())


def _kinds(generated: Schema) -> list[Schema]:
    """Returns the types of a field, without nesting."""
    if nested := generated.get("anyOf") or generated.get("oneOf"):
        return [kind for one in nested for kind in _kinds(one)]
    return [generated]


def _messages(message: Schema) -> dict[str, Schema]:
    """Returns one schema for each kind of message, and the schema `Message`, which allows any kind."""
    fields = message["properties"]
    schemas: dict[str, Schema] = {}
    for name, (description, roles, own) in MESSAGES.items():
        role = {"type": "string", "enum": roles}
        # The gateway checks the type of a field that belongs to another role, and then ignores the field.
        kept = {"role": role} | {
            field: dict(schema)
            if field in ("content", "name", *own)
            else schema | {"description": "Not for this role."}
            for field, schema in fields.items()
            if field != "role"
        }
        schemas[name] = {"type": "object", "description": description, "properties": kept, "required": ["role"]}
        if name != "AssistantMessage":
            require(schemas[name], "content")
    require(schemas["ToolMessage"], "tool_call_id")
    calls = {"tool_calls": {"type": "array", "minItems": 1}}
    schemas["AssistantMessage"]["anyOf"] = [
        {"title": "with content", "properties": {"content": {"not": {"type": "null"}}}, "required": ["content"]},
        {"title": "with calls", "properties": calls, "required": ["tool_calls"]},
    ]
    mapping = {role: REF + name for name, (_, roles, _) in MESSAGES.items() for role in roles}
    schemas["Message"] = {
        "oneOf": [{"$ref": REF + name} for name in MESSAGES],
        "discriminator": {"propertyName": "role", "mapping": mapping},
    }
    return schemas


def _complete_variants(schemas: dict[str, Schema]) -> None:
    """Adds the rules of the `_complete` validators, which the generated schemas do not have."""
    require(schemas["TextPart"], "text")
    fields = schemas["ResponseFormat"]["properties"]
    read = {name: rule for name, rule in fields["json_schema"].items() if name in ("properties", "required")}
    fields["json_schema"] = {name: rule for name, rule in fields["json_schema"].items() if name not in read}
    schemas["ChosenTools"]["anyOf"] = [
        {"properties": {"type": {"const": kind}, kind: {"type": "object"}}, "required": [kind]}
        for kind in ("function", "allowed_tools")
    ]
    schemas["ResponseFormat"]["anyOf"] = [
        {"title": "without a schema", "properties": {"type": {"enum": ["text", "json_object"]}}},
        {
            "title": "with a schema",
            "properties": {"type": {"const": "json_schema"}, "json_schema": {"type": "object", **read}},
            "required": ["json_schema"],
        },
    ]


def require(schema: Schema, field: str) -> None:
    """Makes a field required; null counts as missing."""
    schema["required"] = [*schema.get("required", []), field]
    required = schema["properties"][field] = dict(schema["properties"][field])
    required.pop("default", None)
    if isinstance(required.get("type"), list):
        [required["type"]] = [kind for kind in required["type"] if kind != "null"]
    elif "anyOf" in required:
        kinds = [kind for kind in required.pop("anyOf") if kind != {"type": "null"}]
        required |= kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
