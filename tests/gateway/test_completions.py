"""Text completions from HTTP to the ledger, over a scripted model behind a real engine and replica."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from serve_app.contracts.books import Outcome
from serve_app.contracts.generation import (
    ChoiceEnded,
    Delta,
    Finished,
    FinishReason,
    GenerateCall,
    PromptEcho,
    RawPrompts,
    Rejected,
    Rejection,
    ReplyParts,
    Started,
    Text,
    TokenLogprob,
)
from serve_app.contracts.limiting import Admit
from serve_app.contracts.ports import BackendUnavailable
from tests.gateway.answers import refused
from tests.gateway.connections import Call
from tests.gateway.scripted_model import ScriptedModel
from tests.gateway.world import PRICE_IN, World, price, says, settled, until

PATH = "/completions"
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.fixture
def model() -> Iterator[ScriptedModel]:
    made = ScriptedModel([b"y", b"e", b"s"])
    yield made
    made.close()


def completion(world: World, **fields: Any) -> Call:
    return Call(world, path=PATH, **{"prompt": "ab", **fields})


async def test_a_completion_is_the_text_that_follows_the_prompt_and_is_billed_as_such(
    world: World, model: ScriptedModel
) -> None:
    model.behind(world)
    call = await completion(world).done()
    assert call.status == 200
    assert call.json["id"].startswith("cmpl-")
    assert [choice["text"] for choice in call.json["choices"]] == ["yes"]
    assert (call.json["usage"]["prompt_tokens"], call.json["usage"]["completion_tokens"]) == (2, 3)
    await settled(world, requests=1, spent=price(2, 3))
    assert world.records[-1].path == PATH
    assert world.records[-1].request_id == call.json["id"]


async def test_several_prompts_are_one_request_with_one_hold_and_one_bill(world: World, model: ScriptedModel) -> None:
    model.behind(world)
    call = await completion(world, prompt=["ab", [97, 98, 99]], n=2, echo=True, max_tokens=20).done()
    choices = call.json["choices"]
    assert [choice["text"] for choice in choices] == ["abyes", "abyes", "abcyes", "abcyes"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert call.json["usage"]["prompt_tokens"] == 5
    await settled(world, requests=1, spent=price(5, 12))
    [admit] = [ask for ask in world.limiter.asked if isinstance(ask, Admit)]
    assert admit.max_tokens == 80


async def test_a_stream_carries_the_same(world: World, model: ScriptedModel) -> None:
    model.behind(world)
    options = {"include_usage": True}
    call = await completion(world, prompt=["ab", "c"], echo=True, stream=True, stream_options=options).done()
    assert call.data[-1] == "[DONE]"
    texts = {0: "", 1: ""}
    for event in call.events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {0: "abyes", 1: "cyes"}
    assert call.events[-1]["usage"]["total_tokens"] == 9
    await settled(world, requests=1, spent=price(3, 6))


async def test_a_prompt_is_scored_without_output_and_costs_the_prompt(world: World, model: ScriptedModel) -> None:
    model.behind(world)
    call = await completion(world, prompt="yyy", echo=True, logprobs=1, max_tokens=0).done()
    [choice] = call.json["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("yyy", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, pytest.approx(0, abs=1e-6), pytest.approx(0, abs=1e-6)]
    assert (call.json["usage"]["prompt_tokens"], call.json["usage"]["completion_tokens"]) == (3, 0)
    await settled(world, requests=1, spent=price(3, 0))
    [line] = world.records
    assert (line.outcome, line.finish) == (Outcome.COMPLETED, "length")


async def test_the_end_of_the_text_is_listed_and_not_billed(world: World, model: ScriptedModel) -> None:
    model.behind(world)
    call = await completion(world, logprobs=0).done()
    [choice] = call.json["choices"]
    assert choice["logprobs"]["tokens"] == ["y", "e", "s", "<eos>"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
    await settled(world, requests=1, spent=price(2, 3))


async def test_token_ids_are_complete_although_some_have_no_text(world: World, model: ScriptedModel) -> None:
    model.behind(world)
    call = await completion(world, prompt=[97, 256, 98], stop="s", return_token_ids=True).done()
    [choice] = call.json["choices"]
    assert (choice["text"], choice["prompt_token_ids"]) == ("ye", [97, 256, 98])
    assert choice["token_ids"] == [121, 101, 115]


async def test_the_openai_sdk_reads_replies_and_chunks(world: World, model: ScriptedModel) -> None:
    model.behind(world)
    transport = httpx.ASGITransport(world.app(), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport) as http:
        client = AsyncOpenAI(base_url="http://gateway/v1", api_key=world.key, http_client=http, max_retries=0)
        reply = await client.completions.create(model="svc-chat", prompt=["ab", "c"], logprobs=2, echo=True)
        assert [choice.text for choice in reply.choices] == ["abyes", "cyes"]
        assert reply.choices[0].logprobs is not None
        assert reply.choices[0].logprobs.tokens == ["a", "b", "y", "e", "s", "<eos>"]
        assert reply.usage is not None
        assert reply.usage.total_tokens == 9
        stream = await client.completions.create(model="svc-chat", prompt="ab", stream=True)
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "yes"
    assert chunks[-1].choices[0].finish_reason == "stop"


# What the replica is asked, and refusals


async def asked(world: World, **fields: Any) -> GenerateCall:
    await completion(world, **fields).done()
    return world.backends.calls[-1]


async def test_the_replica_gets_the_prompts_as_they_are(world: World) -> None:
    call = await asked(world, prompt=["a", [5]], add_special_tokens=False, logprobs=3, echo=True, temperature=0)
    assert call.messages == ()
    assert call.raw == RawPrompts(("a", (5,)), None, False, echo=True, scored=True)
    assert call.n == 2
    assert (call.sampling.logprobs, call.sampling.prompt_logprobs, call.sampling.end_logprob) == (3, 3, True)
    call = await asked(world, suffix="b", max_tokens=7)
    assert call.raw == RawPrompts(("ab",), "b")
    assert (call.sampling.max_tokens, call.sampling.prompt_logprobs, call.sampling.end_logprob) == (7, None, False)
    assert (await asked(world, echo=True, max_tokens=0)).sampling.max_tokens == 0


async def test_a_rejected_prompt_gives_the_money_back_and_names_its_field(world: World) -> None:
    world.backends.play([Rejected(Rejection.INVALID, message="suffix is not possible.", param="suffix")])
    call = await completion(world, suffix="x").done()
    assert (call.status, call.json["error"]["param"]) == (422, "suffix")
    world.backends.play([Rejected(Rejection.CONTEXT, 40_000, limit=32768)])
    call = await completion(world).done()
    assert (call.status, call.json["error"]["param"]) == (422, "prompt")
    assert "your prompt has 40000 tokens" in call.json["error"]["message"]
    await until(lambda: world.is_idle)
    assert world.spent == 0


async def test_a_body_without_a_prompt_is_refused(http: httpx.AsyncClient, world: World) -> None:
    http.headers["authorization"] = f"Bearer {world.key}"
    refused(await http.post("/v1/completions", json={"model": "svc-chat"}), 400, "prompt is missing")
    refused(await http.get("/v1/completions"), 405, "Use POST")


async def test_the_texts_of_a_logged_account_are_its_prompts(make_world: Callable[..., Any]) -> None:
    world: World = await make_world()
    world.settings = world.services.settings = world.settings.model_copy(update={"logged_texts": (world.account_id,)})
    await completion(world, prompt=["a", [5]]).done()
    await until(lambda: world.is_idle and world.records)
    assert json.loads(json.dumps(world.records[-1].messages)) == ["a", [5]]


# What is billed when a request ends early

ECHO = ReplyParts(
    (PromptEcho("ab", (97, 98)),), 0, (TokenLogprob(97, "a", b"a", 0.0), TokenLogprob(98, "b", b"b", -1.0))
)


async def until_sent(call: Call, text: str) -> Call:
    await call.until(text)
    call.hang_up()
    return await call.done()


async def test_a_client_that_hangs_up_pays_for_a_prompt_that_was_sent_back(world: World) -> None:
    world.backends.play([Started(2, 0), ECHO, asyncio.Event()])
    await until_sent(completion(world, echo=True, logprobs=1, max_tokens=0, stream=True), '"ab"')
    await settled(world, requests=1, spent=price(2, 0))


async def test_a_client_that_hangs_up_before_that_pays_nothing(world: World) -> None:
    [script] = world.backends.play([Started(2, 0), asyncio.Event()])
    call = completion(world, echo=True, logprobs=1, max_tokens=0, stream=True)
    await until(lambda: script.begun == 2)
    call.hang_up()
    await call.done()
    await settled(world, requests=1, spent=0)


async def test_a_client_that_hangs_up_pays_for_the_prompts_that_have_produced_something(world: World) -> None:
    script = [
        Started(2, 0),
        ReplyParts((Text("one"),), 1, (), 0),
        Started(5, 2),  # with the second prompt
        ReplyParts((Text("two"),), 2, (), 1),
        asyncio.Event(),
    ]
    world.backends.play(script)
    await until_sent(completion(world, prompt=["ab", "abc", "x"], stream=True), "two")
    await settled(world, requests=1, spent=price(3, 2) + 2 * PRICE_IN // 2)


async def test_a_stream_that_fails_after_a_prompt_was_sent_back_bills_the_prompt(world: World) -> None:
    world.backends.play([Started(2, 0), ECHO, RuntimeError("it breaks")])
    call = await completion(world, echo=True, logprobs=1, max_tokens=0, stream=True).done()
    assert call.events[-1]["error"]["code"] == "server_error"
    await settled(world, requests=1, spent=price(2, 0))


async def test_a_lost_replica_is_replaced_and_the_reply_is_billed_once(world: World) -> None:
    again = [
        Started(4, 0),
        ReplyParts((PromptEcho("ab"),), 0, (), 0),
        ReplyParts((Text("one"),), 1, (), 0),
        ReplyParts((PromptEcho("cd"),), 1, (), 1),
        ReplyParts((Text("two"),), 2, (), 1),
        ChoiceEnded(0, STOP),
        ChoiceEnded(1, LENGTH),
        Finished(STOP, 4, 0, 2),
    ]
    world.backends.play([Started(2, 0), ECHO, BackendUnavailable("lost")], again)
    call = await completion(world, prompt=["ab", "cd"], echo=True).done()
    assert [choice["text"] for choice in call.json["choices"]] == ["abone", "cdtwo"]
    await until(lambda: world.is_idle and world.recorded == 2)
    assert world.spent == price(4, 2)


async def test_a_retry_with_the_same_key_gets_the_stored_reply(world: World) -> None:
    world.backends.play(says("x"))
    first = await completion(world, sends={"idempotency-key": "k"}).done()
    again = await completion(world, sends={"idempotency-key": "k"}).done()
    assert again.body == first.body
    assert again.headers["idempotency-replayed"] == "true"
    # The same key for the same body at another door is another request.
    await settled(world, requests=1, spent=price(10, 1))


async def test_a_stream_with_resume_continues_on_another_replica(world: World) -> None:
    first = [Started(2, 0), Delta("y", 1, (), (121,)), BackendUnavailable("lost")]
    second = [Started(2, 0, said=1), Delta("es", 3, (), (101, 115), True), Finished(STOP, 2, 0, 3)]
    world.backends.play(first, second)
    call = await completion(world, stream=True, stream_options={"resume": True}).done()
    assert "".join(event["choices"][0]["text"] for event in call.events) == "yes"
    assert world.backends.calls[-1].said == (121,)


@pytest.fixture
async def poor(make_world: Callable[..., Any]) -> World:
    world: World = await make_world()
    world.account_id, world.key = world.new_account(credit=price(10, 40))
    return world


async def test_a_balance_that_pays_for_fewer_tokens_shortens_each_choice(poor: World) -> None:
    await completion(poor, prompt=["a", "b"], max_tokens=1000).done()
    [admit] = [ask for ask in poor.limiter.asked if isinstance(ask, Admit)]
    assert admit.max_tokens == 2000
    left = (price(10, 40) - admit.prompt_tokens * PRICE_IN) // 3000
    assert poor.backends.calls[-1].sampling.max_tokens == left // 2
