"""A schema's grammar accepts what readers of the reply accept: numbers as doubles, days of leap years, host names."""

from __future__ import annotations

import json
import random
from calendar import isleap
from decimal import Decimal
from functools import cache
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from serve_app.contracts.generation import Grammar, GrammarKind
from serve_app.engine.grammar.exact_schema import exact
from serve_app.engine.grammar.translate import to_lark

TOKENIZER = LLTokenizer("byte")


@cache
def compiled(schema: str) -> LLMatcher:
    matcher = LLMatcher(TOKENIZER, to_lark(Grammar(GrammarKind.JSON_SCHEMA, schema), {}))
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def takes(schema: dict[str, Any], text: str) -> bool:
    """Returns whether a reply held to the schema can be this text."""
    matcher = compiled(json.dumps(schema)).deep_copy()
    tokens = TOKENIZER.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def near(bound: float, rng: random.Random) -> str:
    """A decimal slightly above or below a bound, or the bound itself."""
    return f"{Decimal(bound) + rng.choice([-1, 0, 1]) * Decimal(10) ** -rng.randint(1, 20):.45f}".rstrip("0")


@pytest.mark.parametrize("low", [3, -7.5, 0, 0.1, 1e-6, -123456.789, 2.5e10])
def test_accepted_numbers_are_within_exclusive_bounds_as_doubles(low: float) -> None:
    rng = random.Random(str(low))
    schema = {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": low + 2}
    taken = 0
    for _ in range(150):
        text = near(rng.choice([low, low + 2]), rng)
        text += "0" if text.endswith(".") else ""
        if takes(schema, text):
            taken += 1
            jsonschema.validate(json.loads(text), schema)
    assert taken > 2
    middle = low + 1
    assert takes(schema, str(int(middle) if middle == int(middle) else middle))


def test_a_closer_bound_stays_and_integers_and_multiples_keep_theirs() -> None:
    both = {"type": "number", "exclusiveMinimum": 3, "minimum": 4, "exclusiveMaximum": 9, "maximum": 8.5}
    assert exact(both) == {"type": "number", "minimum": 4, "maximum": 8.5}
    for kept in (
        {"type": "integer", "exclusiveMinimum": 3},
        {"type": "number", "exclusiveMinimum": 3, "multipleOf": 0.5},
        {"type": "number", "exclusiveMinimum": 10**20},
        {"exclusiveMinimum": True},
    ):
        assert exact(kept) == kept


def test_bounds_are_moved_in_every_part_of_a_schema_and_nowhere_else() -> None:
    number, moved = {"exclusiveMinimum": 0}, {"minimum": 1e-15}
    same = {"const": number, "enum": [number], "default": number, "examples": [number]}
    schema = {
        "properties": {"exclusiveMinimum": number, "const": number},
        "$defs": {"x": {"items": number}},
        "anyOf": [number, {"additionalProperties": number}],
        "prefixItems": [number],
        "items": False,
        **same,
    }
    assert exact(schema) == {
        "properties": {"exclusiveMinimum": moved, "const": moved},
        "$defs": {"x": {"items": moved}},
        "anyOf": [moved, {"additionalProperties": moved}],
        "prefixItems": [moved],
        "items": False,
        **same,
    }
    assert schema["prefixItems"] == [{"exclusiveMinimum": 0}], "the user's own schema stays as it is"


@pytest.mark.parametrize("kind", ["date", "date-time"])
def test_the_29th_of_february_is_a_day_in_leap_years_alone(kind: str) -> None:
    end = "T00:00:00Z" if kind == "date-time" else ""
    schema = {"type": "string", "format": kind}
    for year in (0, 4, 100, 400, 1900, 1996, 2000, 2023, 2024, 2100, 2400, 9999):
        leap = year == 0 or isleap(year)
        assert takes(schema, f'"{year:04}-02-29{end}"') == leap, year
        assert all(takes(schema, f'"{year:04}-{day}{end}"') for day in ("01-31", "02-01", "02-28", "11-30", "12-31"))


def test_a_pattern_of_the_users_own_stays_beside_a_format() -> None:
    schema = {"type": "string", "format": "date", "pattern": "^2023"}
    assert exact(schema) == schema
    assert takes(schema, '"2023-01-01"')
    assert not takes(schema, '"2024-01-01"')


def test_host_names_have_their_greatest_length() -> None:
    schema = {"type": "string", "format": "hostname"}
    longest = ".".join(["a" * 61] * 4 + ["b" * 5])
    assert len(longest) == 253
    assert takes(schema, f'"{longest}"')
    assert not takes(schema, f'"{longest}b"')
    assert not takes({**schema, "maxLength": 3}, '"abcd"')
