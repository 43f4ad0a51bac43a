"""POST /responses over the gateway: replies, streams, failures and bills, also as OpenAI's SDK sees them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, NotFoundError

from serve_app.contracts.generation import (
    CallArguments,
    CallEnded,
    CallStarted,
    Delta,
    Finished,
    FinishReason,
    Reasoning,
    Rejected,
    Rejection,
    ReplyParts,
    Started,
    Text,
)
from serve_app.contracts.ports import BackendUnavailable
from serve_app.gateway import responses_endpoint
from tests.gateway.connections import Call
from tests.gateway.world import World, price, says, settled, until

TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
THINKS: list[Any] = [
    Started(10, 4),
    ReplyParts((Reasoning("Hm."),), 1),
    ReplyParts((Text("Let me "),), 2),
    ReplyParts((Text("look."),), 3),
    ReplyParts((CallStarted(0, "call_0", "look"), CallArguments(0, '{"a"')), 4),
    ReplyParts((CallArguments(0, ":1}"), CallEnded(0)), 5),
    Finished(FinishReason.STOP, 10, 4, 5, 1),
]


@pytest.fixture
async def sdk(world: World, http: httpx.AsyncClient) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        api_key=world.key,
        base_url="http://gateway/v1",
        max_retries=0,
        http_client=http,
        _strict_response_validation=True,
    ) as made:
        yield made


def responses_call(world: World, **fields: Any) -> Call:
    return Call(world, path="/responses", body={"model": "svc-chat", "input": "Hi", **fields})


def events(call: Call) -> list[Any]:
    frames = call.body.decode().split("\n\n")
    return [json.loads(frame.split("\ndata: ")[1]) for frame in frames if frame.startswith("event: ")]


async def test_a_response_through_the_sdk_is_billed_once_and_has_its_items_and_usage(
    world: World, sdk: AsyncOpenAI
) -> None:
    world.backends.play(THINKS)
    reply = await sdk.responses.create(model="svc-chat", input="Hi", tools=[TOOL], metadata={"a": "b"})  # type: ignore[list-item]
    assert [item.type for item in reply.output] == ["reasoning", "message", "function_call"]
    assert (reply.output_text, reply.status, reply.metadata) == ("Let me look.", "completed", {"a": "b"})
    assert reply.usage is not None
    assert (reply.usage.input_tokens, reply.usage.output_tokens, reply.usage.total_tokens) == (10, 5, 15)
    assert reply.usage.input_tokens_details.cached_tokens == 4
    assert reply.usage.output_tokens_details.reasoning_tokens == 1
    assert reply.id.startswith("resp_")
    await until(lambda: world.is_idle)
    assert world.recorded == 1


async def test_a_stream_through_the_sdk_ends_with_the_response_that_its_events_add_up_to(
    world: World, sdk: AsyncOpenAI
) -> None:
    world.backends.play(THINKS)
    kinds = []
    async with sdk.responses.stream(model="svc-chat", input="Hi", tools=[TOOL]) as stream:  # type: ignore[list-item]
        async for event in stream:
            kinds.append(event.type)
        final = await stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert final.output_text == "Let me look."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.usage is not None
    assert final.usage.total_tokens == 15


async def test_the_model_gets_the_conversation_and_the_limits(world: World) -> None:
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "seen"},
    ]
    call = await responses_call(world, input=items, instructions="Be brief.", tools=[TOOL], temperature=0.5).done()
    assert call.status == 200
    [sent] = world.backends.calls
    assert [message["role"] for message in sent.messages] == ["system", "user", "assistant", "tool"]
    assert (sent.sampling.temperature, sent.tool_choice) == (0.5, "auto")
    assert sent.request_id == call.json["id"]


async def test_a_stream_is_typed_events_with_comments_while_it_waits(make_world: Any) -> None:
    world: World = await make_world(keep_alive_s=0.01)
    prefill = asyncio.Event()
    world.backends.play([Started(10, 0), prefill, Delta("x", 1), Finished(FinishReason.LENGTH, 10, 0, 1)])
    call = responses_call(world, stream=True)
    await call.until(": keep-alive\n\n: keep-alive\n\n")
    prefill.set()
    await call.done()
    assert call.headers["content-type"].startswith("text/event-stream")
    found = events(call)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert found[-1]["type"] == "response.incomplete"
    assert found[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert b"[DONE]" not in call.body


async def test_a_stream_that_fails_ends_with_response_failed_and_its_text_is_billed(world: World) -> None:
    world.backends.play([Started(10, 0), Delta("x", 1), RuntimeError("the device is gone")])
    call = await responses_call(world, stream=True).done()
    last = events(call)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["code"] == "server_error"
    await settled(world, requests=1, spent=price(10, 1))


async def test_a_lost_replica_ends_a_stream_that_has_begun_and_bills_nothing(world: World) -> None:
    world.backends.play([Started(10, 0), Delta("x", 1), BackendUnavailable("gone")])
    call = await responses_call(world, stream=True).done()
    assert events(call)[-1]["type"] == "response.failed"
    await settled(world, requests=1, spent=0)


async def test_a_stream_that_resumes_goes_on_with_the_same_items(world: World) -> None:
    first = [Started(10, 0, "w"), Delta("Hel", 1, token_ids=(1,)), BackendUnavailable("gone")]
    second = [
        Started(10, 0, "w", said=1),
        Delta("lo", 2, token_ids=(2,), is_last=True),
        Finished(FinishReason.STOP, 10, 0, 2),
    ]
    world.backends.play(first, second)
    call = await responses_call(world, stream=True, stream_options={"resume": True}).done()
    assert b": resumed\n\n" in call.body
    [message] = events(call)[-1]["response"]["output"]
    assert message["content"][0]["text"] == "Hello"
    assert len({event["response"]["id"] for event in events(call) if "response" in event}) == 1


async def test_a_client_that_hangs_up_pays_for_what_was_produced(world: World) -> None:
    world.backends.play([Started(10, 0), Delta("x", 1), asyncio.Event()])
    call = responses_call(world, stream=True)
    await call.until("output_text.delta")
    call.hang_up()
    await settled(world, requests=1, spent=price(10, 1))


async def test_a_refusal_by_the_model_names_the_field_of_this_format(world: World) -> None:
    param = "tools[0].function.parameters"
    refused = Rejected(Rejection.INVALID, message=f"{param} (function look): can't be enforced.", param=param)
    world.backends.play([refused])
    call = await responses_call(world, tools=[{"type": "web_search"}, TOOL]).done()
    assert (call.status, call.json["error"]["param"]) == (422, "tools[1].parameters")
    assert call.json["error"]["message"].startswith("tools[1].parameters (function look)")
    world.backends.play([Rejected(Rejection.CONTEXT, prompt_tokens=40_000, limit=32_768)])
    call = await responses_call(world).done()
    assert (call.json["error"]["code"], call.json["error"]["param"]) == ("context_length_exceeded", "input")
    await settled(world, requests=0, spent=0)


async def test_a_retry_with_an_idempotency_key_gets_the_same_response_and_pays_once(world: World) -> None:
    world.backends.play(says("Hello", prompt=10))
    body = {"model": "svc-chat", "input": "Hi"}
    first = await Call(world, path="/responses", body=body, sends={"idempotency-key": "k"}).done()
    again = await Call(world, path="/responses", body=body, sends={"idempotency-key": "k"}).done()
    assert again.body == first.body
    assert again.headers["idempotency-replayed"] == "true"
    other = await Call(world, sends={"idempotency-key": "k"}).done()  # the chat format
    assert (other.status, other.json["error"]["code"]) == (422, "idempotency_key_reused")
    await settled(world, requests=1, spent=price(10, 1))


async def test_an_error_has_its_status_and_its_field(world: World) -> None:
    call = await responses_call(world, input=[{"role": "user", "content": [{"type": "input_image"}]}]).done()
    assert (call.status, call.json["error"]["param"]) == (422, "input[0].content[0].type")
    call = await responses_call(world, previous_response_id="resp_1").done()
    assert (call.status, call.json["error"]["code"]) == (404, "previous_response_not_found")
    await settled(world, requests=0, spent=0)


async def test_a_response_is_read_listed_continued_and_deleted_through_the_sdk(world: World, sdk: AsyncOpenAI) -> None:
    first = await sdk.responses.create(model="svc-chat", input="Hi", instructions="Be brief.")
    assert first.model_extra is not None
    assert first.model_extra["store"] is True
    assert (await sdk.responses.retrieve(first.id)).to_dict() == first.to_dict()
    listed = await sdk.responses.input_items.list(first.id)
    assert [item.type for item in listed.data] == ["message"]
    second = await sdk.responses.create(model="svc-chat", input="And?", previous_response_id=first.id)
    assert [message["content"] for message in world.backends.calls[-1].messages] == ["Hi", "Hello world", "And?"]
    third = await sdk.responses.create(model="svc-chat", input="So?", previous_response_id=second.id)
    assert len(world.backends.calls[-1].messages) == 5
    await sdk.responses.delete(first.id)
    with pytest.raises(NotFoundError):
        await sdk.responses.retrieve(first.id)
    reply = await sdk.responses.create(model="svc-chat", input="!", previous_response_id=third.id)
    assert len(world.backends.calls[-1].messages) == 7  # each response has its whole conversation
    assert reply.previous_response_id == third.id
    await settled(world, requests=4, spent=4 * price(10, 2))


async def test_a_streamed_response_is_stored_as_its_last_event_has_it(world: World, http: httpx.AsyncClient) -> None:
    call = await responses_call(world, stream=True, input=[{"role": "user", "content": "Hi"}]).done()
    last = events(call)[-1]["response"]
    assert last["store"] is True
    assert (await get(http, world.key, last["id"])).json() == last


async def get(http: httpx.AsyncClient, key: str, path: str) -> httpx.Response:
    return await http.get(f"/v1/responses/{path}", headers={"authorization": f"Bearer {key}"})


async def test_other_accounts_neither_read_nor_continue_nor_delete_a_response(
    world: World, http: httpx.AsyncClient
) -> None:
    reply = (await responses_call(world).done()).json
    item = reply["output"][0]["id"]
    _, stranger = world.new_account()
    assert (await get(http, stranger, reply["id"])).status_code == 404
    assert (await get(http, stranger, f"{reply['id']}/input_items")).status_code == 404
    headers = {"authorization": f"Bearer {stranger}"}
    assert (await http.delete(f"/v1/responses/{reply['id']}", headers=headers)).status_code == 404
    body = {"model": "svc-chat", "input": "Hi", "previous_response_id": reply["id"]}
    call = await Call(world, stranger, path="/responses", body=body).done()
    assert (call.status, call.json["error"]["code"]) == (404, "previous_response_not_found")
    assert call.json["error"]["param"] == "previous_response_id"
    body = {"model": "svc-chat", "input": [{"type": "item_reference", "id": item}]}
    call = await Call(world, stranger, path="/responses", body=body).done()
    assert (call.status, call.json["error"]["param"]) == (422, "input[0].id")
    assert (await get(http, world.key, reply["id"])).status_code == 200


async def test_a_response_is_not_stored_if_the_request_or_the_operator_says_so(
    world: World, http: httpx.AsyncClient
) -> None:
    reply = (await responses_call(world, store=False).done()).json
    assert reply["store"] is False
    assert (await get(http, world.key, reply["id"])).status_code == 404
    world.services.settings = world.settings.model_copy(update={"unstored_accounts": [world.account_id]})
    reply = (await responses_call(world).done()).json
    assert reply["store"] is False
    assert (await get(http, world.key, reply["id"])).status_code == 404
    world.services.settings = world.settings.model_copy(update={"stored_responses_s": 0.0})
    assert (await responses_call(world).done()).json["store"] is False


async def test_a_reply_that_was_not_completed_is_not_stored(world: World, http: httpx.AsyncClient) -> None:
    world.backends.play([Started(10, 0), Delta("x", 1), asyncio.Event()])
    call = responses_call(world, stream=True)
    await call.until("output_text.delta")
    call.hang_up()
    await settled(world, requests=1, spent=price(10, 1))
    assert (await get(http, world.key, events(call)[0]["response"]["id"])).status_code == 404


async def test_a_response_waits_in_the_spool_with_its_usage(world: World, http: httpx.AsyncClient) -> None:
    world.settlements.settle_timeout_s = 0.01
    world.accounting.wire_settle.down()
    reply = (await responses_call(world).done()).json
    assert (await get(http, world.key, reply["id"])).status_code == 404
    world.settlements.start()
    world.accounting.wire_settle.up()
    await settled(world, requests=1, spent=price(10, 2))
    assert (await get(http, world.key, reply["id"])).json() == reply


async def test_a_request_that_refers_to_a_response_waits_for_the_ledger(world: World) -> None:
    reply = (await responses_call(world).done()).json
    world.accounting.wire_call.down("FindResponse")
    call = await responses_call(world, previous_response_id=reply["id"]).done()
    assert (call.status, call.headers["retry-after"]) == (503, "2")


async def test_a_completed_response_is_neither_streamed_nor_cancelled(world: World, http: httpx.AsyncClient) -> None:
    reply = (await responses_call(world).done()).json
    streamed = await get(http, world.key, f"{reply['id']}?stream=true")
    assert (streamed.status_code, streamed.json()["error"]["param"]) == (422, "stream")
    headers = {"authorization": f"Bearer {world.key}"}
    cancelled = await http.post(f"/v1/responses/{reply['id']}/cancel", headers=headers)
    assert cancelled.status_code == 422
    assert "background: true" in cancelled.json()["error"]["message"]


async def test_input_tokens_are_those_of_the_prompt_that_the_same_request_sends(world: World, sdk: AsyncOpenAI) -> None:
    first = await sdk.responses.create(model="svc-chat", input="Hi")
    fields: Any = {"model": "svc-chat", "input": "And?", "instructions": "Be brief.", "previous_response_id": first.id}
    counted = await sdk.responses.input_tokens.count(**fields, tools=[TOOL])
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == len("Be brief.HiHello worldAnd?")  # as the scripted replica counts
    await sdk.responses.create(**fields, tools=[TOOL])
    [(_, call)], sent = world.backends.token_calls, world.backends.calls[-1]
    assert (call.messages, call.tools, call.tool_choice) == (sent.messages, sent.tools, sent.tool_choice)
    await settled(world, requests=2, spent=2 * price(10, 2))


async def test_a_count_has_the_errors_of_the_request(world: World) -> None:
    body = {"model": "svc-chat", "input": "Hi", "previous_response_id": "resp_1"}
    call = await Call(world, path="/responses/input_tokens", body=body).done()
    assert (call.status, call.json["error"]["code"]) == (404, "previous_response_not_found")
    world.backends.tokenized = Rejected(Rejection.CONTEXT, 40_000, 32_768)
    call = await Call(world, path="/responses/input_tokens", body={"model": "svc-chat", "input": "Hi"}).done()
    assert (call.status, call.json["error"]["param"]) == (422, "input")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_that_is_too_large_to_be_stored_says_so(
    world: World, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr("serve_app.api.stored_responses.MAX_JSON", 100)
    call = await responses_call(world, stream=stream).done()
    assert (events(call)[-1]["response"] if stream else call.json)["store"] is False
    await settled(world, requests=1, spent=price(10, 2))


async def test_a_reply_that_repeats_a_number_beyond_all_bounds_is_json(world: World) -> None:
    tool = {"type": "custom", "name": "patch", "format": {"x": "number"}}
    call = responses_call(world, tools=[tool])
    call._request = call._request.replace(b'"number"', b"1e999")
    await call.done()
    assert b"Infinity" not in call.body
    assert call.json["tools"][0]["format"]["x"] > 1e300


async def test_long_stored_responses_count_as_several_look_ups(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses_endpoint, "LOOK_UPS_PER_MINUTE", 10)
    monkeypatch.setattr(responses_endpoint, "LOOK_UP_BYTES", 100)
    text = "".join(map(chr, range(0x4E00, 0x5000)))  # hardly compressible
    first = (await responses_call(world, input=text).done()).json["id"]
    statuses = [(await responses_call(world, previous_response_id=first).done()).status for _ in range(2)]
    assert statuses == [200, 429]
