"""A stream with `stream_options.resume` whose replica is lost goes on as if it had not been, and is billed once.

The engine, the replica and the gateway are the service's own; only the model's next token is a script's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from serve_app.contracts.books import Outcome
from serve_app.contracts.generation import (
    BackendEvent,
    Delta,
    Finished,
    FinishReason,
    GenerateCall,
    Rejected,
    Rejection,
    Started,
)
from serve_app.contracts.ports import BackendUnavailable
from serve_app.gateway.observer import log_line
from tests.gateway.connections import Call
from tests.gateway.scripted_model import QWEN, TEMPLATE, ScriptedModel
from tests.gateway.strict_sse import Reply, read
from tests.gateway.world import World, price, says, settled, until

MakeWorld = Callable[..., Awaitable[World]]
LOST = BackendUnavailable("died")
RESUME = {"stream": True, "stream_options": {"include_usage": True, "resume": True}}


def pieces(text: str, size: int = 3) -> list[bytes]:
    raw = text.encode()
    return [raw[at : at + size] for at in range(0, len(raw), size)]


TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "get_time"}},
]
CALLS = (
    "<think>\nWhich tool? 汉\n</think>\n\nI look: <tool\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "東京"}}'
    '\n</tool_call>\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
REPLIES: dict[str, tuple[list[bytes], str, dict[str, Any]]] = {
    "characters of several tokens": (pieces("a 👩‍💻 b 汉字", 2), TEMPLATE, {}),
    "a stop string": (pieces("one two STO three STOP four"), TEMPLATE, {"stop": ["STOP", "three S!"]}),
    "a stop string that begins at the end": (pieces("one two STO"), TEMPLATE, {"stop": ["STOP"]}),
    "its length": (pieces("one two three four 汉"), TEMPLATE, {"max_tokens": 6}),
    "calls and reasoning": (pieces(CALLS, 5), QWEN, {"tools": TOOLS}),
    "a call that its length cuts": (pieces(CALLS, 5), QWEN, {"tools": TOOLS, "max_tokens": 17}),
    "JSON": (pieces('{"a": [1, "二"]}', 1), TEMPLATE, {"response_format": {"type": "json_object"}}),
    "strict calls": (
        pieces('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', 1),
        QWEN,
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {
                "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
                "additionalProperties": False}}}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        },
    ),
}  # fmt: skip


class Mortal:
    """A model that dies after so many events of a call that it has begun, as long as `lives` has another number."""

    def __init__(self, world: World, model: ScriptedModel) -> None:
        model.behind(world)
        self.generate = world.backends.generate
        world.backends.generate = self._generate  # type: ignore[method-assign]
        self.lives: list[int] = []
        self.calls: list[GenerateCall] = []
        self.events = 0

    async def _generate(self, backend: str, call: GenerateCall, take: Callable[[BackendEvent], None]) -> None:
        left, self.events = 10**6, 0

        def pass_on(event: BackendEvent) -> None:
            nonlocal left
            if isinstance(event, Started):
                self.calls.append(call)
                left = self.lives.pop(0) if self.lives else left
            if self.events == left:
                raise LOST
            self.events += not isinstance(event, Rejected)  # the estimate of the prompt was too small
            take(event)

        await self.generate(backend, call, pass_on)


@pytest.fixture
async def mortal(world: World) -> AsyncIterator[Callable[..., Mortal]]:
    models: list[ScriptedModel] = []

    def make(tokens: list[bytes], template: str) -> Mortal:
        models.append(ScriptedModel(tokens, template=template))
        return Mortal(world, models[-1])

    yield make
    for model in models:
        model.close()


async def ask(world: World, **options: Any) -> Reply:
    call = await Call(world, **{**RESUME, "temperature": 0, **options}).done()
    assert call.status == 200, call.body
    return read(call.body, with_usage=True)


def heard(reply: Reply) -> tuple[Any, ...]:
    [choice] = reply.choices.values()
    calls = [(call.name, call.arguments) for call in choice.calls]
    assert reply.usage is not None
    return choice.reasoning, choice.content, calls, choice.finish_reason, reply.usage["completion_tokens"]


@pytest.mark.parametrize("everywhere", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.long])])
@pytest.mark.parametrize("name", REPLIES)
async def test_a_resumed_stream_is_the_unbroken_one_wherever_it_breaks(
    world: World, mortal: Callable[..., Mortal], name: str, everywhere: bool
) -> None:
    tokens, template, options = REPLIES[name]
    model = mortal(tokens, template)
    whole = await ask(world, **options)
    [choice] = whole.choices.values()
    events, resumed = model.events, 0
    assert events > 5
    places = range(events) if everywhere else sorted({0, *range(2, events, 1 + events // 5), events - 1})
    for lives in places:
        model.lives = [lives]
        broken = await ask(world, **options)
        assert heard(broken) == heard(whole), lives
        assert broken.usage == whole.usage
        [other] = broken.choices.values()
        assert len({call.id for call in other.calls}) == len(choice.calls)
        resumed += broken.resumed
    assert resumed > len(places) / 2
    await until(lambda: world.is_idle)
    assert whole.usage is not None
    each = price(whole.usage["prompt_tokens"], whole.usage["completion_tokens"])
    assert world.spent == world.charged == each * (1 + len(places))
    assert world.recorded == 1 + 2 * len(places)


async def test_a_stream_is_resumed_twice(world: World, mortal: Callable[..., Mortal]) -> None:
    model = mortal(*REPLIES["calls and reasoning"][:2])
    whole = await ask(world, tools=TOOLS)
    model.lives = [6, 5]
    reply = await ask(world, tools=TOOLS)
    assert heard(reply) == heard(whole)
    assert reply.resumed == 2
    first, second, third = model.calls[1:]
    assert first.said == ()
    assert second.said == third.said[: len(second.said)] != third.said
    assert {second.reply_id, third.reply_id} == {first.request_id}


async def test_a_seed_and_penalties_count_over_the_whole_reply(world: World, mortal: Callable[..., Mortal]) -> None:
    """The script is certain by 20 only: a penalty of 2 for each repetition changes it after ten."""
    model = mortal([b"a"] * 40, TEMPLATE)
    options = {"frequency_penalty": 2.0, "temperature": 1.0, "seed": 7, "max_tokens": 40}
    whole = await ask(world, **options)
    [choice] = whole.choices.values()
    assert len(set(choice.content)) > 1
    for lives in (5, 25):
        model.lives = [lives]
        broken = await ask(world, **options)
        assert heard(broken) == heard(whole)
        assert broken.resumed == 1


async def test_a_resumed_stream_says_so_and_keeps_its_id(world: World, mortal: Callable[..., Mortal]) -> None:
    model = mortal(pieces("one two three four"), TEMPLATE)
    model.lives = [4]
    call = await Call(world, **RESUME, temperature=0).done()
    assert call.body.count(b": resumed\n\n") == 1
    [reply_id] = {event["id"] for event in call.events}
    await until(lambda: world.records)
    [line] = map(log_line, world.records)
    assert (line["request_id"], line["reruns"], line["outcome"]) == (f"{reply_id}-2", 1, "completed")
    assert line["first_request_id"] == reply_id
    rows = {one.request_id: one.outcome for one in world.ledger.export_usage(world.account_id).rows}
    assert rows == {reply_id: Outcome.FAILED, f"{reply_id}-2": Outcome.COMPLETED}


async def test_without_the_option_no_ids_are_sent_and_the_error_names_it(
    world: World, mortal: Callable[..., Mortal]
) -> None:
    model = mortal(pieces("one two three four"), TEMPLATE)
    model.lives = [4]
    call = await Call(world, stream=True).done()
    message = call.events[-1]["error"]["message"]
    assert "stream_options.resume" in message
    assert "idempotency-key" in message
    assert not model.calls[0].sampling.token_ids
    await settled(world, requests=1, spent=0)


async def test_the_last_text_is_not_sent_before_the_reply_has_ended(world: World) -> None:
    """It may hold what no token follows: the next replica would send it again."""
    end = [Delta("b", 3, token_ids=(9,), is_last=True), Finished(FinishReason.STOP, 10, 0, 3)]
    world.backends.play([Started(10, 0), Delta("a", 2, token_ids=(7, 8)), end[0], LOST], [Started(10, 0, said=2), *end])
    call = await Call(world, **RESUME).done()
    assert call.text == "ab"
    assert world.backends.calls[1].said == (7, 8)
    await settled(world, requests=2, spent=price(10, 3))


async def test_when_all_replicas_are_dead_a_resumed_stream_ends_with_an_error_and_is_free(
    world: World, mortal: Callable[..., Mortal]
) -> None:
    model = mortal(pieces("one two three four"), TEMPLATE)
    model.lives = [4, 0, 0]
    call = await Call(world, **RESUME, temperature=0).done()
    assert set(call.events[-1]) == {"error"}
    assert len(model.calls) == 3
    await settled(world, requests=3, spent=0)


@pytest.mark.parametrize("after", ["Started", "a delta"])
async def test_a_client_that_leaves_a_resumed_stream_pays_for_all_that_it_has(world: World, after: str) -> None:
    gate = asyncio.Event()
    more = [Delta("b", 3, token_ids=(9,))] if after == "a delta" else []
    world.backends.play([Started(10, 0), Delta("a", 2, token_ids=(7, 8)), LOST], [Started(10, 0, said=2), *more, gate])
    call = Call(world, **RESUME)
    await call.until('"b"' if more else ": resumed")
    call.hang_up()
    await call.done()
    await settled(world, requests=2, spent=price(10, 2 + len(more)))


@pytest.mark.parametrize(
    "second",
    [Started(10, 0), Started(10, 0, said=1), Started(10, 0, said=2, fingerprint="other")],
    ids=["an earlier release", "fewer tokens", "other weights"],
)
async def test_what_can_not_continue_exactly_these_tokens_is_not_passed_on(world: World, second: Started) -> None:
    end = Finished(FinishReason.STOP, 10, 0, 3)
    world.backends.play(
        [Started(10, 0), Delta("a", 2, token_ids=(7, 8)), LOST], [second, Delta("b", 3, token_ids=(9,)), end]
    )
    call = await Call(world, **RESUME).done()
    assert call.text == "a"
    assert set(call.events[-1]) == {"error"}
    await settled(world, requests=2, spent=0)


async def test_a_continuation_that_is_refused_is_not_the_clients_fault(world: World) -> None:
    """An engine may not be able to go on where a grammar has begun."""
    refused = Rejected(Rejection.INVALID, message="this engine can't continue a schema")
    world.backends.play([Started(10, 0), Delta("a", 2, token_ids=(7, 8)), LOST], [refused], says("b"))
    call = await Call(world, **RESUME).done()
    assert call.text == "a"
    assert call.events[-1]["error"]["code"] == "overloaded_error"
    await settled(world, requests=1, spent=0)
    assert (await Call(world).done()).headers["x-ratelimit-remaining-requests"] == "999"  # of this one


async def test_a_replica_that_reports_no_tokens_is_not_continued(world: World) -> None:
    world.backends.play([Started(10, 0), Delta("a", 2), LOST], says("b"))
    call = await Call(world, **RESUME).done()
    assert (call.text, set(call.events[-1])) == ("a", {"error"})
    assert len(world.backends.calls) == 1
    await settled(world, requests=1, spent=0)


async def test_a_fallback_does_not_continue_the_reply_of_another_model(make_world: MakeWorld) -> None:
    prices = {"input": "1", "cached_input": "0.5", "output": "3"}
    model = {"backends": {"fake": 1}, "fallback": "other", "price": prices}
    world = await make_world(models={"svc-chat": model})
    world.backends.play(
        [Started(10, 0), Delta("a", 2, token_ids=(7, 8)), LOST], [Rejected(Rejection.QUEUE_FULL)], says("b")
    )
    call = await Call(world, **RESUME).done()
    assert (call.text, set(call.events[-1])) == ("a", {"error"})
    assert len(world.backends.calls) == 2
    await until(lambda: world.is_idle)
    assert world.spent == 0


@pytest.mark.parametrize("other", [{"n": 2}, {"logprobs": True}], ids=["n", "logprobs"])
async def test_what_can_not_be_resumed_is_refused_before_it_runs(world: World, other: dict[str, Any]) -> None:
    call = await Call(world, **RESUME, **other).done()
    assert (call.status, call.json["error"]["param"]) == (422, "stream_options.resume")
    assert not world.backends.calls
