"""JSON schemas that are hostile, broken or can't be enforced: each is 422, by the parser or by the model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from tests.malformed.row import Row, sent, valid

FIELD = "response_format.json_schema.schema"
Schema = dict[str, Any]


def _object(properties: Schema, **more: Any) -> Schema:
    return {"type": "object", "properties": properties, **more}


def _nested(levels: int) -> Schema:
    schema: Schema = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def _names(count: int, **schema: Any) -> Schema:
    return {f"p{number}": schema for number in range(count)}


def _all_multiples(*divisors: float) -> Schema:
    return {"allOf": [{"type": "integer", "multipleOf": divisor} for divisor in divisors]}


def _request(schema: Schema) -> bytes:
    form = {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": schema}}
    return sent(valid(response_format=form))


def _tools(count: int, parameters: Schema) -> bytes:
    functions = ({"name": f"f{number}", "parameters": parameters} for number in range(count))
    return sent(valid(tools=[{"type": "function", "function": function} for function in functions]))


# Over a bound, so that nothing is compiled.
_BEYOND: list[tuple[str, Schema, str]] = [
    ("a schema 65 levels deep", _nested(65), "64 levels"),
    ("a schema 150 levels deep", _nested(150), "64 levels"),
    ("a default 70 levels deep", {"default": _nested(70)}, "64 levels"),
    ("401 properties", _object(_names(401)), "401 properties"),
    ("20,000 properties", _object(_names(20_000)), "65536"),
    ("4,000 names required", {"type": "object", "required": list(_names(4000))}, "4000 required"),
    ("an enum of 50,000", {"enum": list(range(50_000))}, "65536"),
    ("a constant of 3 MB", {"const": "x" * 3_000_000}, "65536"),
    ("a constant of 10,001 characters", {"const": "x" * 10_001}, "10001 characters"),
    ("a pattern of 20,000 characters", {"type": "string", "pattern": "a" * 20_000}, "10000"),
    ("a letter 100,000 times", {"type": "string", "pattern": "^a{100000}$"}, "repetitions"),
    ("repetitions in repetitions", {"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"}, "repetitions"),
    ("more items than the engine counts", {"type": "array", "minItems": 10**12}, "minItems"),
    ("a property with a name of 20,000 characters", _object({"x" * 20_000: {}}), "10000"),
    ("anyOf 10,000 alternatives", {"anyOf": [_object({f"k{n}": {}}) for n in range(10_000)]}, "65536"),
    ("multipleOf a million", {"type": "integer", "multipleOf": 1_000_003}, "multipleOf"),
    ("multipleOf of 400 digits", {"type": "integer", "multipleOf": 10**400}, "too large"),
    ("minLength of 400 digits", {"type": "string", "minLength": 10**400}, "minLength"),
    ("minItems of 400 digits", {"type": "array", "minItems": 10**400}, "minItems"),
    ("multipleOf many digits", {"type": "number", "multipleOf": 1.000003}, "multipleOf"),
    ("multiples of three primes at once", _all_multiples(97, 89, 83), "multipleOf"),
    ("multiples of two primes at once", _all_multiples(997, 991), "multipleOf"),
    ("a maximum of 400 digits", {"type": "integer", "maximum": 10**400}, "too large"),
]

# Within all bounds; only the grammar engine can find the fault.
_BY_MODEL: list[tuple[str, Schema, str]] = [
    ("a reference to itself", {"$ref": "#"}, "no text matches"),
    ("references in a circle", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
     "no text matches"),
    ("a reference to nothing", {"$ref": "#/$defs/none"}, "none"),
    ("a reference to a web page", {"$ref": "https://example.com/schema.json"}, "another document"),
    ("a reference to a file", {"$ref": "file:///etc/passwd"}, "another document"),
    ("an alternative of all alternatives", {"allOf": [
        {"anyOf": [_object({f"k{m}{n}": {}}) for n in range(2)]} for m in range(20)]}, "too large"),
    ("a pattern that is none", {"type": "string", "pattern": "("}, "unclosed group"),
    ("a pattern with a look-ahead", {"type": "string", "pattern": "^(?=a)b$"}, "look-ahead"),
    ("a pattern with a back-reference", {"type": "string", "pattern": "^(a)\\1$"}, "backreferences"),
    ("a pattern 5,000 levels deep", {"type": "string", "pattern": "(" * 4900 + "a" + ")" * 4900}, "nested"),
    ("16 patterns at once", {"allOf": [{"type": "string", "pattern": f"^.*{c}.*$"} for c in "abcdefghijklmnop"]},
     "combination of patterns"),
    ("not", {"not": {"type": "string"}}, "not"),
    ("uniqueItems", {"type": "array", "uniqueItems": True}, "uniqueItems"),
    ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ("if and then", {"if": {"type": "string"}, "then": {"minLength": 1}}, "if"),
    ("an unknown type", {"type": "banana"}, "banana"),
    ("a type that is a number", {"type": 5}, "type"),
    ("properties in a list", {"type": "object", "properties": []}, "properties"),
    ("a negative length", {"type": "string", "maxLength": -1}, "maxLength"),
    ("a contradiction", {"allOf": [{"type": "string"}, {"type": "integer"}]}, "incompatible"),
    ("a property that can't be", _object({"a": False}, required=["a"]), "unsatisfiable"),
    ("a minimum that no number is written with", {"type": "number", "minimum": 1e300}, "range"),
    ("multipleOf nothing", {"type": "integer", "multipleOf": 0}, "multiple"),
    ("oneOf that overlap", {"oneOf": [{"type": "string", "maxLength": n} for n in range(30)]}, "oneOf"),
]  # fmt: skip

# Unusual schemas, as large as the bounds allow: served.
LARGEST: dict[str, Schema] = {
    "400 properties that may be left out": _object(_names(400, type="string")),
    "400 properties that may not": _object(_names(400, type="string"), required=list(_names(400))),
    "five objects of 350": _object({f"o{n}": _object(_names(350, type="integer")) for n in range(5)}),
    "an enum of 4,500": {"enum": [f"value {number}" for number in range(4500)]},
    "700 alternatives": {"anyOf": [_object({f"k{n}": {"type": "integer"}}, required=[f"k{n}"]) for n in range(700)]},
    "six constants of 9,900 characters": {"enum": ["x" * 9900 + str(n) for n in range(6)]},
    "a pattern of 9,900 characters": {"type": "string", "pattern": "|".join(f"w{n}x" for n in range(1400))},
    "60 levels": _nested(60),
    "remainders of 9,973": {"type": "integer", "multipleOf": 9973},
    "many remainders": _object({f"p{n}": {"multipleOf": d} for n, d in enumerate((360, 720, 2520))}),
    "two remainders at once": _all_multiples(99, 98),
    "repetitions in repetitions": {"type": "string", "pattern": "^((a{1,20}){1,20}){1,20}$"},
    "a pattern that others choke on": {"type": "string", "pattern": "^(a+)+$"},
    "a pattern with a long memory": {"type": "string", "pattern": "^(.*a.{30}|.*b.{30})$"},
    "300 classes of characters": _object(
        {f"p{n}": {"type": "string", "pattern": f"^[\\p{{L}}\\p{{N}}]{{1,{n + 5}}}$"} for n in range(300)}
    ),
    "300 ranges": _object({f"p{n}": {"type": "integer", "minimum": n - 10**12, "maximum": n} for n in range(300)}),
    "a billion characters": {"type": "string", "minLength": 10**9},
    "a thousand times a thousand items": {"minItems": 1000, "items": {"type": "array", "minItems": 1000}},
    "doubling references": {
        "$ref": "#/$defs/l20",
        "$defs": {
            "l0": {"type": "string"},
            **{f"l{n}": _object({k: {"$ref": f"#/$defs/l{n - 1}"} for k in "ab"}) for n in range(1, 21)},
        },
    },
    "doubling alternatives": {
        "$ref": "#/$defs/l16",
        "$defs": {
            "l0": {"type": "string"},
            **{f"l{n}": {"anyOf": [{"$ref": f"#/$defs/l{n - 1}"}] * 2} for n in range(1, 17)},
        },
    },
    "a list that refers to itself": {
        "$ref": "#/$defs/n",
        "$defs": {"n": _object({"next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}})},
    },
}  # fmt: skip


def rows() -> Iterator[Row]:
    """Schemas of replies and of tools."""
    for name, schema, says in _BEYOND:
        yield Row(name, partial(_request, schema), 422, FIELD, (says,))
    for name, schema, says in _BY_MODEL:
        yield Row(name, _request(schema), 422, "response_format", (says,), by_model=True)
    at_fault = "tools[0].function.parameters"
    yield Row("a tool with parameters 65 levels deep", _tools(1, _nested(65)), 422, at_fault, ("64 levels",))
    yield Row("a tool with parameters of 100 KB", _tools(1, {"enum": ["xxxxxxxx"] * 10_000}), 422, at_fault, ("65536",))
    yield Row("tools with 150 KB together", _tools(10, {"enum": ["xxxxxxxx"] * 1400}), 422, "tools", ("131072",))
