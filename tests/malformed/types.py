"""Wrong JSON types and missing fields at every path of a request: each is 400 and names the path."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from tests.malformed.row import MODEL, Row, sent

FULL: dict[str, Any] = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "Be brief.", "name": "rules"},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "5", "tool_call_id": "c1"},
        {"role": "assistant", "content": "So", "prefix": True},
    ],
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "temperature": 0.5,
    "top_p": 0.9,
    "max_tokens": 5,
    "max_completion_tokens": 5,
    "n": 1,
    "stop": ["a"],
    "stop_token_ids": [5],
    "include_stop_str_in_output": True,
    "seed": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {"5": 1},
    "logprobs": True,
    "top_logprobs": 1,
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {}, "strict": True}},
    "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}, "strict": False}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "top_k": 1,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "min_tokens": 1,
    "ignore_eos": False,
    "continue_final_message": True,
    "add_generation_prompt": False,
    "reasoning_effort": "low",
    "chat_template_kwargs": {},
}
"""A body with every field of the contract."""

_CALL = "messages[2].tool_calls[0]"
KINDS = {
    "model": "string",
    "messages": "array",
    "messages[0]": "object",
    "messages[0].role": "string",
    "messages[0].content": "string or array",
    "messages[0].name": "string",
    "messages[1].content[0]": "object",
    "messages[1].content[0].type": "string",
    "messages[1].content[0].text": "string",
    "messages[2].tool_calls": "array",
    _CALL: "object",
    f"{_CALL}.id": "string",
    f"{_CALL}.type": "string",
    f"{_CALL}.function": "object",
    f"{_CALL}.function.name": "string",
    f"{_CALL}.function.arguments": "string",
    "messages[3].tool_call_id": "string",
    "messages[4].prefix": "boolean",
    "stream": "boolean",
    "stream_options": "object",
    "stream_options.include_usage": "boolean",
    "stream_options.continuous_usage_stats": "boolean",
    "temperature": "number",
    "top_p": "number",
    "max_tokens": "integer",
    "max_completion_tokens": "integer",
    "n": "integer",
    "stop": "string or array",
    "stop[0]": "string",
    "stop_token_ids": "array",
    "stop_token_ids[0]": "integer",
    "include_stop_str_in_output": "boolean",
    "seed": "integer",
    "frequency_penalty": "number",
    "presence_penalty": "number",
    "logit_bias": "object",
    "logit_bias.5": "number",
    "logprobs": "boolean",
    "top_logprobs": "integer",
    "response_format": "object",
    "response_format.type": "string",
    "response_format.json_schema": "object",
    "response_format.json_schema.name": "string",
    "response_format.json_schema.schema": "object",
    "response_format.json_schema.strict": "boolean",
    "tools": "array",
    "tools[0]": "object",
    "tools[0].type": "string",
    "tools[0].function": "object",
    "tools[0].function.name": "string",
    "tools[0].function.description": "string",
    "tools[0].function.parameters": "object",
    "tools[0].function.strict": "boolean",
    "tool_choice": "string or object",
    "tool_choice.type": "string",
    "tool_choice.function": "object",
    "tool_choice.function.name": "string",
    "top_k": "integer",
    "min_p": "number",
    "repetition_penalty": "number",
    "min_tokens": "integer",
    "ignore_eos": "boolean",
    "continue_final_message": "boolean",
    "add_generation_prompt": "boolean",
    "reasoning_effort": "string",
    "chat_template_kwargs": "object",
}
REQUIRED = (
    "model", "messages", "messages[0].role", "messages[0].content", "messages[1].content[0].type",
    "messages[1].content[0].text", f"{_CALL}.id", f"{_CALL}.function", f"{_CALL}.function.name",
    f"{_CALL}.function.arguments", "messages[3].tool_call_id", "response_format.type", "response_format.json_schema",
    "response_format.json_schema.name", "response_format.json_schema.schema", "tools[0].type", "tools[0].function",
    "tools[0].function.name", "tool_choice.type", "tool_choice.function", "tool_choice.function.name",
)  # fmt: skip
ITEMS = ("messages[0]", "messages[1].content[0]", _CALL, "stop[0]", "stop_token_ids[0]", "tools[0]")

_VALUES: dict[str, tuple[Any, str]] = {
    "string": ("text", 'the string "text"'),
    "integer": (7, "the integer 7"),
    "number": (1.5, "the number 1.5"),
    "boolean": (True, "the boolean true"),
    "array": ([1], "an array of 1"),
    "object": ({"a": 1}, "an object"),
}
_SAID = {"boolean": "true or false", "integer": "an integer", "object": "an object", "array": "an array"}


def steps(path: str) -> list[str | int]:
    """The members and indexes that lead to a path."""
    found: list[str | int] = []
    for part in path.split("."):
        name, *indexes = part.replace("]", "").split("[")
        found += [name, *map(int, indexes)]
    return found


def changed(path: str, value: Any) -> dict[str, Any]:
    """The full body with another value at the path."""
    body = copy.deepcopy(FULL)
    *way, last = steps(path)
    place: Any = body
    for step in way:
        place = place[step]
    place[last] = value
    return body


def without(path: str) -> dict[str, Any]:
    """The full body without the member at the path."""
    body = copy.deepcopy(FULL)
    *way, last = steps(path)
    place: Any = body
    for step in way:
        place = place[step]
    del place[last]
    return body


def _allows(kind: str, found: str) -> bool:
    return found in kind.split(" or ") or (found == "integer" and kind == "number")


def rows() -> Iterator[Row]:
    """Each path with each wrong type; required ones also absent and null; null as an item."""
    for path, kind in KINDS.items():
        for found, (value, described) in _VALUES.items():
            if not _allows(kind, found):
                said = (described, _SAID.get(kind, f"a {kind.split()[0]}"))
                yield Row(f"{path}: {found} for {kind}", sent(changed(path, value)), 400, path, said)
    for path in REQUIRED:
        yield Row(f"{path}: absent", sent(without(path)), 400, path, ("missing", "required"))
        yield Row(f"{path}: null", sent(changed(path, None)), 400, path, ("missing", "required"))
    for path in ITEMS:
        yield Row(f"{path}: null as an item", sent(changed(path, None)), 400, path, ("missing",))
    yield Row(
        "an item after a good one", sent(changed("stop", ["a", 5])), 400, "stop[1]", ("the integer 5", "a string")
    )
    silent = {"role": "assistant", "content": None}
    yield Row(
        "an assistant without content and calls",
        sent(changed("messages[2]", silent)),
        400,
        "messages[2].content",
        ("missing", "required"),
    )
    yield Row("a wrong type is told before a wrong value", sent({**FULL, "model": "?", "min_p": "x"}), 400, "min_p")
    yield Row("every field at once", sent(FULL), 200)
