"""Writes the grammar of tool calls in llguidance's dialect of Lark.

Outside of calls, the grammar only allows text that cannot be parsed as a call. So the parser of the reply finds only
calls that the grammar has checked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from serve_app.engine.errors import UnsupportedGrammar
from serve_app.engine.grammar import lark
from serve_app.engine.grammar.lark import constant, regex, special_id

MAX_CALLS = 16  # per reply; small models may repeat a call until their token budget is spent
_BLANKS = r" \t\r\n"
_LIKE_JSON = "{[`"  # first characters of calls without a marker, and of a code fence around them
_CALL_KEYS = ("name",), ("arguments", "parameters")  # a call without a marker has one key of each group


Embed = Callable[[Any], str]


def to_lark(
    calls: Mapping[str, Any],
    special: Mapping[str, int],
    embed: Sequence[Embed],
    otherwise: tuple[Any, Embed] | None = None,
) -> str:
    """The grammar for `calls`, the parsed JSON text of a `Grammar.tool_calls`.

    `embed` has one function per alternative. Each converts a JSON Schema to the body of a rule. If a reply
    without calls must be JSON, `otherwise` has its schema and the function that embeds this schema.

    Raises:
        UnsupportedGrammar: there are no alternatives, or they do not begin with the calls' marker.
    """
    if not calls["alternatives"]:
        raise UnsupportedGrammar("there are no tools to call")
    optional = calls["optional"]
    if optional is None:
        return _joined(["start: calls", *_calls(calls, embed, special)])
    if otherwise is not None:
        return _joined(_or_json(calls, embed, *otherwise, special))
    text = _text(calls, special)
    shown = _shown([name for name in calls["shown"] if name not in (optional, *calls["never"])], special)
    free = f"TEXT? ({shown} TEXT?)*" if shown else "TEXT?"
    before = f"(TEXT? {shown})* " if shown else ""
    if not optional:
        rules = [f"start: {free} | {before}SPACE? calls", f"SPACE: /[{_BLANKS}]{{1,8}}/"]
        return _joined([*rules, text, *_calls(calls, embed, special)])
    rest = _without(calls, optional)
    if (marker := special_id(optional, special)) is not None:
        return _joined([f"start: {free} | {free} <[{marker}]> calls", text, *_calls(rest, embed, special)])
    # `suffix` makes the lexeme lazy, because a greedy one would continue past the marker.
    opened = [f"start: {free} | {before}opened calls", f"opened[suffix={json.dumps(optional)}]: HEAD"]
    head = _text(calls, special, "HEAD", marker=False)
    return _joined([*opened, text, head, *_calls(rest, embed, special)])


def _calls(calls: Mapping[str, Any], embed: Sequence[Embed], special: Mapping[str, int]) -> list[str]:
    numbers = range(len(calls["alternatives"]))
    call = " | ".join(f"call_{number}" for number in numbers)
    more = "" if calls["separator"] is None else f"({constant(calls['separator'], special)} more){{0,{MAX_CALLS - 1}}}"
    around = (constant(calls["opening"], special), "first", more, constant(calls["closing"], special))
    rules = [f"calls: {' '.join(part for part in around if part)}"]
    rules += [f"first: {call}", *([f"more: {call.replace('call_', 'next_')}"] if more else [])]
    cut = calls.get("cut", "")  # beginning of the first call, if the rule before it already matches this text
    for number, (before, schema, after) in zip(numbers, calls["alternatives"], strict=True):
        tail = f"arguments_{number} {constant(after, special)}"
        rules.append(f"call_{number}: {constant(before.removeprefix(cut), special)} {tail}")
        if more:
            rules.append(f"next_{number}: {constant(before, special)} {tail}")
        rules.append(f"arguments_{number}: {embed[number](json.loads(schema))}")
    return rules


def _without(calls: Mapping[str, Any], marker: str) -> dict[str, Any]:
    """The same calls with their leading marker removed."""
    if calls["opening"].startswith(marker):
        return {**calls, "opening": calls["opening"][len(marker) :]}
    if calls["opening"] or not all(before.startswith(marker) for before, _, _ in calls["alternatives"]):
        raise UnsupportedGrammar(f"the calls do not all begin with {marker!r}")
    return {**calls, "cut": marker}


def _text(calls: Mapping[str, Any], special: Mapping[str, int], name: str = "TEXT", marker: bool = True) -> str:
    """The terminal for text that cannot be a call: it has no marker and does not begin like a call without a marker."""
    first = _not_first(calls)
    never = [regex(t) for t in (*calls["never"], calls["optional"] if marker else "") if t]
    if first:
        never += [f"{regex(t)}[{_BLANKS}]*[{regex(first)}]" for t in calls["shown"]]
    parts = ["/(?s:.+)/" if marker else "/(?s:.*)/"]
    if never:
        parts.append(f"~/(?s:.*)({'|'.join(never)})(?s:.*)/")
    if first:
        parts.append(f"/[{_BLANKS}]*([^{_BLANKS}{regex(first)}](?s:.*))?/")
    return f"{name}: {' & '.join(parts)}"


def _not_first(calls: Mapping[str, Any]) -> str:
    return calls["not_first"] or ("" if calls["optional"] else _LIKE_JSON)


def _shown(names: Sequence[str], special: Mapping[str, int]) -> str:
    ids = sorted({special[name] for name in names if name in special})
    return f"<[{','.join(map(str, ids))}]>" if ids else ""


def _or_json(
    calls: Mapping[str, Any], embed: Sequence[Embed], other: Any, embed_other: Embed, special: Mapping[str, int]
) -> list[str]:
    """The rules for calls, or for a JSON value that cannot be parsed as a call."""
    first = _not_first(calls)
    if first and (not isinstance(other, dict) or other.get("type") != "object"):
        raise UnsupportedGrammar("with tools of this model, a JSON schema must be of type object")
    if "{" not in first:
        return [f"start: calls | {embed_other(other)}", *_calls(calls, embed, special)]
    # Calls and other objects begin with the same text. The grammar can distinguish constant texts only by their
    # beginnings, but it can distinguish the keys of two JSON schemas by their ends too. So here, calls are written
    # as JSON schemas too.
    schemas = [["", json.dumps(_as_schema(alternative)), ""] for alternative in calls["alternatives"]]
    rules = _calls({**calls, "alternatives": schemas}, embed, special)
    return [f"start: calls | {embed_other(_no_call(other))}", *rules]


def _as_schema(alternative: Sequence[str]) -> dict[str, Any]:
    before, schema, after = alternative
    try:
        call = json.loads(f"{before}null{after}")
        properties = {k: json.loads(schema) if v is None else {"const": v} for k, v in call.items()}
    except (ValueError, AttributeError):
        raise UnsupportedGrammar("calls in this form can't be distinguished from other JSON objects") from None
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _no_call(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema, restricted to objects that lack one of the keys that every call has."""
    if any(key in schema for key in ("$ref", "anyOf", "oneOf", "allOf", "patternProperties")):
        raise UnsupportedGrammar("with tools of this model, a JSON schema must list its properties at the top level")
    properties, more = schema.get("properties", {}), schema.get("additionalProperties", True)
    for keys in _CALL_KEYS:
        if not any(key in properties for key in keys):
            # Other keys must match a pattern. Otherwise, a key with escapes could be decoded to a call's key.
            others = {} if more is False else {lark.none_of((*properties, *keys)): more}
            return {**schema, "patternProperties": others, "additionalProperties": False}
    raise UnsupportedGrammar("with tools of this model, a JSON schema can't have properties named like a call's")


def _joined(rules: Iterable[str]) -> str:
    return "\n".join(rules) + "\n"
