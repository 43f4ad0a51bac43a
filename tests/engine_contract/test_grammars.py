"""Replies are held to grammars of every kind, and a grammar that can't be enforced is refused."""

from __future__ import annotations

import json
import re

import pytest

from serve_app.contracts.generation import FinishReason, Grammar, GrammarKind
from serve_app.engine.errors import UnsupportedGrammar

from .replies import Asker

pytestmark = pytest.mark.model
PLACE = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "people": {"type": "integer", "minimum": 0, "maximum": 10**8},
    },
    "required": ["city", "people"],
    "additionalProperties": False,
}
NAMED = {"a": {"enum": ["<|im_start|>"]}}
WEATHER = ('{"name": "weather", "arguments": ', json.dumps(PLACE), "}")


@pytest.mark.parametrize("temperature", [0.0, 1.5])
async def test_a_reply_by_a_schema_fits_it(asker: Asker, temperature: float) -> None:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PLACE))
    reply = await asker.ask("Describe a city.", max_tokens=120, temperature=temperature, seed=3, grammar=grammar)
    assert reply.end.reason is FinishReason.STOP
    place = json.loads(reply.text)
    assert set(place) == {"city", "people"}
    assert len(place["city"]) <= 12
    assert place["people"] >= 0


async def test_a_reply_in_json_mode_is_an_object(asker: Asker) -> None:
    schema = Grammar(GrammarKind.JSON_OBJECT)
    reply = await asker.ask("Write JSON.", max_tokens=40, grammar=schema, logit_bias=((1, -100.0),))
    if reply.end.reason is FinishReason.STOP:
        assert isinstance(json.loads(reply.text), dict)
    else:
        assert reply.text.lstrip().startswith("{")


@pytest.mark.parametrize("expression", ["(yes|no)", r"\d{3}/\d{2}\n[A-Z]{2}"])
async def test_a_reply_by_a_regular_expression_matches_it(asker: Asker, expression: str) -> None:
    reply = await asker.ask(max_tokens=40, grammar=Grammar(GrammarKind.REGEX, expression), temperature=0.7, seed=1)
    assert reply.end.reason is FinishReason.LENGTH or re.fullmatch(expression, reply.text)


@pytest.mark.parametrize(
    ("grammar", "texts"),
    [
        (
            Grammar(GrammarKind.REGEX, "cat <filename>|less <filename>|<\\|im_end\\|> x"),
            {"cat <filename>", "less <filename>", "<|im_end|> x"},
        ),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"const": "a<|im_end|>b"}'), {'"a<|im_end|>b"'}),
        (
            Grammar.tool_calls([("<call>", json.dumps({**PLACE, "properties": NAMED, "required": ["a"]}), "")]),
            {'<call>{"a":"<|im_start|>"}'},
        ),
    ],
    ids=["choices", "const", "argument"],
)
async def test_names_of_special_tokens_that_a_grammar_forces_are_text(
    asker: Asker, grammar: Grammar, texts: set[str]
) -> None:
    reply = await asker.ask("Choose.", max_tokens=60, grammar=grammar)
    assert reply.end.reason is FinishReason.STOP
    assert re.sub(r"(?<=[{:])\s+|\s+(?=[}:])", "", reply.text) in texts


async def test_a_required_call_has_arguments_by_its_schema(asker: Asker) -> None:
    reply = await asker.ask("Weather in Rome?", max_tokens=120, grammar=Grammar.tool_calls([WEATHER]))
    assert reply.end.reason is FinishReason.STOP
    call = json.loads(reply.text)
    assert call["name"] == "weather"
    assert set(call["arguments"]) == {"city", "people"}


async def test_an_optional_call_may_be_text(asker: Asker) -> None:
    grammar = Grammar.tool_calls([WEATHER], optional="")
    reply = await asker.ask("Say hello.", max_tokens=16, grammar=grammar)
    if reply.text.lstrip().startswith("{"):
        assert reply.text.lstrip().startswith('{"name": "weather"')
    else:
        assert reply.text.strip()


async def test_a_grammar_begins_after_its_lead(asker: Asker) -> None:
    lead = (await asker.ask(max_tokens=8, ignore_eos=True)).text.split()[1]
    reply = await asker.ask(grammar=Grammar(GrammarKind.REGEX, "[0-9]{4}", lead=lead))
    assert reply.end.reason is FinishReason.STOP
    assert re.fullmatch(rf"(?s).*?{re.escape(lead)}\s*\d{{4}}", reply.text)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(GrammarKind.REGEX, "(?<=a)b"),
        Grammar(GrammarKind.REGEX, "a(b"),
        Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object", "unevaluatedProperties": false}'),
        Grammar(GrammarKind.JSON_SCHEMA, "{"),
        Grammar.tool_calls([]),
    ],
    ids=["look-behind", "open bracket", "keyword", "no JSON", "no calls"],
)
async def test_a_grammar_that_can_not_be_enforced_is_refused(asker: Asker, grammar: Grammar) -> None:
    with pytest.raises(UnsupportedGrammar):
        await asker.ask(grammar=grammar)
