"""Translates grammars into llguidance's own language, and its complaints into ours.

JSON is written with at most one line break and twenty blanks or tabs between two of its parts: a model that is
unsure would else go on with white space for ever.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from llguidance import LLMatcher

from serve_app.engine.errors import UnsupportedGrammar
from serve_app.engine.request import Grammar, GrammarKind
from serve_app.engine.sampling import grammar_calls, lark
from serve_app.engine.sampling.exact_schema import exact
from serve_app.engine.sampling.json_keys import spelled_out

_WHITE_SPACE = r"\n?[ \t]{0,20}"


def source(grammar: Grammar, special: Mapping[str, int]) -> str:
    """The grammar as llguidance reads it. `special` are the tokenizer's special tokens by name.

    Raises:
        UnsupportedGrammar: the text is not what its kind says. What a grammar asks for is not looked at.
    """
    try:
        inner = _source(grammar, special)
        return _after(grammar.lead, inner, special) if grammar.lead else inner
    except UnsupportedGrammar:
        raise
    except RecursionError:
        raise UnsupportedGrammar("the grammar is nested too deeply") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UnsupportedGrammar(f"this is no {grammar.kind}: {error}") from error


def alternatives(grammar: Grammar) -> list[Grammar]:
    """The schemas of a grammar's tool calls, each as a grammar of its own: to find the one at fault."""
    if grammar.kind is not GrammarKind.TOOL_CALLS:
        return []
    schemas = (schema for _, schema, _ in json.loads(grammar.text)["alternatives"])
    return [Grammar(GrammarKind.JSON_SCHEMA, schema, grammar.strict) for schema in schemas]


def _source(grammar: Grammar, special: Mapping[str, int]) -> str:
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return _json_schema({"type": "object"}, strict=True)
        case GrammarKind.JSON_SCHEMA:
            return _json_schema(json.loads(grammar.text), grammar.strict)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.text)
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.CHOICE:
            return LLMatcher.grammar_from_regex(_choice(json.loads(grammar.text)))
        case GrammarKind.TOOL_CALLS:
            return LLMatcher.grammar_from_lark(_tool_calls(json.loads(grammar.text), grammar.strict, special))


def explain(complaint: str) -> str:
    """What llguidance says of a grammar, in one line and in the user's terms."""
    if match := re.search(r"Unimplemented keys: (\[.*?\])", complaint):
        return f"unsupported keywords in the JSON schema: {', '.join(json.loads(match[1]))}"
    if complaint.startswith("oneOf constraints"):
        return "unsupported in the JSON schema: oneOf with alternatives that can hold at once; use anyOf"
    if "is not present in a registry" in complaint:
        return "unsupported in the JSON schema: $ref to another document"
    if "regex parse error" in complaint:
        return f"unsupported in a regular expression: {complaint.strip().splitlines()[-1].removeprefix('error: ')}"
    if complaint.startswith("NoExtensionBias"):
        return "nothing can be written that fits it"
    lines = complaint.strip().splitlines()
    return textwrap.shorten(lines[0], 200, placeholder=" ...") if lines else "the grammar engine failed"


def _options(strict: bool) -> dict[str, Any]:
    return {
        "lenient": not strict,
        "whitespace_flexible": True,
        "whitespace_pattern": _WHITE_SPACE,
        "json_allow_general_unicode_escapes": False,  # they could spell half a character
    }


def _schema(schema: Any, strict: bool) -> dict[str, Any]:
    """The schema without options of llguidance's own in it, which are not the user's to set."""
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise UnsupportedGrammar("a JSON schema must be an object, and one that allows something")
    if strict and _may_be_met_by_doubles(schema):
        raise UnsupportedGrammar("unsupported in the JSON schema: minProperties without additionalProperties: false")
    plain = {key: value for key, value in schema.items() if key != "x-guidance"}
    return dict(spelled_out(exact(plain)))


def _may_be_met_by_doubles(schema: Any) -> bool:
    """Whether a reply could reach minProperties by naming a property twice, which readers of JSON count once.

    llguidance knows no names but those in the schema.
    """
    if isinstance(schema, list):
        return any(_may_be_met_by_doubles(part) for part in schema)
    if not isinstance(schema, dict):
        return False
    least = schema.get("minProperties")
    if isinstance(least, int) and schema.get("additionalProperties") is not False:
        required = schema.get("required")
        if least > max(1, len(required) if isinstance(required, list) else 0):
            return True
    return any(_may_be_met_by_doubles(part) for part in schema.values())


def _json_schema(schema: Any, strict: bool) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(_schema(schema, strict)), overrides=_options(strict))  # type: ignore[arg-type]


def _choice(texts: Any) -> str:
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise UnsupportedGrammar("a choice needs a list of texts, one at least")
    return "|".join(lark.regex(text) for text in texts)


def _tool_calls(calls: dict[str, Any], strict: bool, special: Mapping[str, int]) -> str:
    otherwise = None
    if calls["otherwise"] is not None:
        kind, text, its_strict = calls["otherwise"]
        if kind not in (GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA):
            raise UnsupportedGrammar("beside tools, a reply can be held to JSON alone")
        otherwise = json.loads(text) if kind == GrammarKind.JSON_SCHEMA else {"type": "object"}, _embed(its_strict)
    return grammar_calls.grammar(calls, special, _embed(strict), otherwise)


def _embed(strict: bool) -> Callable[[Any], str]:
    return lambda schema: f"%json {json.dumps({**_schema(schema, strict), 'x-guidance': _options(strict)})}"


def _after(lead: str, inner: str, special: Mapping[str, int]) -> str:
    """A grammar that begins after the first occurrence of a text."""
    name = {"name": "inner"}
    of = {"lark_grammar": inner, **name} if not inner.startswith("{") else {**json.loads(inner)["grammars"][0], **name}
    if (token := lark.special_id(lead, special)) is None:
        rules = ["start: lead SPACE? @inner", f"lead[suffix={json.dumps(lead)}]: /(?s:.*)/"]
    else:
        text = f"TEXT: /(?s:.+)/ & ~/(?s:.*){lark.regex(lead)}(?s:.*)/"  # its name in letters looks the same
        rules = [f"start: TEXT? <[{token}]> SPACE? @inner", text]
    outer = "\n".join([*rules, r"SPACE: /([ \t]{0,4}\n){1,2}/"]) + "\n"
    return json.dumps({"grammars": [{"lark_grammar": outer}, of]})
