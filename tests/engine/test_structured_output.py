"""Grammars and log-probabilities through the whole engine, with the tiny model and with a scripted one."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest
import torch
from llguidance import LLParserLimits

from serve_app.contracts.generation import Delta, FinishReason, Grammar, GrammarKind, SamplingParams
from serve_app.engine.engine import Engine
from serve_app.engine.errors import UnsupportedGrammar
from serve_app.engine.grammar import compiler
from serve_app.engine.grammar.compiler import GrammarCompiler, GrammarState
from serve_app.engine.loading.loader import LoadedModel
from serve_app.engine.request import GenerationRequest
from tests.engine.fakes import FakeRunner, Inbox, fake_engine, request, submit

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "colour": {"enum": ["red", "green", "blue"]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,6}$"}, "maxItems": 3},
        "place": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 10}, "east": {"type": "boolean"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "score": {"anyOf": [{"type": "null"}, {"type": "number", "minimum": -1, "maximum": 1}]},
    },
    "required": ["name", "age", "colour", "score"],
    "additionalProperties": False,
}
JSON_MODE = Grammar(GrammarKind.JSON_OBJECT)


@pytest.fixture
def make_engine(make_engine: Callable[..., Engine], bundled_compiler: GrammarCompiler) -> Callable[..., Engine]:
    """Makes engines that share the tokenizer's tables for grammars, which take a second to make."""

    def make(**settings: object) -> Engine:
        engine = make_engine(**settings)
        engine._grammars._tables = bundled_compiler._tokenizer()
        return engine

    return make


def prompt(engine: Engine, text: str) -> tuple[int, ...]:
    return tuple(engine.chat.render([{"role": "user", "content": text}]))


def run(engine: Engine, requests: list[GenerationRequest]) -> dict[str, Inbox]:
    """Run requests together to their ends."""
    inboxes = {r.request_id: Inbox() for r in requests}
    for r in requests:
        submit(engine, r, inboxes[r.request_id])
    for inbox in inboxes.values():
        inbox.wait(300)
    return inboxes


def sampling(grammar: Grammar | None, **options: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 80, "seed": 7, "grammar": grammar, **options})  # type: ignore[arg-type]


@pytest.mark.model
def test_replies_in_json_mode_and_by_a_schema_parse_and_validate_at_any_temperature(
    make_engine: Callable[..., Engine], tiny: LoadedModel
) -> None:
    engine, temperatures = make_engine(max_running=16), [0.0, 0.5, 1.0, 1.3, 1.6, 2.0]
    asked = prompt(engine, "Describe a person as JSON.")
    person = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PERSON))
    # The tiny model's text is noise: strings and objects would hardly end.
    ends = tuple((tiny.tokenizer.convert_tokens_to_ids(token), 8.0) for token in ('"', "}", ",", '":', '"}', '",'))
    requests = [
        GenerationRequest(
            f"{kind}{number}",
            asked,
            sampling(grammar, temperature=temperature, seed=number, logit_bias=ends, max_tokens=120),
        )
        for number, temperature in enumerate(temperatures)
        for kind, grammar in (("json", JSON_MODE), ("schema", person))
    ]
    inboxes = run(engine, requests)
    finished = {name: inbox.text for name, inbox in inboxes.items() if inbox.wait().reason is FinishReason.STOP}
    assert all(inbox.wait().reason in (FinishReason.STOP, FinishReason.LENGTH) for inbox in inboxes.values())
    for name, text in finished.items():
        value = json.loads(text)
        assert isinstance(value, dict)
        if name.startswith("schema"):
            jsonschema.validate(value, PERSON)
    for kind in ("json", "schema"):
        assert sum(name.startswith(kind) for name in finished) >= len(temperatures) // 2


@pytest.mark.model
def test_a_forced_tool_call_names_a_tool_and_gives_arguments_of_its_schema(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_running=16)
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    }
    tools = [(f'{{"name": "{name}", "arguments": ', json.dumps(schema), "}") for name in ("weather", "forecast")]
    asked = prompt(engine, "What is the weather in Paris?")
    requests = [
        GenerationRequest(str(seed), asked, sampling(Grammar.tool_calls(tools), temperature=1.2, seed=seed))
        for seed in range(4)
    ]
    for inbox in run(engine, requests).values():
        assert inbox.wait().reason is FinishReason.STOP
        call = json.loads(inbox.text)
        assert call["name"] in ("weather", "forecast")
        jsonschema.validate(call["arguments"], schema)


@pytest.mark.model
def test_a_reply_is_the_same_with_drafts_and_without(make_engine: Callable[..., Engine]) -> None:
    texts = []
    drafted = []
    person = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PERSON))
    for rows in (0, 8):
        engine = make_engine(max_running=16, speculation_rows=rows)
        asked = prompt(engine, 'Repeat: {"name": "Ada", "age": 36, "colour": "red", "score": 0.5}')
        requests = [
            GenerationRequest("schema", asked, sampling(person, temperature=0.0, max_tokens=40)),
            GenerationRequest("json", asked, sampling(JSON_MODE, temperature=0.9, max_tokens=40)),
        ]
        # One at a time: in a batch of another size the model's logits differ by rounding.
        texts.append([run(engine, [r])[r.request_id].text for r in requests])
        drafted.append(engine.stats().accepted)
    assert texts[0] == texts[1]
    assert drafted[0] == 0
    assert drafted[1] > 0


