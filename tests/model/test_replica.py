"""Tests of a replica's handling of calls, over a scripted engine. The real engine has its own tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest

from serve_app.contracts.books import Outcome, Settled, Settlement
from serve_app.contracts.generation import (
    Bill,
    Delta,
    Event,
    Finished,
    FinishReason,
    GenerateCall,
    Rejected,
    Rejection,
    ReplyParts,
    SamplingParams,
    Started,
)
from serve_app.contracts.money import Price
from serve_app.contracts.ports import SettleAnswer
from serve_app.engine.errors import (
    ContextLengthExceeded,
    EngineClosed,
    QueueFull,
    RequestRefused,
    UnknownAdapter,
    UnsupportedGrammar,
)
from serve_app.engine.request import GenerationRequest
from serve_app.model.replica import SHORT, Replica, _is_short
from serve_app.model.reply import Reply

PRICE = Price(input=1000, cached_input=500, output=3000)
STOP = FinishReason.STOP


class ScriptedEngine:
    """Says `script`: events, exceptions to raise, asyncio.Events to wait for. Renders one token a character."""

    max_context = 100
    fingerprint = ""

    def __init__(self, *script: Any) -> None:
        self.script = script
        self.chat = self
        self.requests: list[GenerationRequest] = []
        self.aborted = asyncio.Event()
        self.ended = asyncio.Event()

    template = None

    def text(self, messages: list[dict[str, Any]], continue_final: bool, tools: Any, variables: Any) -> str:
        text: str = messages[-1]["content"]
        if text == "too long":
            raise ContextLengthExceeded(0, 100)
        if text == "refused":
            raise ValueError("roles must alternate")
        return text

    def literal(self, value: Any, spared: Any = ()) -> Any:
        return value

    def tokenize(self, text: str) -> list[int]:
        return list(range(len(text)))

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        self.requests.append(request)
        finished = False
        try:
            for step in self.script:
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, BaseException):
                    raise step
                else:
                    finished = isinstance(step, Finished)
                    yield step
        finally:
            self.ended.set()
            if not finished:
                self.aborted.set()


class Made:
    def __init__(self, *script: Any) -> None:
        self.engine = ScriptedEngine(*script)
        self.settled: list[Settlement] = []
        self.now = 0.0
        self.replica = Replica(self.engine, self.settle, clock=lambda: self.now)  # type: ignore[arg-type]

    async def settle(self, settlements: list[Settlement]) -> list[SettleAnswer]:
        self.settled += settlements
        return [Settled(settlement.request_id, 0, 0, 1) for settlement in settlements]

    async def all(self, **call: Any) -> list[Any]:
        return [event async for event in self.replica.generate(a_call(**call))]


def a_call(content: str = "0123456789", max_tokens: int = 20, credit: int = 10**9, **more: Any) -> GenerateCall:
    bill = Bill("acct", "key", "svc-chat", "fake", PRICE)
    messages = ({"role": "user", "content": content},)
    return GenerateCall("r", messages, SamplingParams(max_tokens), credit, bill, settle_after_s=0.01, **more)


# Rejections


@pytest.mark.parametrize(
    ("call", "rejected"),
    [
        ({"content": "too long"}, Rejected(Rejection.CONTEXT, limit=100)),
        ({"content": "x" * 100}, Rejected(Rejection.CONTEXT, prompt_tokens=100, limit=100)),
        ({"content": "refused"}, Rejected(Rejection.INVALID, message="roles must alternate")),
        ({"credit": 10 * 1000 + 20 * 3000 - 1}, Rejected(Rejection.CREDIT, prompt_tokens=10)),
        ({"credit": 0}, Rejected(Rejection.CREDIT, prompt_tokens=10)),
        ({"credit": 10 * 1000 + 3 * 20 * 3000 - 1, "n": 3}, Rejected(Rejection.CREDIT, prompt_tokens=10)),
    ],
)
async def test_what_cannot_run_is_rejected_before_the_engine_sees_it(call: dict[str, Any], rejected: Rejected) -> None:
    made = Made(Finished(STOP, 1, 0, 1))
    assert await made.all(**call) == [rejected]
    assert not made.engine.requests


async def test_a_hold_that_pays_to_the_last_nano_unit_is_enough() -> None:
    made = Made(Started(10, 0), Finished(STOP, 10, 0, 0))
    events = await made.all(credit=10 * 1000 + 20 * 3000)
    assert events == [Started(10, 0), Finished(STOP, 10, 0, 0)]


async def test_the_stop_string_that_ended_the_only_choice_is_told() -> None:
    ended = Finished(STOP, 10, 0, 1, stop="###")
    assert (await Made(Started(10, 0), Delta("a", 1), ended).all())[-1] == ended
    several = await Made(Started(10, 0), Delta("a", 1), ended).all(n=2)
    assert several[-1].stop is None


async def test_a_hold_pays_for_the_prompt_once_and_for_the_output_of_every_choice() -> None:
    made = Made(Started(10, 0), Delta("a", 1), Finished(STOP, 10, 0, 1))
    events = await made.all(n=3, credit=10 * 1000 + 3 * 20 * 3000)
    assert events[-1] == Finished(STOP, 10, 0, 3)


async def test_a_hold_covers_the_prompt_whether_it_is_cached_or_not() -> None:
    made = Made(Finished(STOP, 10, 10, 0))
    call = a_call(credit=10 * 1000 + 20 * 3000)
    dear = replace(call, bill=replace(call.bill, price=replace(PRICE, cached_input=1001)))
    assert [event async for event in made.replica.generate(dear)] == [Rejected(Rejection.CREDIT, prompt_tokens=10)]


async def test_the_engine_receives_the_accounts_weight_and_the_deadline_of_the_first_token() -> None:
    made = Made(Started(10, 0), Finished(STOP, 10, 0, 0))
    made.now = 1000.0
    await made.all(weight=2.5, first_token_within_s=30.0)
    await made.all()
    patient, plain = made.engine.requests
    assert (patient.weight, patient.first_token_by) == (2.5, 1030.0)
    assert (plain.weight, plain.first_token_by) == (1.0, None)


async def test_the_context_bounds_the_output_and_with_it_the_price() -> None:
    made = Made(Started(95, 0), Finished(STOP, 95, 0, 0))
    await made.all(content="x" * 95, max_tokens=4096, credit=95 * 1000 + 5 * 3000)
    [request] = made.engine.requests
    assert (request.sampling.max_tokens, request.tenant) == (5, "acct")


@pytest.mark.parametrize(
    ("error", "reason"), [(QueueFull(3), Rejection.QUEUE_FULL), (EngineClosed("closed"), Rejection.CLOSED)]
)
async def test_an_engine_that_is_full_rejects_the_request(error: Exception, reason: Rejection) -> None:
    made = Made(error)
    assert await made.all() == [Rejected(reason)]
    await made.replica.drain()
    assert not made.settled


@pytest.mark.parametrize("param", ["logit_bias", "min_p"])
async def test_a_field_that_the_sampler_refuses_is_the_requests_fault_and_is_named(param: str) -> None:
    [rejected] = await Made(ValueError(f"{param} is not possible here")).all()
    assert (rejected.reason, rejected.param) == (Rejection.INVALID, param)
    assert rejected.message == f"{param} is not possible here. Leave it out."


@pytest.mark.parametrize("started", [False, True], ids=["at once", "once it has its turn"])
@pytest.mark.parametrize("param", ["min_p", ""])
async def test_a_request_that_the_engine_refuses_is_the_requests_fault(param: str, started: bool) -> None:
    script = [Started(10, 0)] if started else []
    made = Made(*script, RequestRefused("this model's engine refuses the request: no min_p", param))
    *_, rejected = events = await made.all()
    message = "this model's engine refuses the request: no min_p."
    assert rejected == Rejected(Rejection.INVALID, message=message, param=param)
    assert len(events) == len(script) + 1
    await made.replica.drain()
    assert not made.settled


async def test_a_grammar_that_the_engine_cannot_enforce_is_refused_with_its_reason() -> None:
    [rejected] = await Made(UnsupportedGrammar("unsupported keywords in the JSON schema: not")).all()
    assert (rejected.reason, rejected.param) == (Rejection.INVALID, "response_format")
    assert rejected.message == "response_format: unsupported keywords in the JSON schema: not."


async def test_any_other_error_of_the_engine_is_a_fault_of_the_service() -> None:
    with pytest.raises(ValueError, match="running already"):
        await Made(ValueError("a request with the id 'r' is running already")).all()


# Streams that are cut


async def cut_after(made: Made, text: str, how: str) -> None:
    """Takes events until `text` was seen, then goes away as Ray does it."""
    stream = made.replica.generate(a_call())
    if how == "cancel":

        async def read() -> None:
            async for event in stream:
                if isinstance(event, Delta) and text in event.text:
                    reading.set()

        reading = asyncio.Event()
        task = asyncio.create_task(read())
        await reading.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return
    async for event in stream:
        if isinstance(event, Delta) and text in event.text:
            break
    if how == "close":
        await stream.aclose()
    else:
        with pytest.raises(asyncio.CancelledError):
            await stream.athrow(asyncio.CancelledError())


@pytest.mark.parametrize("how", ["close", "cancel", "throw"])
async def test_a_cut_stream_stops_the_engine_and_is_settled_after_the_delay(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    delays: asyncio.Queue[float] = asyncio.Queue()
    passed = asyncio.Event()

    async def sleep(seconds: float) -> None:
        delays.put_nowait(seconds)
        await passed.wait()

    made = Made(Started(10, 2), Delta("ab", 2), asyncio.Event())
    monkeypatch.setattr("serve_app.model.orphans.asyncio.sleep", sleep)
    await cut_after(made, "ab", how)
    await asyncio.wait_for(made.engine.aborted.wait(), 30)
    async with asyncio.timeout(30):
        while await delays.get() != a_call().settle_after_s:
            """Another task of the replica sleeps."""
    assert not made.settled  # a gateway that is alive comes first
    passed.set()
    await made.replica.drain()
    [settlement] = made.settled
    assert settlement.request_id == "r"
    assert (settlement.prompt_tokens, settlement.cached_tokens, settlement.completion_tokens) == (10, 2, 2)
    assert (settlement.outcome, settlement.price, settlement.account_id) == (Outcome.CANCELLED, PRICE, "acct")


async def test_a_stream_that_is_cut_before_it_produced_anything_is_not_settled() -> None:
    made = Made(Started(10, 0), asyncio.Event())
    stream = made.replica.generate(a_call())
    await anext(stream)
    await stream.aclose()
    await made.replica.drain()
    assert not made.settled


async def test_a_finished_stream_is_settled_by_the_gateway() -> None:
    made = Made(Started(10, 0), Delta("a", 1), Finished(STOP, 10, 0, 1))
    assert (await made.all())[-1] == Finished(STOP, 10, 0, 1)
    await made.replica.drain()
    assert not made.settled


async def test_an_end_that_the_gateway_did_not_receive_is_settled() -> None:
    made = Made(Started(10, 0), Delta("a", 1), Finished(STOP, 10, 0, 3))
    stream = made.replica.generate(a_call())
    async for event in stream:
        if isinstance(event, Finished):
            break
    await stream.aclose()
    await made.replica.drain()
    assert [settlement.completion_tokens for settlement in made.settled] == [3]


@pytest.mark.parametrize("failure", [RuntimeError("fault"), Finished(FinishReason.ERROR, 10, 0, 1)], ids=repr)
async def test_a_failure_of_our_own_is_never_billed(failure: Any) -> None:
    made = Made(Started(10, 0), Delta("a", 1), failure)
    if isinstance(failure, Exception):
        with pytest.raises(RuntimeError, match="fault"):
            await made.all()
    else:
        await made.all()
    await made.replica.drain()
    assert not made.settled


async def test_a_reply_begins_with_the_fingerprint_of_the_weights() -> None:
    made = Made(Started(5, 0), Delta("x", 1), Finished(STOP, 5, 0, 1))
    made.engine.fingerprint = "0123456789ab"
    [begun, *_] = await made.all()
    assert begun == Started(5, 0, "0123456789ab")
    made.engine.script = (Started(5, 0, "of its adapter"), *made.engine.script[1:])
    [begun, *_] = await made.all()
    assert begun == Started(5, 0, "of its adapter")


async def test_an_adapter_that_the_engine_does_not_have_is_a_rejection_of_its_own() -> None:
    assert await Made(UnknownAdapter("there is no adapter 'law'")).all() == [Rejected(Rejection.ADAPTER)]


def test_a_reply_that_starts_again_with_its_cached_tokens_replays_nothing_twice() -> None:
    fed: list[str] = []

    class Parser:
        def feed(self, text: str) -> list[Any]:
            fed.append(text)
            return []

    reply = Reply(a_call(), [10], [Parser()])  # type: ignore[list-item]
    for started in (Started(10, 0, said=2, said_text="ab"), Started(10, 8, said=2)):
        list(reply.events(0, started))
    assert fed == ["ab"]
    assert (reply.produced.cached_tokens, reply.produced.completion_tokens) == (8, 2)


def test_the_first_token_is_reported_although_its_text_is_held_back() -> None:
    """From then on the request is billed, and its prompt is found in the engine's cache."""

    class Silent:
        def feed(self, text: str) -> list[Any]:
            return []

    reply = Reply(a_call(n=2), [10], [Silent(), Silent()])  # type: ignore[list-item]
    assert list(reply.events(0, Started(10, 0))) == [Started(10, 0)]
    assert list(reply.events(0, Delta("<", 1))) == [ReplyParts((), 1)]
    assert list(reply.events(0, Delta("t", 2))) == []
    assert list(reply.events(1, Delta("<", 1))) == []


LONG_TEXT = "x" * (SHORT + 1)
TOOL = {"type": "function", "function": {"name": "f", "description": LONG_TEXT, "parameters": {"type": "object"}}}
CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": LONG_TEXT}}


@pytest.mark.parametrize(
    "long",
    [
        {"messages": ({"role": "user", "content": LONG_TEXT},)},
        {"messages": tuple({"role": "user", "content": "x" * 100} for _ in range(SHORT // 100 + 1))},
        {"messages": ({"role": "user", "content": "x", "name": LONG_TEXT},)},
        {"messages": ({"role": "assistant", "content": None, "tool_calls": [CALLED]},)},
        {"tools": (TOOL,)},
    ],
    ids=["content", "many messages", "name", "arguments", "tools"],
)
def test_a_prompt_is_long_whatever_makes_it_long(long: dict[str, Any]) -> None:
    call = a_call("x" * 100, tools=(TOOL | {"function": {"name": "f", "parameters": {}}},))
    assert _is_short(call)
    assert not _is_short(replace(call, **long))
