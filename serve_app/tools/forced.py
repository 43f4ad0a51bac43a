"""What a reply must look like when a call is forced: `tool_choice` of `required` or of a named function."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.tools.families import Family


@dataclass(frozen=True, slots=True)
class Forced:
    """The reply is one of `alternatives`: (text before, JSON Schema of the arguments as JSON, text after).

    With a `separator` it may also be several, with it in between.
    """

    alternatives: tuple[tuple[str, str, str], ...]
    separator: str | None


def forced(
    family: Family,
    tools: Sequence[Mapping[str, Any]],
    name: str | None = None,
    parallel: bool = True,
    lead: str = "",
) -> Forced:
    """A reply that calls one of `tools`, or the one called `name`; or several if `parallel`.

    Families that write something around all calls are held to one: the grammar has no place for it.

    `lead` comes before the call, as what closes the reasoning that a prompt has opened; then there is one call only.

    Raises:
        KeyError: no tool is called `name`.
        ValueError: there are no tools, or the parameters of one describe no object.
    """
    functions = [tool["function"] for tool in tools]
    if name is not None:
        functions = [function for function in functions if function["name"] == name]
        if not functions:
            raise KeyError(name)
    if not functions:
        raise ValueError("there are no tools to call")
    alternatives = []
    for function in functions:
        before, after = family.around(function["name"])
        schema = json.dumps(arguments_schema(function), ensure_ascii=False)
        alternatives.append((lead + family.opening + before, schema, after + family.closing))
    # What stands around all calls can't be repeated with each.
    single = not parallel or lead or family.opening or family.closing
    return Forced(tuple(alternatives), None if single else family.separator)


def arguments_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON Schema that the arguments of a function must match; without parameters, the empty object's.

    Raises:
        ValueError: its parameters describe no object.
    """
    parameters = function.get("parameters")
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    kind = parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise ValueError(f"the parameters of {function['name']} must be of type object")
    return {**parameters, "type": "object"}
