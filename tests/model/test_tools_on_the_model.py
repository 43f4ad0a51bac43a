"""Tools, choices and reasoning through a replica and a real engine: the tiny model, and one of each format."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest
from tokenizers import AddedToken

from serve_app.contracts.generation import (
    Bill,
    CallArguments,
    CallEnded,
    CallStarted,
    ChoiceEnded,
    Delta,
    Ending,
    Finished,
    FinishReason,
    GenerateCall,
    Part,
    Reasoning,
    Rejected,
    ReplyParts,
    SamplingParams,
    Started,
    Text,
)
from serve_app.contracts.money import Price
from serve_app.engine.chat import ChatRenderer
from serve_app.engine.config import EngineSettings
from serve_app.engine.engine import Engine
from serve_app.engine.models.transformers_runner import TransformersRunner
from serve_app.engine.text.detokenizer import Vocabulary
from serve_app.model.dialect import Dialect
from serve_app.model.replica import Replica
from serve_app.model.tools.format_table import TOOL_FORMATS
from tests.engine import model_folders
from tests.model.conftest import no_orphans

pytestmark = pytest.mark.asyncio(loop_scope="session")  # the engine compiles grammars for one loop

BILL = Bill("acct", "key", "svc-chat", "local", Price(input=1000, cached_input=500, output=3000))
ASKED = ({"role": "user", "content": "What is the weather in Paris?"},)
CITIES = ["Paris", "Rome", "Oslo"]


def tool(name: str, strict: bool | None = None, **parameters: Any) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name, "description": f"Tells the {name}", "parameters": parameters}
    if strict is not None:
        function["strict"] = strict
    return {"type": "function", "function": function}


def an_object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


WEATHER = tool("weather", **an_object(city={"enum": CITIES}))
CLOCK = tool("clock", **an_object(hour={"type": "integer", "minimum": 0, "maximum": 23}))
SCHEMAS = {t["function"]["name"]: t["function"]["parameters"] for t in (WEATHER, CLOCK)}


def a_call(sampling: SamplingParams, messages: Any = ASKED, **more: Any) -> GenerateCall:
    return GenerateCall(more.pop("request_id", "r"), messages, sampling, 10**12, BILL, **more)


async def ask(replica: Replica, call: GenerateCall) -> list[Any]:
    return [event async for event in replica.generate(call)]


def parts_of(events: list[Any], choice: int = 0) -> list[Part]:
    return [
        part for event in events if isinstance(event, ReplyParts) and event.choice == choice for part in event.parts
    ]


def calls_of(events: list[Any], choice: int = 0) -> list[tuple[str, Any, Ending]]:
    """Name, parsed arguments where they are whole, and ending of each call."""
    calls = []
    name, text = "", ""
    for part in parts_of(events, choice):
        if isinstance(part, CallStarted):
            name, text = part.name, ""
        elif isinstance(part, CallArguments):
            text += part.text
        elif isinstance(part, CallEnded):
            calls.append((name, json.loads(text) if part.ending is Ending.COMPLETE else text, part.ending))
    return calls


# The tiny model


@pytest.mark.parametrize(("temperature", "seeds"), [(0.0, 1), (2.0, 2)])
async def test_a_required_call_is_a_call_whose_arguments_fit(replica: Replica, temperature: float, seeds: int) -> None:
    for seed in range(seeds):
        sampling = SamplingParams(200, temperature=temperature, seed=seed)
        call = a_call(sampling, tools=(WEATHER, CLOCK), tool_choice="required", parallel_calls=False)
        events = await ask(replica, call)
        [(name, arguments, ending)] = calls_of(events)
        assert (ending, events[-1].reason) == (Ending.COMPLETE, FinishReason.STOP)
        jsonschema.validate(arguments, SCHEMAS[name])


async def test_a_named_function_is_called_once_and_no_other(replica: Replica) -> None:
    for seed in range(2):
        sampling = SamplingParams(200, temperature=1.5, seed=seed)
        call = a_call(sampling, tools=(WEATHER, CLOCK), tool_choice="required", function="clock")
        [(name, arguments, _)] = calls_of(await ask(replica, call))
        assert name == "clock"
        jsonschema.validate(arguments, SCHEMAS[name])


async def test_calls_that_must_be_made_are_not_repeated_until_the_budget_is_spent(replica: Replica) -> None:
    nothing = {"type": "function", "function": {"name": "ping"}}
    sampling = SamplingParams(1000, temperature=0.0)
    events = await ask(replica, a_call(sampling, tools=(nothing,), tool_choice="required"))
    assert events[-1].reason is FinishReason.STOP
    assert 1 <= len(calls_of(events)) <= 16


async def test_a_call_that_is_cut_by_length_says_so(replica: Replica) -> None:
    call = a_call(SamplingParams(10, temperature=0.0), tools=(WEATHER,), tool_choice="required")
    events = await ask(replica, call)
    assert events[-1].reason is FinishReason.LENGTH
    assert all(ending is not Ending.COMPLETE for _, _, ending in calls_of(events))


@pytest.mark.parametrize("function", [None, "weather"])
@pytest.mark.parametrize(
    "options", [{"max_tokens": 1}, {"max_tokens": 4}, {"max_tokens": 8}, {"stop": ("a",)}], ids=str
)
async def test_a_required_call_that_is_cut_before_its_name_is_no_text(
    replica: Replica, function: str | None, options: dict[str, Any]
) -> None:
    for n in (1, 2):
        sampling = SamplingParams(**{"max_tokens": 60, "seed": 1, **options})
        call = a_call(sampling, tools=(WEATHER, CLOCK), tool_choice="required", function=function, n=n)
        events = await ask(replica, call)
        for choice in range(n):
            assert not [part for part in parts_of(events, choice) if isinstance(part, Text)]
        assert events[-1].completion_tokens


async def test_tools_are_in_the_prompt_and_are_billed(replica: Replica) -> None:
    plain = await ask(replica, a_call(SamplingParams(1)))
    told = await ask(replica, a_call(SamplingParams(1), tools=(WEATHER,), tool_choice="auto"))
    none = await ask(replica, a_call(SamplingParams(1), tools=(WEATHER,), tool_choice="none"))
    assert told[-1].prompt_tokens > plain[-1].prompt_tokens + 30
    assert none[-1].prompt_tokens == plain[-1].prompt_tokens


async def test_ids_of_calls_differ_between_choices_and_repeat_with_the_request(replica: Replica) -> None:
    call = a_call(SamplingParams(60, seed=1), tools=(WEATHER,), tool_choice="required", function="weather", n=2)
    ids = [
        [part.id for choice in (0, 1) for part in parts_of(events, choice) if isinstance(part, CallStarted)]
        for events in (await ask(replica, call), await ask(replica, call))
    ]
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 2


async def test_calls_and_results_of_earlier_turns_are_answered(replica: Replica) -> None:
    spoken = (
        *ASKED,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "It rains, 11 degrees."},
    )
    for tools in ((WEATHER,), ()):
        choice: Any = "auto" if tools else "none"
        events = await ask(replica, a_call(SamplingParams(8), spoken, tools=tools, tool_choice=choice))
        assert isinstance(events[-1], Finished)
        assert events[-1].completion_tokens > 0


async def test_a_function_that_can_not_be_enforced_is_refused_and_named(replica: Replica) -> None:
    hard = tool("hard", True, **an_object(x={"type": "integer", "not": {"const": 1}}))
    call = a_call(SamplingParams(8), tools=(WEATHER, hard), tool_choice="required")
    [rejected] = await ask(replica, call)
    assert isinstance(rejected, Rejected)
    assert rejected.param == "tools[1].function.parameters"
    assert "properties.x.not: unsupported" in rejected.message
    assert "hard" in rejected.message


@pytest.mark.parametrize("strict", [None, False])
async def test_a_function_that_need_not_be_strict_is_enforced_as_far_as_possible(
    replica: Replica, strict: bool | None
) -> None:
    loose = tool("loose", strict, **an_object(city={"enum": CITIES, "not": {"const": "Rome"}}))
    call = a_call(SamplingParams(80, seed=2), tools=(loose,), tool_choice="required", parallel_calls=False)
    [(name, arguments, _)] = calls_of(await ask(replica, call))
    assert (name, arguments["city"] in CITIES) == ("loose", True)


# Choices


async def test_choices_share_one_prompt_and_differ(replica: Replica) -> None:
    prompt = ({"role": "user", "content": "Tell me about the sea. " * 20},)
    events = await ask(replica, a_call(SamplingParams(12, temperature=1.5, seed=5), prompt, n=4))
    texts = ["".join(p.text for p in parts_of(events, choice) if isinstance(p, Text)) for choice in range(4)]
    assert len(set(texts)) == 4
    assert sum(isinstance(event, Started) for event in events) == 1
    assert sorted(event.choice for event in events if isinstance(event, ChoiceEnded)) == [0, 1, 2, 3]
    assert isinstance(events[-1], Finished)
    said = {choice: [e for e in events if isinstance(e, ReplyParts) and e.choice == choice][-1] for choice in range(4)}
    assert events[-1].completion_tokens == max(one.completion_tokens for one in said.values())
    assert events[-1].prompt_tokens == events[0].prompt_tokens


async def test_the_first_choice_is_what_the_seed_gives_alone(replica: Replica) -> None:
    sampling = SamplingParams(12, temperature=1.2, seed=9)
    alone = "".join(event.text for event in await ask(replica, a_call(sampling)) if isinstance(event, Delta))
    several = await ask(replica, a_call(sampling, n=3))
    assert "".join(p.text for p in parts_of(several) if isinstance(p, Text)) == alone
    again = await ask(replica, a_call(sampling, n=3))
    for choice in range(3):
        texts = ["".join(p.text for p in parts_of(e, choice) if isinstance(p, Text)) for e in (several, again)]
        assert texts[0] == texts[1]


# Each format, on a random model whose tokenizer has the format's markers

TINY_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
REASONS = TINY_TEMPLATE.replace("assistant: ", "assistant: <think>\n") + "{# </think> #}"


@pytest.fixture
def marked() -> Iterator[Callable[..., tuple[Engine, Any]]]:
    """Makes engines whose tokenizer has these markers."""
    made: list[Engine] = []

    def make(markers: tuple[str, ...], special: bool, template: str = TINY_TEMPLATE) -> tuple[Engine, Any]:
        tokenizer = model_folders.tokenizer()
        tokenizer.add_tokens(
            [AddedToken(m, special=special, normalized=False) for m in markers], special_tokens=special
        )
        tokenizer.chat_template = template
        model = model_folders.model(vocab_size=258 + len(markers), max_position_embeddings=2048)
        settings = EngineSettings(model="random", max_context=2048, kv_cache_memory="16MiB")
        chat = ChatRenderer(tokenizer, settings.max_context)
        eos = frozenset({tokenizer.eos_token_id})
        engine = Engine(TransformersRunner(model, settings), Vocabulary(tokenizer), eos, settings, chat=chat)
        made.append(engine)
        return engine, tokenizer

    yield make
    for engine in made:
        engine.close()


@pytest.mark.parametrize(
    ("tool_format", "special"), [*((tool_format, True) for tool_format in TOOL_FORMATS), ("hermes", False)]
)
async def test_required_calls_of_each_format_are_read_back_whole(
    marked: Callable[..., Any], tool_format: str, special: bool
) -> None:
    engine, _ = marked(TOOL_FORMATS[tool_format].markers, special)
    replica = Replica(engine, no_orphans, dialect=Dialect(engine.chat, tool_format))
    for seed in range(2):
        sampling = SamplingParams(400, temperature=1.0, seed=seed)
        call = a_call(sampling, tools=(WEATHER, CLOCK), tool_choice="required", parallel_calls=False)
        events = await ask(replica, call)
        [(name, arguments, ending)] = calls_of(events)
        assert ending is Ending.COMPLETE
        jsonschema.validate(arguments, SCHEMAS[name])
        assert not [part for part in parts_of(events) if isinstance(part, Text)]


@pytest.mark.parametrize("tool_format", ["hermes", "deepseek_v31", "plain"])
async def test_a_strict_function_that_may_be_called_is_called_rightly_or_not_at_all(
    marked: Callable[..., Any], tool_format: str
) -> None:
    engine, tokenizer = marked(TOOL_FORMATS[tool_format].markers, True)
    replica = Replica(engine, no_orphans, dialect=Dialect(engine.chat, tool_format))
    strict = tool("weather", True, **an_object(city={"enum": CITIES}))
    # So that calls are as likely as text.
    likely = TOOL_FORMATS[tool_format].markers[:1] or ("{",)
    bias = tuple((tokenizer.convert_tokens_to_ids(marker), 6.0) for marker in likely)
    seen = set()
    for seed in range(6):
        sampling = SamplingParams(120, seed=seed, logit_bias=(*bias, (1, 3.0)))
        events = await ask(replica, a_call(sampling, tools=(strict,), tool_choice="auto"))
        for name, arguments, ending in calls_of(events):
            seen.add(name)
            if ending is Ending.COMPLETE:
                jsonschema.validate(arguments, strict["function"]["parameters"])
            else:
                assert (ending, events[-1].reason) == (Ending.CUT, FinishReason.LENGTH)
    assert seen == {"weather"}


# Reasoning


@pytest.mark.parametrize("special", [True, False])
async def test_reasoning_is_separated_and_counted_to_the_token(marked: Callable[..., Any], special: bool) -> None:
    engine, tokenizer = marked(("<think>", "</think>"), special, REASONS)
    replica = Replica(engine, no_orphans)
    end = tokenizer.convert_tokens_to_ids("</think>")
    sampling = SamplingParams(40, seed=1, logit_bias=((end, 4.0), (1, -100.0)), logprobs=0)
    events = await ask(replica, a_call(sampling))
    parts = parts_of(events)
    kinds = [type(part) for part in parts]
    assert Reasoning in kinds
    assert Text in kinds
    assert kinds.index(Text) > max(at for at, kind in enumerate(kinds) if kind is Reasoning)
    tokens = [token.token for event in events if isinstance(event, ReplyParts) for token in event.tokens]
    assert events[-1].marked_tokens == tokens.index(end) + 1


async def test_a_reply_that_never_ends_its_reasoning_is_all_reasoning(marked: Callable[..., Any]) -> None:
    engine, tokenizer = marked(("<think>", "</think>"), True, REASONS)
    replica = Replica(engine, no_orphans)
    end = tokenizer.convert_tokens_to_ids("</think>")
    events = await ask(replica, a_call(SamplingParams(10, seed=1, logit_bias=((end, -100.0), (1, -100.0)))))
    assert {type(part) for part in parts_of(events)} == {Reasoning}
    assert events[-1].marked_tokens == events[-1].completion_tokens == 10


async def test_what_is_forced_comes_after_the_reasoning(marked: Callable[..., Any]) -> None:
    engine, tokenizer = marked(("<think>", "</think>"), False, REASONS)
    replica = Replica(engine, no_orphans)
    end = tokenizer.convert_tokens_to_ids("</think>")
    sampling = SamplingParams(300, seed=3, logit_bias=((end, 4.0),))
    events = await ask(replica, a_call(sampling, tools=(WEATHER,), tool_choice="required", parallel_calls=False))
    [(name, arguments, _)] = calls_of(events)
    jsonschema.validate(arguments, SCHEMAS[name])
    assert isinstance(parts_of(events)[0], Reasoning)


async def test_reasoning_stays_in_the_text_where_that_is_configured(marked: Callable[..., Any]) -> None:
    engine, _ = marked(("<think>", "</think>"), True, REASONS)
    replica = Replica(engine, no_orphans, dialect=Dialect(engine.chat, reasoning="none"))
    events = await ask(replica, a_call(SamplingParams(10, seed=1)))
    assert not [event for event in events if isinstance(event, ReplyParts)]
    assert events[-1].marked_tokens is None
