"""Translates grammars of every kind into llguidance's dialect of Lark, and llguidance's errors into the user's terms.

Between two parts of JSON, a reply has at most one line break and twenty spaces or tabs. Without this limit, a model
could write white space forever.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from serve_app.contracts.generation import Grammar, GrammarKind
from serve_app.engine.errors import UnsupportedGrammar
from serve_app.engine.grammar import call_grammar, lark
from serve_app.engine.grammar.closed_schema import closed
from serve_app.engine.grammar.exact_schema import exact
from serve_app.engine.grammar.unenforceable import Complaint, enforceable, place_of, place_of_keyword

_WHITE_SPACE = r"\n?[ \t]{0,20}"
_UNSUPPORTED_KEYWORDS = "unsupported keywords in the JSON schema: "
_POSITION = re.compile(
    r"^(at \d+\(\d+\): )?(failed to compile JSON schema: |invalid regex \".*?\" \(in regex\): )?", re.DOTALL
)
_TOO_LARGE = re.compile(r"too many (states|expressions)|[Tt]oo many items|max is \d+|too large|TooComplex|too complex")


def to_lark(grammar: Grammar, special: Mapping[str, int]) -> str:
    """The grammar as one text. `special` maps the names of the tokenizer's special tokens to their ids.

    Raises:
        UnsupportedGrammar: the text is not valid for its kind, or the translation does not support one of its features.
            The compiler finds other unsupported features.
    """
    try:
        inner = _translated(grammar, special)
        return _after(grammar.lead, inner, special) if grammar.lead else inner
    except UnsupportedGrammar:
        raise
    except RecursionError:
        raise UnsupportedGrammar("the grammar is nested too deeply") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UnsupportedGrammar(f"not a valid {grammar.kind}: {error}") from error


def alternatives(grammar: Grammar) -> list[Grammar]:
    """The schemas of a grammar's tool calls, each as a separate grammar, to find the faulty schema."""
    if grammar.kind is not GrammarKind.TOOL_CALLS:
        return []
    calls = json.loads(grammar.text)
    return [
        Grammar(GrammarKind.JSON_SCHEMA, schema, grammar.strict and number not in calls["lenient"])
        for number, (_, schema, _) in enumerate(calls["alternatives"])
    ]


def without_unenforceable(grammar: Grammar, complaint: Complaint) -> Grammar:
    """Drops the keywords that cannot be enforced from schemas that are not strict.

    Raises:
        TooManyTries: the grammar has more keywords than can be tried in time.
    """
    if grammar.kind is GrammarKind.JSON_SCHEMA and not grammar.strict:
        return replace(grammar, text=json.dumps(enforceable(json.loads(grammar.text), complaint)))
    if grammar.kind is not GrammarKind.TOOL_CALLS:
        return grammar
    calls = json.loads(grammar.text)
    for number, alternative in enumerate(calls["alternatives"]):
        if not grammar.strict or number in calls["lenient"]:
            alternative[1] = json.dumps(enforceable(json.loads(alternative[1]), complaint))
    if (
        calls["otherwise"] is not None
        and calls["otherwise"][0] == GrammarKind.JSON_SCHEMA
        and not calls["otherwise"][2]
    ):
        calls["otherwise"][1] = json.dumps(enforceable(json.loads(calls["otherwise"][1]), complaint))
    return replace(grammar, text=json.dumps(calls))


def place_of_fault(schema: Any, message: str, complaint: Complaint) -> str:
    """The path in a JSON schema that an error from `explain` refers to; empty if it cannot be determined."""
    if match := re.match(rf"{_UNSUPPORTED_KEYWORDS}([^,]+)", message):
        return place_of_keyword(schema, match[1])
    return place_of(schema, complaint)


def _translated(grammar: Grammar, special: Mapping[str, int]) -> str:
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return _json_schema({"type": "object"}, strict=True)
        case GrammarKind.JSON_SCHEMA:
            return _json_schema(json.loads(grammar.text), grammar.strict)
        case GrammarKind.REGEX:
            return f"start: {lark.pattern(grammar.text)}\n"
        case GrammarKind.TOOL_CALLS:
            return _tool_calls(json.loads(grammar.text), grammar.strict, special)


