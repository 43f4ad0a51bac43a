"""Replies in JSON from the real bundled model: they are valid, even where the model prefers other text."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from serve_app.contracts.generation import FinishReason, GenerateCall, Grammar, GrammarKind, Rejection, SamplingParams
from serve_app.engine.engine import Engine
from serve_app.model.replica import Replica
from tests.model.test_format_on_the_model import BILL, MESSAGES, no_orphans, text_of


@pytest.fixture
def replica(make_engine: Callable[..., Engine]) -> Replica:
    return Replica(make_engine(), no_orphans)


async def ask(replica: Replica, grammar: Grammar, number: int = 0, **sampling: Any) -> tuple[str, Any]:
    """The reply's text and the last event."""
    params = SamplingParams(**{"max_tokens": 200, "seed": number, "grammar": grammar, **sampling})
    call = GenerateCall(f"r{number}", MESSAGES, params, 10**12, BILL)
    events = [event async for event in replica.generate(call)]
    return text_of(events), events[-1]


def a_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose values are short, so that replies seldom are cut."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const"]
    kind = rng.choice(kinds + ["object", "array", "anyOf"] * 2 if depth else kinds)
    match kind:
        case "string":
            return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(3, 12)}
        case "integer":
            low = rng.randint(-99, 99)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 50)}
        case "number":
            return {"type": "number", "minimum": 0, "exclusiveMaximum": rng.randint(1, 9)}
        case "enum":
            return {"enum": rng.sample(["red", "grün", "青", 1, 2.5, True, None, "a b"], rng.randint(1, 5))}
        case "const":
            return {"const": rng.choice(["only this", 7, False])}
        case "array":
            return {"type": "array", "items": a_schema(rng, depth - 1), "minItems": 1, "maxItems": rng.randint(1, 3)}
        case "anyOf":
            return {"anyOf": [a_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
        case "object":
            names = rng.sample(["name", "age", "größe", "items", "is ok", "x"], rng.randint(1, 4))
            return {
                "type": "object",
                "properties": {name: a_schema(rng, depth - 1) for name in names},
                "required": rng.sample(names, rng.randint(0, len(names))),
                "additionalProperties": False,
            }
    return {"type": kind}


@pytest.mark.slow
@pytest.mark.parametrize("strict", [True, False])
async def test_every_finished_reply_is_valid_for_its_random_schema(replica: Replica, strict: bool) -> None:
    rng = random.Random(11 + strict)
    schemas = [a_schema(rng) for _ in range(24)]
    grammars = [Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), strict) for schema in schemas]
    replies = await asyncio.gather(
        *(
            ask(replica, grammar, number, temperature=rng.choice([0.0, 1.0, 2.0]), max_tokens=120)
            for number, grammar in enumerate(grammars)
        )
    )
    finished = 0
    for schema, (text, end) in zip(schemas, replies, strict=True):
        assert end.reason in (FinishReason.STOP, FinishReason.LENGTH), schema
        if end.reason is FinishReason.STOP:
            finished += 1
            jsonschema.validate(json.loads(text), schema)
    assert finished >= 18


@pytest.mark.parametrize("temperature", [0.0, 2.0])
async def test_a_json_object_is_one_json_object_or_cut_by_length(replica: Replica, temperature: float) -> None:
    grammar = Grammar(GrammarKind.JSON_OBJECT)
    asked = [ask(replica, grammar, number, temperature=temperature, max_tokens=60) for number in range(3)]
    for text, end in await asyncio.gather(*asked):
        if end.reason is FinishReason.STOP:
            assert isinstance(json.loads(text), dict)
        else:
            assert (end.reason, end.completion_tokens) == (FinishReason.LENGTH, 60)
            assert text.startswith("{")


async def test_json_that_max_tokens_cuts_ends_with_length(replica: Replica) -> None:
    schema = {"type": "string", "minLength": 50}
    text, end = await ask(replica, Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), max_tokens=5)
    assert (end.reason, end.completion_tokens) == (FinishReason.LENGTH, 5)
    assert text.startswith('"')


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "string", "not": {"const": "a"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"$ref": "http://elsewhere/schema.json"}, "$ref"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ],
)
async def test_a_strict_schema_that_cannot_be_enforced_is_refused_and_the_feature_named(
    replica: Replica, schema: dict[str, Any], named: str
) -> None:
    _, rejected = await ask(replica, Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    assert (rejected.reason, rejected.param) == (Rejection.INVALID, "response_format")
    assert named in rejected.message


async def test_without_strict_the_rest_of_such_a_schema_is_enforced(replica: Replica) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 2, "maxItems": 3}
    text, end = await ask(replica, Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), strict=False))
    assert end.reason is FinishReason.STOP
    assert set(json.loads(text)) <= {1, 2}
    assert 2 <= len(json.loads(text)) <= 3


async def test_a_schema_may_refer_to_its_own_parts(replica: Replica) -> None:
    schema = {"$defs": {"day": {"enum": ["Mon", "Tue"]}}, "type": "array", "items": {"$ref": "#/$defs/day"}}
    schema |= {"minItems": 1, "maxItems": 2}
    text, end = await ask(replica, Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), temperature=2.0)
    assert end.reason is FinishReason.STOP
    jsonschema.validate(json.loads(text), schema)
