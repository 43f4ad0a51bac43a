"""What a reply must look like when a call is forced, or when one that need not be made must fit its schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from serve_app.tools.families import Family

# Keywords by which a schema says more about an object's members than `properties` does.
_OPENING: Final = frozenset(
    {
        "additionalProperties", "allOf", "anyOf", "dependentRequired", "dependentSchemas", "$dynamicRef", "if",
        "minProperties", "not", "oneOf", "patternProperties", "propertyNames", "$ref", "unevaluatedProperties",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Forced:
    """Calls as a grammar of tool calls takes them, by the same names.

    The reply is `opening`, one of `alternatives`, (text before, JSON Schema of the arguments as JSON, text after), and
    `closing`. With a `separator` it may also be several, with it in between.

    Where `optional` is not None, the reply may also be text, or text and then calls: `optional` is the text that they
    begin with, if any. No other text has `never` in it, begins with one of the characters `not_first` or has one right
    after a marker of reasoning; else it could be read as a call that nothing held to its schema.
    """

    alternatives: tuple[tuple[str, str, str], ...]
    separator: str | None
    opening: str = ""
    closing: str = ""
    optional: str | None = None
    never: tuple[str, ...] = ()
    not_first: str = ""


def forced(
    family: Family, tools: Sequence[Mapping[str, Any]], name: str | None = None, parallel: bool = True
) -> Forced:
    """A reply that calls one of `tools`, or the one called `name`; or several if `parallel` and the family can.

    Raises:
        KeyError: no tool is called `name`.
        ValueError: there are no tools, or the parameters of one describe no object.
    """
    functions = [tool["function"] for tool in tools]
    if name is not None:
        functions = [function for function in functions if function["name"] == name]
        if not functions:
            raise KeyError(name)
    return _held(family, [(function["name"], arguments_schema(function)) for function in functions], parallel)


def optional(family: Family, tools: Sequence[Mapping[str, Any]], parallel: bool = True) -> Forced:
    """A reply that may call some of `tools`: with arguments that fit where a function has `strict` of true.

    Its reader must look for calls `only_first` where `Forced.optional` is empty, and where a reply without calls is
    held to JSON: a string in it may hold all that makes a call.

    Raises:
        ValueError: there are no tools, or the parameters of a strict one describe no object.
    """
    functions = [tool["function"] for tool in tools]
    schemas = [(f["name"], arguments_schema(f) if f.get("strict") is True else {"type": "object"}) for f in functions]
    held = _held(family, schemas, parallel)
    return replace(held, optional=family.begins, never=family.also_begins, not_first=family.bare)


def _held(family: Family, schemas: Sequence[tuple[str, Mapping[str, Any]]], parallel: bool) -> Forced:
    if not schemas:
        raise ValueError("there are no tools to call")
    alternatives = []
    for name, schema in schemas:
        before, after = family.around(name)
        alternatives.append((before, json.dumps(schema, ensure_ascii=False), after))
    return Forced(tuple(alternatives), family.separator if parallel else None, family.opening, family.closing)


def arguments_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON Schema that the arguments of a function must match; without parameters, the empty object's.

    Whatever matches it matches the function's own.

    Raises:
        ValueError: its parameters describe no object.
    """
    parameters = function.get("parameters")
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    kind = parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise ValueError(f"the parameters of {function['name']} must be of type object")
    return _closed({**parameters, "type": "object"})


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object that lists its members, without room for others where it leaves that open.

    Whoever runs a function has no use for arguments that it does not know, and small models like to make some up.
    """
    listed = schema.get("properties")
    if (
        not isinstance(listed, Mapping)
        or not _OPENING.isdisjoint(schema)
        or set(schema.get("required") or ()) - set(listed)
    ):
        return schema
    return {**schema, "additionalProperties": False}
