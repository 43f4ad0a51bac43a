"""Builds the OpenAPI schemas of requests and errors in the Messages format from their declarations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serve_app.api.chat_openapi import REF, body_schemas, require
from serve_app.api.messages_door import ERRORS
from serve_app.api.messages_request import BLOCKS, ROLES, MessagesRequest

Schema = dict[str, Any]


def messages_schemas(identifiers: Sequence[str]) -> dict[str, Schema]:
    """Returns the schemas by name. The schemas of the bodies are `MessagesRequest` and `CountTokensRequest`."""
    schemas = body_schemas(MessagesRequest, "MessagesRequest", identifiers)
    schemas |= _blocks(schemas.pop("ContentBlock"))
    schemas |= _messages(schemas.pop("InputMessage"))
    for name in ("name", "input_schema"):
        require(schemas["CustomTool"], name)
    schemas["ToolChoice"]["anyOf"] = [
        {"title": "a tool", "properties": {"name": {"type": "string"}}, "required": ["name"]},
        {"title": "no particular tool", "properties": {"type": {"not": {"const": "tool"}}}},
    ]
    body = schemas["MessagesRequest"]
    ignored = ("max_tokens", "stream", "stream_options")  # count_tokens ignores them
    schemas["CountTokensRequest"] = {
        **{name: value for name, value in body.items() if name != "allOf"},
        "description": "The body of POST /messages/count_tokens. Other fields of a message are allowed.",
        "properties": {name: schema for name, schema in body["properties"].items() if name not in ignored},
        "required": [name for name in body["required"] if name not in ignored],
    }
    schemas["MessagesError"] = _error()
    return schemas


def _blocks(block: Schema) -> dict[str, Schema]:
    """Returns one schema for each kind of block."""
    schemas: dict[str, Schema] = {}
    for name, (description, kind, required) in BLOCKS.items():
        own = {"text": ["text"], "tool_result": ["tool_use_id", "content", "is_error"]}.get(kind, required)
        fields = {
            field: dict(schema) if field in own else schema | {"description": "Not for this type."}
            for field, schema in block["properties"].items()
            if field != "type"
        }
        schemas[name] = {
            "type": "object",
            "description": description,
            "properties": {"type": {"type": "string", "const": kind}, **fields},
            "required": ["type"],
        }
        for field in required:
            require(schemas[name], field)
    return schemas


def _messages(message: Schema) -> dict[str, Schema]:
    """Returns one schema for each role, and the schema `InputMessage`, which allows any role."""
    kinds = {
        "user": ["TextBlock", "ToolResultBlock"],
        "assistant": ["TextBlock", "ToolUseBlock", "ThinkingBlock", "RedactedThinkingBlock"],
        "system": ["TextBlock"],
    }
    names = {role: f"{role.capitalize()}Input" for role in ROLES}
    schemas: dict[str, Schema] = {}
    for role, name in names.items():
        mapping = {BLOCKS[kind][1]: REF + kind for kind in kinds[role]}
        block = {
            "oneOf": [{"$ref": REF + kind} for kind in kinds[role]],
            "discriminator": {"propertyName": "type", "mapping": mapping},
        }
        content = {"anyOf": [{"type": "string"}, {"type": "array", "items": block}], "description": "Text, or blocks."}
        schemas[name] = {
            "type": "object",
            "description": f"A message of the {role}.",
            "properties": {"role": {"type": "string", "const": role}, "content": content},
            "required": message["required"],
        }
    schemas["InputMessage"] = {
        "oneOf": [{"$ref": REF + name} for name in names.values()],
        "discriminator": {"propertyName": "role", "mapping": {role: REF + name for role, name in names.items()}},
    }
    return schemas


def _error() -> Schema:
    fields: Schema = {
        "type": {"type": "string", "enum": sorted(set(ERRORS.values()))},
        "message": {"type": "string", "minLength": 1, "description": "What to change."},
    }
    return {
        "type": "object",
        "description": "The body of every error, and the event that ends a stream which has failed.",
        "properties": {
            "type": {"type": "string", "const": "error"},
            "error": {"type": "object", "properties": fields, "required": list(fields)},
            "request_id": {"type": "string", "description": "Same as the header `request-id`."},
        },
        "required": ["type", "error"],
    }