@pytest.mark.model
def test_logprobs_are_those_of_a_plain_forward_pass(make_engine: Callable[..., Engine], tiny_reference: Any) -> None:
    engine = make_engine()
    asked = prompt(engine, "Name three fruits.")
    params = SamplingParams(max_tokens=12, temperature=0.7, top_p=0.8, seed=3, logprobs=20)
    inbox = run(engine, [GenerationRequest("r", asked, params)])["r"]
    told = [token for event in inbox.events if isinstance(event, Delta) for token in event.tokens]
    assert len(told) == inbox.wait().completion_tokens
    assert b"".join(token.raw for token in told).decode() == inbox.text
    ids = [*asked, *(token.token for token in told)]
    with torch.inference_mode():
        logits = tiny_reference(torch.tensor([ids])).logits[0, len(asked) - 1 : -1]
    expected = logits.float().log_softmax(-1)
    for row, token in zip(expected, told, strict=True):
        assert token.logprob == pytest.approx(float(row[token.token]), abs=1e-3)
        assert [t.token for t in token.top[:3]] == row.topk(3).indices.tolist()
        assert [t.logprob for t in token.top] == pytest.approx(row.topk(20).values.tolist(), abs=1e-3)


# A model of bytes that generates its script wherever the grammar allows it.


def schema(**keywords: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(keywords))


HELLO = schema(const="hello")


def test_a_complete_grammar_ends_the_reply_with_its_last_token() -> None:
    engine = fake_engine(FakeRunner(b'"hello" world'))
    inbox = run(engine, [request(grammar=HELLO, min_tokens=40)])["r"]
    assert (inbox.text, inbox.wait().reason, inbox.wait().completion_tokens) == ('"hello"', FinishReason.STOP, 7)
    engine.close()


def test_a_request_without_a_grammar_is_not_affected_by_neighbours_with_one() -> None:
    engine = fake_engine(FakeRunner())
    bound = schema(type="string", pattern="^[ex]{3}!$")
    inboxes = run(engine, [request("free"), request("bound", grammar=bound)])
    assert inboxes["free"].text == "hello world"
    assert inboxes["bound"].text[:2] == '"e'
    assert inboxes["bound"].text.endswith('!"')
    engine.close()


def test_a_grammar_that_cannot_be_enforced_is_refused_before_it_is_queued() -> None:
    engine = fake_engine(FakeRunner())
    with pytest.raises(UnsupportedGrammar, match="uniqueItems"):
        submit(engine, request(grammar=Grammar(GrammarKind.JSON_SCHEMA, '{"uniqueItems": true}')), Inbox())
    assert engine.stats().waiting == 0
    assert run(engine, [request("next")])["next"].text == "hello world"
    engine.close()


def test_a_grammar_engine_that_fails_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = GrammarState._fill

    def failing(self: GrammarState, masks: Any, draft: tuple[int, ...]) -> None:
        if self._matcher.is_accepting():
            raise RuntimeError("out of fuel")
        fill(self, masks, draft)

    monkeypatch.setattr(GrammarState, "_fill", failing)
    engine = fake_engine(FakeRunner(b"12 345"), speculation_rows=0)
    inboxes = run(engine, [request("free"), request("broken", grammar=schema(type="integer"))])
    assert inboxes["free"].text == "12 345"
    assert inboxes["broken"].text == "1"
    assert inboxes["broken"].wait().reason is FinishReason.ERROR
    assert run(engine, [request("next", grammar=HELLO)])["next"].text == '"hello"'
    engine.close()


def test_a_reply_whose_grammar_becomes_too_large_ends_there_with_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = GrammarState._fill

    def exhausted(self: GrammarState, masks: Any, draft: tuple[int, ...]) -> None:
        if self._matcher.is_accepting():
            self.error, self.too_large = "the grammar is too large", True
        else:
            fill(self, masks, draft)

    monkeypatch.setattr(GrammarState, "_fill", exhausted)
    engine = fake_engine(FakeRunner(b"12 345"), speculation_rows=0)
    inbox = run(engine, [request("large", grammar=schema(type="integer"))])["large"]
    end = inbox.wait()
    assert (inbox.text, end.reason, end.completion_tokens) == ("1", FinishReason.LENGTH, 1)
    engine.close()


@pytest.fixture
def crowded() -> Iterator[tuple[Engine, Grammar]]:
    """An engine whose lexers hold one reply by this grammar, and not two that begin differently."""
    engine = fake_engine(FakeRunner(b"a" * 201), speculation_rows=0)
    engine._grammars._limits = LLParserLimits(max_lexer_states=300)
    yield engine, Grammar(GrammarKind.REGEX, "a[ac]{200}|b[bd]{200}")
    engine.close()


