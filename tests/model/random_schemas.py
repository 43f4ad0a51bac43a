"""Random JSON schemas of all keywords that can be enforced, with values of finite length, and a strict judge.

The judge is the `jsonschema` library (draft 2020-12), with a check of our own for each format, by the RFC that the
draft names for it.
"""

from __future__ import annotations

import ipaddress
import json
import random
import re
from collections.abc import Callable
from datetime import date
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

from jsonschema import Draft202012Validator, FormatChecker

from serve_app.contracts.generation import SamplingParams

NAMES = ("name", "age", "größe", "是否", "is ok", "x", "👍🏽", "a-b", 'q"uote', "e\u0301", "back\\slash", "")
VALUES = ("red", "grün", "青", 1, 2.5, -3, True, None, "a b", "", 'say "hi"', "\\n", "\u2028", [1, None], {"ü": [1.5]})
_VOCABULARY = 49152  # tokens of the bundled model
PATTERNS = (
    "^[a-z]{2,5}$", "^[A-Z][a-z]{1,6}$", "^\\d{3}-\\d{2}$", "^(yes|no|maybe)$", "^[а-яё]{1,4}$", "^#[0-9a-fA-F]{6}$",
    "^v\\d{1,2}(\\.\\d{1,2}){0,2}$", "^$|^[^\\s]{1,3}$", "^(a|b(c|d)?){1,3}$", "^[\u4e00-\u4e2d]{1,3}$",
)  # fmt: skip


def a_schema(rng: random.Random) -> dict[str, Any]:
    """A schema as people write them: mostly objects, sometimes of parts that are named and refer to themselves."""
    if rng.random() < 0.25:
        return _with_definitions(rng)
    return _value(rng, 3 if rng.random() < 0.3 else 2, top=True)


def an_object_schema(rng: random.Random) -> dict[str, Any]:
    """A schema of an object, as parameters of functions are."""
    while (schema := a_schema(rng)).get("type") != "object":
        pass
    return schema


def _with_definitions(rng: random.Random) -> dict[str, Any]:
    node = _object(rng, 1)
    node.pop("maxProperties", None)
    again = {"$ref": "#/$defs/node"}
    name = rng.choice(["next", "左", "children"])
    end: dict[str, Any] = {"type": "null"}
    node["properties"][name] = rng.choice([{"anyOf": [end, again]}, {"type": "array", "items": again, "maxItems": 1}])
    leaf = _value(rng, 0)
    definitions = {"node": node, "leaf ~/%": leaf}
    match rng.randrange(4):
        case 0:
            return {"$defs": definitions, "$ref": "#/$defs/node"}
        case 1:
            return {"$defs": definitions, "type": "array", "items": {"$ref": "#/$defs/leaf%20~0~1%25"}, "maxItems": 3}
        case 2:
            properties = {"tree": again, "leaf": {"$ref": "#/$defs/leaf%20~0~1%25"}}
            return {
                "$defs": definitions,
                "type": "object",
                "properties": properties,
                "required": rng.sample(sorted(properties), rng.randint(1, 2)),
                "additionalProperties": False,
            }
    inner = _value(rng, 0)
    return {
        "type": "object",
        "properties": {"v": inner, "more": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["v"],
        "additionalProperties": False,
    }


def _value(rng: random.Random, depth: int, top: bool = False) -> dict[str, Any]:
    scalars: list[Callable[[random.Random], dict[str, Any]]] = [_string, _integer, _number, _constant, _plain]
    nested: list[Callable[[random.Random, int], dict[str, Any]]] = [_object, _object, _array, _tuple, _any_of, _all_of]
    is_nested = depth and (top or rng.random() < 0.5)
    schema = rng.choice(nested)(rng, depth - 1) if is_nested else rng.choice(scalars)(rng)
    if rng.random() < 0.15:
        schema = {**schema, "title": "A title", "description": "What it is for.", "examples": [1]}
    return schema


def _plain(rng: random.Random) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}


def _string(rng: random.Random) -> dict[str, Any]:
    match rng.randrange(4):
        case 0:
            return {"type": "string", "pattern": rng.choice(PATTERNS)}
        case 1:
            return {"type": "string", "format": rng.choice(sorted(FORMATS))}
        case 2:
            return {"type": ["string", "null"], "maxLength": rng.randint(0, 8)}
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 8)}


def _integer(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-120, 120)
    schema: dict[str, Any] = {"type": "integer", "minimum": low, "maximum": low + rng.randint(5, 60)}
    if rng.random() < 0.3:
        schema = {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + rng.randint(5, 60)}
    if rng.random() < 0.3:
        schema["multipleOf"] = rng.choice([2, 3, 5])
    return schema


def _number(rng: random.Random) -> dict[str, Any]:
    low = rng.choice([-1.5, -10, 0, 0.25, 3])
    upper = rng.choice(["maximum", "exclusiveMaximum"])
    schema: dict[str, Any] = {"type": "number", rng.choice(["minimum", "exclusiveMinimum"]): low, upper: low + 2.5}
    if rng.random() < 0.5:
        schema["multipleOf"] = rng.choice([0.5, 0.25])
    return schema


