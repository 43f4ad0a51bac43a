"""Puts tools, earlier calls and their results into messages, as a chat template reads them or as plain text.

Messages have the API's form: dicts with `role`, `content` and, if they apply, `tool_calls` (with arguments as JSON in a
string), `tool_call_id` and `name`. The functions do not modify what they receive.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from serve_app.model.tools.tool_format import ToolFormat

Message = Mapping[str, Any]


def conversation(
    tool_format: ToolFormat, messages: Sequence[Message], tools: Sequence[Message] = ()
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Returns the conversation as the format's templates read it: messages, and the variable `tools` or None.

    `tools` are the functions that the model may call now. Earlier calls stay in the messages even without `tools`.
    """
    result = [with_parsed_arguments(message) for message in messages]
    result = _for_template(tool_format, result) if tool_format.reads_calls else _written_out(tool_format, result)
    if tool_format.reads_calls and tool_format.separator is None:
        result = _one_by_one(result)
    if tools and tool_format.reads_tools:
        return result, [_definition(tool) for tool in tools]
    return _with_system_text(result, tools_as_text(tool_format, tools)) if tools else result, None


def tools_as_text(tool_format: ToolFormat, tools: Sequence[Message]) -> str:
    """Returns the system text that describes the tools, for templates that do not read the variable `tools`."""
    lines = [
        "You can call these functions:",
        "",
        *(json.dumps(_definition(tool)["function"], ensure_ascii=False) for tool in tools),
        "",
        "To call a function, reply with nothing but this, with its name for NAME and for {ARGUMENTS} a JSON object"
        " that fits its parameters:",
        "",
        tool_format.written([("NAME", "{ARGUMENTS}")]),
        "",
        "The results come in the next message. If no function is of use, answer without calling any.",
    ]
    return "\n".join(lines)


def with_parsed_arguments(message: Message) -> dict[str, Any]:
    """Returns the message with the arguments of its calls as objects, if they are JSON."""
    calls = message.get("tool_calls")
    if not calls:
        return _without_calls(message)
    return {**message, "tool_calls": [{**call, "function": _parsed(call["function"])} for call in calls]}


def _without_calls(message: Message) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "tool_calls"}


def _parsed(function: Mapping[str, Any]) -> dict[str, Any]:
    """Parses the arguments. Templates serialize them or iterate over them, so text would be quoted twice or split."""
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            parsed = from_json(arguments) if arguments.strip() else {}
        except (ValueError, TypeError):  # also raised for an unpaired surrogate and for deep nesting
            parsed = None
        # A client may send back an incomplete call; its text stays readable.
        arguments = parsed if isinstance(parsed, dict) else {"arguments": arguments}
    return {"name": function["name"], "arguments": arguments}


def _definition(tool: Message) -> dict[str, Any]:
    """Returns the tool with exactly the fields that templates rely on."""
    function = tool["function"]
    return {
        "type": "function",
        "function": {
            "name": function["name"],
            "description": function.get("description") or "",
            "parameters": function.get("parameters") or {"type": "object", "properties": {}},
        },
    }


def _for_template(tool_format: ToolFormat, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds the function's name to results, for Hermes, and converts ids to the form that Mistral's templates need."""
    names = _names(messages)
    result = []
    for message in messages:
        if message["role"] == "tool" and not message.get("name") and message.get("tool_call_id") in names:
            message = {**message, "name": names[message["tool_call_id"]]}
        if tool_format.nine_letter_ids:
            if "tool_calls" in message:
                calls = [{**call, "id": _nine_letters(call.get("id") or "")} for call in message["tool_calls"]]
                message = {**message, "tool_calls": calls}
            if message.get("tool_call_id") is not None:
                message = {**message, "tool_call_id": _nine_letters(message["tool_call_id"])}
        result.append(message)
    return result


def _nine_letters(call_id: str) -> str:
    """Returns the id if it has nine letters or digits, else an id derived from it."""
    if re.fullmatch("[A-Za-z0-9]{9}", call_id):
        return call_id
    return hashlib.sha256(call_id.encode(errors="replace")).hexdigest()[:9]


def _one_by_one(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Puts each call into a separate message, followed by its result. Some templates reject several calls in a message.

    These templates also omit the text of a message with calls, so the text becomes a separate message before the calls.
    """
    result: list[dict[str, Any]] = []
    left = list(messages)
    while left:
        message = left.pop(0)
        if "tool_calls" not in message:
            result.append(message)
            continue
        if message.get("content"):
            result.append(_without_calls(message))
        for call in message["tool_calls"]:
            result.append({**message, "content": "", "tool_calls": [call]})
            answers = itertools.takewhile(lambda other: other["role"] == "tool", left)
            answer = next((a for a in answers if a.get("tool_call_id") == call.get("id")), None)
            if answer is not None:
                result.append(answer)
                left.remove(answer)
    return result


def _written_out(tool_format: ToolFormat, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Writes earlier calls as text, as the model itself would write them.

    If the format has no role for results, they become user messages. Adjacent results and the user's next message are
    then joined, because many templates require that user and assistant alternate.
    """
    names = _names(messages)
    result: list[dict[str, Any]] = []
    after_results = False
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if role == "tool" and not tool_format.reads_results:
            name = message.get("name") or names.get(message.get("tool_call_id"), "")
            content = f"Result of {name}:\n{content}" if name else f"Result:\n{content}"
            message = {"role": "user", "content": content}
        elif "tool_calls" in message:
            functions = [call["function"] for call in message["tool_calls"]]
            calls = tool_format.written(
                (function["name"], json.dumps(function["arguments"], ensure_ascii=False)) for function in functions
            )
            message = {**_without_calls(message), "content": f"{content}\n{calls}" if content else calls}
        if after_results and message["role"] == "user":
            result[-1] = {**result[-1], "content": f"{result[-1]['content']}\n\n{message['content']}"}
        else:
            result.append(message)
        after_results = role == "tool" and not tool_format.reads_results
    return result


def _with_system_text(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    if messages and messages[0]["role"] in ("system", "developer"):
        first = {**messages[0], "content": f"{messages[0].get('content') or ''}\n\n{text}".lstrip("\n")}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _names(messages: Sequence[Message]) -> dict[Any, str]:
    """Returns the names of functions by the ids of their calls."""
    return {call.get("id"): call["function"]["name"] for m in messages for call in m.get("tool_calls") or ()}