def test_nobody_waits_while_a_grammar_is_compiled_again_and_its_reply_goes_on(
    crowded: tuple[Engine, Grammar], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, grammar = crowded
    assert run(engine, [request("first", grammar=grammar, max_tokens=300)])["first"].text == "a" * 201
    compiling, may_compile = threading.Event(), threading.Event()
    compile_grammar = GrammarCompiler._compile

    def slow(self: GrammarCompiler, *arguments: Any) -> Any:
        compiling.set()
        assert may_compile.wait(60)
        assert threading.current_thread() is not engine._thread
        return compile_grammar(self, *arguments)

    monkeypatch.setattr(GrammarCompiler, "_compile", slow)
    inbox = Inbox()
    submit(engine, request("second", grammar=grammar, max_tokens=300, logit_bias=((ord("a"), -100.0),)), inbox)
    assert compiling.wait(60)
    for name in ("third", "fourth"):
        assert run(engine, [request(name, max_tokens=20)])[name].text == "a" * 20
    assert inbox.finals == 0
    may_compile.set()
    end = inbox.wait()
    assert (inbox.text, end.reason, end.completion_tokens) == ("b" * 201, FinishReason.STOP, 201)
    assert engine.stats().kv_blocks_used == 0


@pytest.mark.parametrize("guesses", [0, 8])
@pytest.mark.parametrize("states", [300, 350, 400, 450, 500])
def test_replies_are_the_same_wherever_their_grammar_is_compiled_again(guesses: int, states: int) -> None:
    engine = fake_engine(FakeRunner(b"a" * 200), speculation_rows=guesses)
    engine._grammars._limits = LLParserLimits(max_lexer_states=states)
    grammar = Grammar(GrammarKind.REGEX, "|".join(f"({a}{{50}}[{a}{b}]{{50}}){{2}}" for a, b in ("ax", "by", "cz")))
    banned = {"a": (), "b": ((ord("a"), -100.0),), "c": ((ord("a"), -100.0), (ord("b"), -100.0))}
    for number in range(2):
        inboxes = run(
            engine, [request(name, grammar=grammar, max_tokens=300, logit_bias=banned[name]) for name in banned]
        )
        for name, inbox in inboxes.items():
            end = inbox.wait()
            assert (inbox.text, end.reason, end.completion_tokens) == (name * 200, FinishReason.STOP, 200), number
    assert engine.stats().kv_blocks_used == 0
    engine.close()


def test_a_reply_can_be_stopped_while_its_grammar_is_compiled_again(
    crowded: tuple[Engine, Grammar], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, grammar = crowded
    run(engine, [request("first", grammar=grammar, max_tokens=300)])
    compiling, may_compile = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        compiling.set()
        assert may_compile.wait(60)
        raise UnsupportedGrammar("gone")

    monkeypatch.setattr(GrammarCompiler, "_compile", slow)
    stopped, failed = Inbox(), Inbox()
    for name, inbox in (("stopped", stopped), ("failed", failed)):
        submit(engine, request(name, grammar=grammar, max_tokens=300, logit_bias=((ord("a"), -100.0),)), inbox)
    assert compiling.wait(60)
    engine.abort("stopped")
    assert stopped.wait().reason is FinishReason.ABORT
    may_compile.set()
    assert failed.wait().reason is FinishReason.LENGTH
    assert failed.text.startswith("b")
    assert engine.stats().kv_blocks_used == 0


async def test_no_grammar_is_compiled_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine(FakeRunner(b'"hello"'))
    compile_grammar, threads = GrammarCompiler._compile, set()

    def noted(self: GrammarCompiler, *arguments: Any) -> Any:
        threads.add(threading.current_thread())
        return compile_grammar(self, *arguments)

    monkeypatch.setattr(GrammarCompiler, "_compile", noted)
    monkeypatch.setattr(compiler, "_CACHED", 0)
    events = [event async for event in engine.generate(request(grammar=HELLO))]
    assert events[-1].reason is FinishReason.STOP  # type: ignore[union-attr]
    assert threads.isdisjoint({threading.current_thread(), engine._thread})
    engine.close()


def test_closing_the_engine_leaves_no_grammar_threads() -> None:
    before = set(threading.enumerate())
    engine = fake_engine(FakeRunner())
    run(engine, [request(grammar=HELLO)])
    engine.close()
    assert set(threading.enumerate()) <= before


def test_logprobs_go_with_the_text_that_they_are_of_and_stop_strings_take_theirs_along() -> None:
    engine = fake_engine(FakeRunner())
    inbox = run(engine, [request(logprobs=2, stop=("world",))])["r"]
    assert inbox.text == "hello "
    told = [token for event in inbox.events if isinstance(event, Delta) for token in event.tokens]
    assert "".join(token.text for token in told) == "hello "
    assert all(token.logprob <= 0 and len(token.top) == 2 and token.top[0].token == token.token for token in told)
    assert run(engine, [request("plain")])["plain"].events[1] == Delta("h", 1)
    engine.close()