def _constant(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {"const": rng.choice(VALUES)}
    return {"enum": rng.sample(VALUES, rng.randint(1, 5))}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _value(rng, depth) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }
    match rng.randrange(8):
        case 0:
            schema |= {"additionalProperties": {"type": ["boolean", "null"]}}
            # A bound on their number is only possible where each named one must be there.
            schema |= {"required": names, "maxProperties": len(names) + 1}
        case 1:
            schema["patternProperties"] = {"^n_[a-z]{1,3}$": {"type": "boolean"}}
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    return {"type": "array", "items": _value(rng, depth), "minItems": least, "maxItems": least + rng.randint(0, 2)}


def _tuple(rng: random.Random, depth: int) -> dict[str, Any]:
    first = [_value(rng, depth) for _ in range(rng.randint(1, 3))]
    rest = rng.choice([False, {"type": "null"}])
    return {"type": "array", "prefixItems": first, "items": rest, "minItems": rng.randint(0, len(first)), "maxItems": 4}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_value(rng, depth) for _ in range(rng.randint(1, 3))]}


def _all_of(rng: random.Random, depth: int) -> dict[str, Any]:
    parts = [
        {"type": "object", "properties": {name: _value(rng, depth)}, "required": [name]}
        for name in rng.sample(NAMES, 2)
    ]
    names = [name for part in parts for name in part["properties"]]
    closed = {"properties": dict.fromkeys(names, True), "additionalProperties": False}
    return {"allOf": [*parts, closed]}


def some_sampling(rng: random.Random, **fixed: Any) -> SamplingParams:
    """Sampling parameters from all of their ranges; but no stop strings, which end a reply before it is whole."""
    often = rng.random() < 0.5
    biased = [rng.randrange(_VOCABULARY) for _ in range(rng.choice([0, 9]))]
    return SamplingParams(
        **{
            "max_tokens": 120,
            "temperature": rng.choice([0.0, 0.3, 1.0, 1.3, 2.0]),
            "top_p": rng.choice([1.0, 1.0, 0.9, 0.3, 1e-6]),
            "top_k": rng.choice([0, 0, 1, 5, 1000]),
            "min_p": rng.choice([0.0, 0.0, 0.05, 1.0]),
            "repetition_penalty": 1.0 if often else rng.choice([0.5, 1.1, 2.0]),
            "frequency_penalty": 0.0 if often else rng.uniform(-2, 2),
            "presence_penalty": 0.0 if often else rng.uniform(-2, 2),
            "logit_bias": tuple((token, rng.choice([-100.0, -5.0, 5.0])) for token in biased),
            "seed": rng.randint(-(2**63), 2**63 - 1),
            "min_tokens": rng.choice([0, 0, 0, 10, 120]),
            "ignore_eos": rng.random() < 0.1,
            "logprobs": rng.choice([None, None, 0, 3]),
            **fixed,
        }
    )


def validate(text: str, schema: Any) -> None:
    """Raises unless the text is one JSON value that the schema allows."""
    Draft202012Validator.check_schema(schema)
    Draft202012Validator(schema, format_checker=_checker()).validate(json.loads(text))


_TIME = r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?([zZ]|[+-]([01]\d|2[0-3]):[0-5]\d)"  # RFC 3339, section 5.6
_DURATION = r"P(\d+W|(\d+Y(\d+M(\d+D)?)?|\d+M(\d+D)?|\d+D)?(T(\d+H(\d+M(\d+S)?)?|\d+M(\d+S)?|\d+S))?)"  # its appendix A
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"  # RFC 1123, section 2.1


def _is_date(text: str) -> bool:
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.A):
        return False
    date.fromisoformat(text.replace("0000-", "2000-", 1))  # RFC 3339 has a year 0, a leap year; Python has not
    return True


def _is_date_time(text: str) -> bool:
    return text[10:11] in ("T", "t") and _is_date(text[:10]) and bool(re.fullmatch(_TIME, text[11:], re.A))


FORMATS: dict[str, Callable[[str], object]] = {
    "date": _is_date,
    "time": lambda text: re.fullmatch(_TIME, text, re.A),
    "date-time": _is_date_time,
    "duration": lambda text: re.fullmatch(_DURATION, text, re.A) and text[-1] not in "PT",
    "email": lambda text: re.fullmatch(r"[^@\s]+@[^@\s]+", text.rsplit('"', 1)[-1] if '"' in text else text),
    "hostname": lambda text: len(text) <= 253 and re.fullmatch(rf"{_LABEL}(\.{_LABEL})*", text, re.A),
    "ipv4": lambda text: ipaddress.IPv4Address(text),
    "ipv6": lambda text: ipaddress.IPv6Address(text),
    "uuid": lambda text: re.fullmatch(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", text) and UUID(text),
    "uri": lambda text: re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*:\S*", text, re.A) and urlsplit(text) and text.isascii(),
}


def _checker() -> FormatChecker:
    checker = FormatChecker(formats=())
    for name, check in FORMATS.items():
        checker.checks(name, raises=ValueError)(
            lambda value, check=check: not isinstance(value, str) or bool(check(value))
        )
    return checker