def explain(message: str) -> str:
    """llguidance's error message as one line in the user's terms."""
    lines = _POSITION.sub("", message.strip()).splitlines()
    first = lines[0] if lines else ""
    if match := re.search(r"Unimplemented keys: (\[.*?\])", first):
        return _UNSUPPORTED_KEYWORDS + ", ".join(json.loads(match[1]))
    if first.startswith("oneOf constraints"):
        return "unsupported in the JSON schema: oneOf with overlapping alternatives; use anyOf"
    if "is not present in a registry" in first:
        return "unsupported in the JSON schema: $ref to another document"
    if first.startswith("regex parse error"):
        why = next((line for line in lines if line.startswith("error: ")), "it can't be read")
        return f"unsupported in a regular expression: {_shortened(why.removeprefix('error: '))}"
    if match := re.match(r"lookarounds not supported yet; (Word\w*)?", first):
        return f"unsupported in a regular expression: {'word boundaries' if match[1] else 'look-around'}"
    if first.startswith("Unable to determine if regex is empty"):
        return "unsupported in the JSON schema: a combination of patterns, lengths or formats"
    if first.startswith("Failed to generate regex for"):
        return "unsupported in the JSON schema: this range of numbers; leave minimum or maximum out"
    if first.startswith("NoExtensionBias"):
        return "no text matches it"
    if _TOO_LARGE.search(first):
        return "the grammar is too large: use fewer or smaller repetitions, and simpler patterns"
    return _shortened(first) if first else "the grammar engine failed"


def is_too_large(message: str) -> bool:
    """Whether llguidance's error message says that the grammar exceeds a limit."""
    return _TOO_LARGE.search(message) is not None


def _shortened(text: str) -> str:
    return textwrap.shorten(text, 200, placeholder=" ...")


def _options(strict: bool) -> dict[str, Any]:
    return {
        "lenient": not strict,
        "whitespace_flexible": True,
        "whitespace_pattern": _WHITE_SPACE,
        "json_allow_general_unicode_escapes": False,  # such an escape could be half of a surrogate pair
    }


def _schema(schema: Any, strict: bool) -> dict[str, Any]:
    """The schema, rewritten by `closed` and `exact`, without llguidance's options, which users must not set."""
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise UnsupportedGrammar("a JSON schema must be an object that allows at least one value")
    schema = closed(schema)
    if strict and _duplicates_may_reach_minimum(schema):
        raise UnsupportedGrammar("unsupported in the JSON schema: minProperties without additionalProperties: false")
    plain = {key: value for key, value in schema.items() if key != "x-guidance"}
    return dict(exact(plain))


def _duplicates_may_reach_minimum(schema: Any) -> bool:
    """Whether a reply could reach minProperties by repeating a property name, which JSON parsers count once.

    llguidance notices a repeated name only if the schema lists the name.
    """
    if isinstance(schema, list):
        return any(_duplicates_may_reach_minimum(part) for part in schema)
    if not isinstance(schema, dict):
        return False
    minimum = schema.get("minProperties")
    if isinstance(minimum, int) and schema.get("additionalProperties") is not False:
        required = schema.get("required")
        if minimum > max(1, len(required) if isinstance(required, list) else 0):
            return True
    return any(_duplicates_may_reach_minimum(part) for part in schema.values())


def _json_schema(schema: Any, strict: bool) -> str:
    return f"start: {_embed(strict)(schema)}\n"


def _tool_calls(calls: dict[str, Any], strict: bool, special: Mapping[str, int]) -> str:
    otherwise = None
    if calls["otherwise"] is not None:
        kind, text, other_strict = calls["otherwise"]
        if kind not in (GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA):
            raise UnsupportedGrammar("with tools, only JSON can be enforced")
        other = closed(json.loads(text)) if kind == GrammarKind.JSON_SCHEMA else {"type": "object"}
        otherwise = other, _embed(other_strict)
    embeds = [_embed(strict and number not in calls["lenient"]) for number in range(len(calls["alternatives"]))]
    return call_grammar.to_lark(calls, special, embeds, otherwise)


def schema_source(schema: Mapping[str, Any]) -> str:
    """A JSON schema as a complete grammar, to test whether it can be enforced."""
    return _json_schema(schema, strict=True)


def _embed(strict: bool) -> Callable[[Any], str]:
    return lambda schema: f"%json {json.dumps({**_schema(schema, strict), 'x-guidance': _options(strict)})}"


def _after(lead: str, inner: str, special: Mapping[str, int]) -> str:
    """A grammar that begins after the first occurrence of `lead`."""
    if (token := lark.special_id(lead, special)) is None:
        rules = ["start: lead LEAD_SPACE? inner", f"lead[suffix={json.dumps(lead)}]: /(?s:.*)/"]
    else:
        # The model might also spell the token's name with ordinary tokens, which must not count as `lead`.
        text = f"LEAD_TEXT: /(?s:.+)/ & ~/(?s:.*){lark.regex(lead)}(?s:.*)/"
        rules = [f"start: LEAD_TEXT? <[{token}]> LEAD_SPACE? inner", text]
    rules.append(r"LEAD_SPACE: /([ \t]{0,4}\n){1,2}/")
    return "\n".join([*rules, inner.replace("start:", "inner:", 1)])
