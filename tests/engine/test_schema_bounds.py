"""Whatever number a schema's grammar takes, the double that its reader makes of it is within the schema's bounds."""

from __future__ import annotations

import json
import random
from decimal import Decimal
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from serve_app.engine.request import Grammar, GrammarKind
from serve_app.engine.sampling.grammar_text import source
from serve_app.engine.sampling.schema_bounds import readable_bounds

TOKENIZER = LLTokenizer("byte")


def takes(schema: dict[str, Any], text: str) -> bool:
    """Whether a reply held to the schema can be this text."""
    matcher = LLMatcher(TOKENIZER, source(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), {}))
    assert not matcher.is_error(), matcher.get_error()
    tokens = TOKENIZER.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def near(bound: float, rng: random.Random) -> str:
    """A decimal that is hardly more or less than a bound, or the bound itself."""
    return f"{Decimal(bound) + rng.choice([-1, 0, 1]) * Decimal(10) ** -rng.randint(1, 20):.45f}".rstrip("0")


@pytest.mark.parametrize("low", [3, -7.5, 0, 0.1, 1e-6, -123456.789, 2.5e10])
def test_what_the_grammar_takes_is_within_exclusive_bounds_as_doubles(low: float) -> None:
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
    assert readable_bounds(both) == {"type": "number", "minimum": 4, "maximum": 8.5}
    for kept in (
        {"type": "integer", "exclusiveMinimum": 3},
        {"type": "number", "exclusiveMinimum": 3, "multipleOf": 0.5},
        {"type": "number", "exclusiveMinimum": 10**20},
        {"exclusiveMinimum": True},
    ):
        assert readable_bounds(kept) == kept


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
    assert readable_bounds(schema) == {
        "properties": {"exclusiveMinimum": moved, "const": moved},
        "$defs": {"x": {"items": moved}},
        "anyOf": [moved, {"additionalProperties": moved}],
        "prefixItems": [moved],
        "items": False,
        **same,
    }
    assert schema["prefixItems"] == [{"exclusiveMinimum": 0}], "the user's own schema stays as it is"
