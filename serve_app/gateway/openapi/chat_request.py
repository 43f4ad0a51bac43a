"""The schema of a chat request: types and fields come from the code that reads bodies, the rest from here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from serve_app.api.shapes import Body
from serve_app.gateway.openapi.chat_fields import FIELDS

Schema = dict[str, Any]

REF: Final = "#/components/schemas/"

_ROLES: Final = {
    "SystemMessage": ("Instructions. `developer` counts as `system`.", ["system", "developer"], []),
    "UserMessage": ("What the user says.", ["user"], []),
    "AssistantMessage": (
        "What the model said before, or the beginning of what it says next.",
        ["assistant"],
        ["tool_calls", "prefix"],
    ),
    "ToolMessage": ("The result of a call.", ["tool"], ["tool_call_id"]),
}


def chat_request_schemas(identifiers: Sequence[str], most_output: int) -> dict[str, Schema]:
    """Schemas by name, the request's as `ChatCompletionRequest`. `most_output` is in tokens."""
    generated = Body.model_json_schema(ref_template=REF + "{model}")
    models = {**generated.pop("$defs"), "Body": generated}
    schemas = {name: _model(name, model) for name, model in models.items()}
    body = schemas.pop("Body")
    fields = body["properties"]
    fields["model"]["enum"] = list(identifiers)
    for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
        fields[name]["maximum"] = most_output
    # What `allOf` says can't be said of one field.
    body["allOf"] = [
        {"anyOf": [_unset("stream_options"), {"properties": {"stream": {"const": True}}, "required": ["stream"]}]},
        {"anyOf": [_unset("top_logprobs"), {"properties": {"logprobs": {"const": True}}, "required": ["logprobs"]}]},
    ]
    schemas |= _messages(schemas.pop("Message"))
    _complete_variants(schemas)
    return {"ChatCompletionRequest": body, **schemas}


def _model(name: str, model: Schema) -> Schema:
    fields = {
        field: _field(generated, FIELDS.get(f"{name}.{field}", {})) for field, generated in model["properties"].items()
    }
    told = {"type": "object", "description": model["description"], "properties": fields}
    return told | ({"required": model["required"]} if "required" in model else {})


def _field(generated: Schema, words: Mapping[str, Any]) -> Schema:
    """One field: null beside its type where it may be absent, several types side by side, our words on top."""
    words = dict(words)
    branches: Mapping[str, Schema] = words.pop("branches", {})
    kinds = [kind for kind in _kinds(generated) if kind.get("type") != "null"]
    nullable = len(kinds) < len(_kinds(generated))
    typed: Schema
    if len(kinds) == 1 and "$ref" not in kinds[0]:
        only = kinds[0]
        typed = {**only, "type": [only["type"], "null"]} if nullable and "type" in only else dict(only)
        if nullable and "enum" in words:
            words["enum"] = [*words["enum"], None]
    elif len(kinds) == 1 and not nullable:
        typed = dict(kinds[0])
    else:
        typed = {"anyOf": [_merged(kind, branches.get(kind.get("type", ""), {})) for kind in kinds]}
        if nullable:
            typed["anyOf"].append({"type": "null"})
    return _merged(typed, words)


def _kinds(generated: Schema) -> list[Schema]:
    """The types of a field, flat."""
    if nested := generated.get("anyOf") or generated.get("oneOf"):
        return [kind for one in nested for kind in _kinds(one)]
    return [{name: value for name, value in generated.items() if name not in ("title", "default")}]


def _merged(schema: Schema, more: Mapping[str, Any]) -> Schema:
    merged = dict(schema)
    for name, value in more.items():
        had = merged.get(name)
        merged[name] = {**had, **value} if isinstance(had, dict) and isinstance(value, dict) else value
    return merged


def _unset(field: str) -> Schema:
    """`field` is absent or null."""
    return {"properties": {field: {"type": "null"}}}


def _messages(message: Schema) -> dict[str, Schema]:
    """One schema for each kind of message, and `Message` for any of them."""
    fields = message["properties"]
    schemas: dict[str, Schema] = {}
    for name, (description, roles, own) in _ROLES.items():
        role = {"type": "string", "enum": roles}
        # What is another role's is checked for its type and then ignored.
        kept = {"role": role} | {
            field: dict(schema)
            if field in ("content", "name", *own)
            else schema | {"description": "Not for this role."}
            for field, schema in fields.items()
            if field != "role"
        }
        schemas[name] = {"type": "object", "description": description, "properties": kept, "required": ["role"]}
        if name != "AssistantMessage":
            _require(schemas[name], "content")
    _require(schemas["ToolMessage"], "tool_call_id")
    calls = {"tool_calls": {"type": "array", "minItems": 1}}
    schemas["AssistantMessage"]["anyOf"] = [
        {"title": "with content", "properties": {"content": {"not": {"type": "null"}}}, "required": ["content"]},
        {"title": "with calls", "properties": calls, "required": ["tool_calls"]},
    ]
    mapping = {role: REF + name for name, (_, roles, _) in _ROLES.items() for role in roles}
    schemas["Message"] = {
        "oneOf": [{"$ref": REF + name} for name in _ROLES],
        "discriminator": {"propertyName": "role", "mapping": mapping},
    }
    return schemas


def _complete_variants(schemas: dict[str, Schema]) -> None:
    """What a part of a body needs beyond its types: the same rules as `_complete` has in serve_app.api.shapes."""
    _require(schemas["TextPart"], "text")
    _require(schemas["Tool"], "function")
    schemas["ResponseFormat"]["anyOf"] = [
        {"title": "without a schema", "properties": {"type": {"enum": ["text", "json_object"]}}},
        {
            "title": "with a schema",
            "properties": {"type": {"const": "json_schema"}, "json_schema": {"type": "object"}},
            "required": ["json_schema"],
        },
    ]


def _require(schema: Schema, field: str) -> None:
    """Makes a field required; null counts as missing."""
    schema["required"] = [*schema.get("required", []), field]
    told = schema["properties"][field] = dict(schema["properties"][field])
    told.pop("default", None)
    if isinstance(told.get("type"), list):
        [told["type"]] = [kind for kind in told["type"] if kind != "null"]
    elif "anyOf" in told:
        kept = [kind for kind in told["anyOf"] if kind.get("type") != "null"]
        del told["anyOf"]
        told |= kept[0] if len(kept) == 1 else {"anyOf": kept}
