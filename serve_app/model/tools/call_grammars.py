"""Builds grammars for replies that must call a tool, or whose calls must match the schemas of strict tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from serve_app.contracts.generation import Grammar
from serve_app.model.tools.tool_format import ToolFormat

Tool = Mapping[str, Any]  # as the API defines it


class BadTool(ValueError):
    """The parameters of a function do not describe an object. `name` is the function's name."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(why)
        self.name = name


def required_calls(tool_format: ToolFormat, tools: Sequence[Tool], parallel: bool = True) -> Grammar:
    """Returns the grammar of a reply that calls one of `tools`, or several if `parallel` and the format permit it.

    Schema keywords that cannot be enforced are ignored, unless the function has `strict: true`.

    Raises:
        BadTool: the parameters of a function do not describe an object.
    """
    functions = [tool["function"] for tool in tools]
    schemas = [arguments_schema(function) for function in functions]
    lenient = [number for number, function in enumerate(functions) if not function.get("strict")]
    return _grammar(tool_format, functions, schemas, parallel, lenient=lenient)


def optional_calls(
    tool_format: ToolFormat,
    tools: Sequence[Tool],
    parallel: bool = True,
    shown: Sequence[str] = (),
    otherwise: Grammar | None = None,
) -> Grammar:
    """Returns the grammar of a reply that may call some of `tools`.

    The arguments match the schema if the function has `strict: true`. Create the reply's `ReplyParser` with
    `only_first` if the format has no marker for the beginning of calls. Do so too if a reply without calls must be
    JSON: a string in it may look like a call. `shown` and `otherwise` are as in `Grammar.tool_calls`.

    Raises:
        BadTool: the parameters of a strict function do not describe an object.
    """
    functions = [tool["function"] for tool in tools]
    return _grammar(
        tool_format,
        functions,
        [arguments_schema(function) if function.get("strict") else {"type": "object"} for function in functions],
        parallel,
        optional=tool_format.begins,
        never=tool_format.also_begins,
        not_first=tool_format.bare,
        shown=shown,
        otherwise=otherwise,
    )


def _grammar(
    tool_format: ToolFormat, functions: Sequence[Tool], schemas: Sequence[Tool], parallel: bool, **more: Any
) -> Grammar:
    alternatives = []
    for function, schema in zip(functions, schemas, strict=True):
        before, after = tool_format.around(function["name"])
        alternatives.append((before, json.dumps(schema, ensure_ascii=False), after))
    separator = tool_format.separator if parallel else None
    opening, closing = tool_format.opening, tool_format.closing
    return Grammar.tool_calls(alternatives, separator, opening=opening, closing=closing, **more)


def arguments_schema(function: Tool) -> dict[str, Any]:
    """Returns the JSON Schema for a function's arguments. A function without parameters takes the empty object.

    Arguments that match the result also match the function's own schema.

    Raises:
        BadTool: the function's parameters do not describe an object.
    """
    parameters = function.get("parameters")
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    kind = parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise BadTool(function["name"], f"the parameters of {function['name']} must be of type object")
    return {**parameters, "type": "object"}
