"""Makes a JSON Schema tell its properties from all other keys however these are spelled.

llguidance lets other keys have escapes, and compares what is written: {"\\u0061ge": "old"} would pass a schema whose
`age` is a number, and a reader would find a text there. Keys that match a pattern are written without such escapes, so
keys that are no property's are allowed by a pattern here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serve_app.engine.sampling.lark import none_of

_ONE = ("items", "additionalProperties", "additionalItems")
_LISTS = ("anyOf", "oneOf", "prefixItems")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
# Schemas that are merged with others must stay as they are: patterns of two of them would meet.
_MERGED = frozenset({"allOf", "anyOf", "oneOf", "$ref", "patternProperties", "minProperties", "maxProperties"})
_LONGEST = 10_000  # characters of names; the pattern grows with them


def spelled_out(schema: Any) -> Any:
    """The same schema, whose objects have properties by name and other keys by a pattern."""
    return schema if _has_all_of(schema) else _spelled_out(schema)


def _spelled_out(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    inside: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _ONE:
            inside[key] = _spelled_out(value)
        elif key in _LISTS and isinstance(value, list):
            inside[key] = [_spelled_out(part) for part in value]
        elif key in _BY_NAME and isinstance(value, dict):
            inside[key] = {name: _spelled_out(part) for name, part in value.items()}
        else:
            inside[key] = value
    properties, more = inside.get("properties"), inside.get("additionalProperties", True)
    if not isinstance(properties, dict) or not properties or more is False or not _MERGED.isdisjoint(inside):
        return inside
    if sum(map(len, properties)) > _LONGEST or not _says_object(inside):
        return inside
    return {**inside, "patternProperties": {none_of(properties): more}, "additionalProperties": False}


def _says_object(schema: Mapping[str, Any]) -> bool:
    kind = schema.get("type", "object")
    return kind == "object" or (isinstance(kind, list) and "object" in kind)


def _has_all_of(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(map(_has_all_of, schema))
    return isinstance(schema, dict) and ("allOf" in schema or any(map(_has_all_of, schema.values())))
