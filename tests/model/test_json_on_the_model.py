"""Replies in JSON from the tiny model: they are valid, although the model prefers other text."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import pytest

from serve_app.contracts.generation import FinishReason, GenerateCall, Grammar, GrammarKind, Rejection, SamplingParams
from serve_app.model.replica import Replica
from tests.model.test_format_on_the_model import BILL, MESSAGES, text_of

pytestmark = pytest.mark.asyncio(loop_scope="session")  # the engine compiles grammars for one loop


async def ask(replica: Replica, grammar: Grammar, number: int = 0, **sampling: Any) -> tuple[str, Any]:
    """The reply's text and the last event."""
    params = SamplingParams(**{"max_tokens": 200, "seed": number, "grammar": grammar, **sampling})
    call = GenerateCall(f"r{number}", MESSAGES, params, 10**12, BILL)
    events = [event async for event in replica.generate(call)]
    return text_of(events), events[-1]


async def test_a_json_object_is_one_json_object_or_cut_by_length(replica: Replica) -> None:
    grammar = Grammar(GrammarKind.JSON_OBJECT)
    asked = [
        ask(replica, grammar, number, temperature=temperature, max_tokens=40)
        for number, temperature in enumerate((0.0, 1.0, 2.0))
    ]
    for text, end in await asyncio.gather(*asked):
        if end.reason is FinishReason.STOP:
            assert isinstance(json.loads(text), dict)
        else:
            assert (end.reason, end.completion_tokens) == (FinishReason.LENGTH, 40)
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
