"""Puts tools, earlier calls and their results into messages, as a chat template wants them or as plain text.

Messages are those of the API: dicts with `role`, `content` and, where they apply, `tool_calls` (with arguments as JSON
in a string), `tool_call_id` and `name`. Nothing that is given is changed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.tools.families import Family

_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat template gets: its messages, and its variable `tools`, None where it must not have one."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] | None


def conversation(family: Family, messages: Sequence[Message], tools: Sequence[Message] = ()) -> Conversation:
    """The conversation in the form that the family's templates understand.

    `tools` are those that the model may call now; earlier calls are told even without any.
    """
    told = [_told(message) for message in messages]
    told = _for_template(family, told) if family.reads_calls else _written_out(family, told)
    if family.reads_calls and family.separator is None:
        told = _one_by_one(told)
    if not tools:
        return Conversation(tuple(told), None)
    if family.reads_tools:
        return Conversation(tuple(told), tuple(_defined(tool) for tool in tools))
    return Conversation(tuple(_with_system_text(told, describe(family, tools))), None)


def describe(family: Family, tools: Sequence[Message]) -> str:
    """The system text about the tools, for templates that have no place for them."""
    form = _written(family, [("NAME", "{ARGUMENTS}")])
    lines = ["You can call these functions:", ""]
    for tool in tools:
        function = _defined(tool)["function"]
        lines.append(json.dumps(function, ensure_ascii=False))
    lines += [
        "",
        "To call a function, reply with nothing but this, with its name for NAME and for {ARGUMENTS} a JSON object"
        " that fits its parameters:",
        "",
        form,
        "",
        "The results come in the next message. If no function is of use, answer without calling any.",
    ]
    return "\n".join(lines)


def _told(message: Message) -> dict[str, Any]:
    """The message with its calls' arguments as objects."""
    calls = message.get("tool_calls")
    if not calls:
        return {key: value for key, value in message.items() if key != "tool_calls"}
    return {**message, "tool_calls": [{**call, "function": _called(call["function"])} for call in calls]}


def _called(function: Mapping[str, Any]) -> dict[str, Any]:
    """Templates write the arguments as JSON or go through them: text would be quoted twice, or taken apart."""
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            parsed = None
        # A call that was cut short can come back; what there is of it stays readable.
        arguments = parsed if isinstance(parsed, dict) else {"arguments": arguments}
    return {"name": function["name"], "arguments": arguments}


def _defined(tool: Message) -> dict[str, Any]:
    """The definition with all that templates rely on, and nothing that is only for us."""
    function = tool["function"]
    return {
        "type": "function",
        "function": {
            "name": function["name"],
            "description": function.get("description") or "",
            "parameters": function.get("parameters") or {"type": "object", "properties": {}},
        },
    }


def _for_template(family: Family, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results name their function, as Hermes needs it, and ids are as Mistral's templates want them."""
    names = _names(messages)
    result = []
    for message in messages:
        if message["role"] == "tool" and not message.get("name") and message.get("tool_call_id") in names:
            message = {**message, "name": names[message["tool_call_id"]]}
        if family.nine_letter_ids:
            if "tool_calls" in message:
                calls = [{**call, "id": _nine_letters(call.get("id") or "")} for call in message["tool_calls"]]
                message = {**message, "tool_calls": calls}
            if message.get("tool_call_id") is not None:
                message = {**message, "tool_call_id": _nine_letters(message["tool_call_id"])}
        result.append(message)
    return result


def _nine_letters(call_id: str) -> str:
    """The id itself if it will do, else always the same other one."""
    if re.fullmatch("[A-Za-z0-9]{9}", call_id):
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode(errors="replace")).digest(), "big")
    letters = ""
    for _ in range(9):
        number, at = divmod(number, len(_LETTERS))
        letters += _LETTERS[at]
    return letters


def _one_by_one(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each call in a message of its own, its result right behind it: some templates refuse several in one.

    They also leave out the text of a message with calls, which therefore comes before, alone.
    """
    result: list[dict[str, Any]] = []
    left = list(messages)
    while left:
        message = left.pop(0)
        if "tool_calls" not in message:
            result.append(message)
            continue
        if message.get("content"):
            result.append({key: value for key, value in message.items() if key != "tool_calls"})
        for call in message["tool_calls"]:
            result.append({**message, "content": "", "tool_calls": [call]})
            answers = itertools.takewhile(lambda other: other["role"] == "tool", left)
            answer = next((a for a in answers if a.get("tool_call_id") == call.get("id")), None)
            if answer is not None:
                result.append(answer)
                left.remove(answer)
    return result


def _written_out(family: Family, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls as the text that they were; results as text of the user's, where there is no role for them.

    Neighbouring results then become one message, and the user's next words join them: many templates insist that user
    and assistant take turns.
    """
    names = _names(messages)
    result: list[dict[str, Any]] = []
    after_results = False
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if role == "tool" and not family.reads_results:
            name = message.get("name") or names.get(message.get("tool_call_id"), "")
            content = f"Result of {name}:\n{content}" if name else f"Result:\n{content}"
            message = {"role": "user", "content": content}
        elif "tool_calls" in message:
            calls = _written(family, [_as_text(call["function"]) for call in message["tool_calls"]])
            message = {key: value for key, value in message.items() if key != "tool_calls"}
            message["content"] = f"{content}\n{calls}" if content else calls
        if after_results and message["role"] == "user":
            result[-1] = {**result[-1], "content": f"{result[-1]['content']}\n\n{message['content']}"}
        else:
            result.append(message)
        after_results = role == "tool" and not family.reads_results
    return result


def _as_text(function: Mapping[str, Any]) -> tuple[str, str]:
    return function["name"], json.dumps(function["arguments"], ensure_ascii=False)


def _written(family: Family, calls: Sequence[tuple[str, str]]) -> str:
    """(Name, arguments) of each call as the family writes them."""
    single = [arguments.join(family.around(name)) for name, arguments in calls]
    return family.opening + ("\n" if family.separator is None else family.separator).join(single) + family.closing


def _with_system_text(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    if messages and messages[0]["role"] in ("system", "developer"):
        first = {**messages[0], "content": f"{messages[0].get('content') or ''}\n\n{text}".lstrip("\n")}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _names(messages: Sequence[Message]) -> dict[Any, str]:
    """The names of the functions by the ids of their calls."""
    return {call.get("id"): call["function"]["name"] for m in messages for call in m.get("tool_calls") or ()}
