"""The Messages format from HTTP to the replica's call and back: every field, every event, every error, and the bill."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from serve_app.admin.document import build_document
from serve_app.api.messages_reply import HIDDEN_PER_PING, PING
from serve_app.contracts.generation import (
    CallArguments,
    CallEnded,
    CallStarted,
    Delta,
    Ending,
    Finished,
    FinishReason,
    Part,
    Reasoning,
    Rejected,
    Rejection,
    ReplyParts,
    Started,
    Text,
)
from serve_app.contracts.ports import BackendUnavailable
from serve_app.settings import GatewaySettings
from tests.gateway.scripted_model import QWEN, ScriptedModel
from tests.gateway.world import FULL_SETTINGS, NANO, PRICE_IN, PRICE_OUT, World, price, settled, until


@pytest.fixture
def model() -> Iterator[ScriptedModel]:
    made = ScriptedModel([b"a", b"b"], template=QWEN)
    yield made
    made.close()


STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
DOCUMENT = build_document(GatewaySettings.model_validate(FULL_SETTINGS).models)
USER = {"role": "user", "content": "Hi"}
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}}
CALL = [CallStarted(0, "call_1", "look"), CallArguments(0, '{"a"'), CallArguments(0, ": 1}"), CallEnded(0)]


def body_of(**fields: Any) -> dict[str, Any]:
    return {"model": "svc-chat", "max_tokens": 100, "messages": [USER], **fields}


async def send(
    world: World, *, path: str = "/v1/messages", headers: dict[str, str] | None = None, **fields: Any
) -> httpx.Response:
    transport = httpx.ASGITransport(app=world.app())
    sent = {"x-api-key": world.key, "anthropic-version": "2023-06-01"} if headers is None else headers
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=sent) as client:
        return await client.post(path, json=body_of(**fields))


def valid(answer: httpx.Response, path: str = "/messages") -> Any:
    """The body, checked against the document."""
    content = DOCUMENT["paths"][path]["post"]["responses"][str(answer.status_code)]["content"]["application/json"]
    Draft202012Validator({**content["schema"], "components": DOCUMENT["components"]}).validate(answer.json())
    return answer.json()


def events_of(answer: httpx.Response) -> list[Any]:
    """The events of a stream without pings, each checked against the document."""
    data = DOCUMENT["components"]["schemas"]["MessageEvent"]["properties"]["data"]
    validator = Draft202012Validator({**data["contentSchema"], "components": DOCUMENT["components"]})
    found = []
    for frame in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        validator.validate(event)
        assert name == f"event: {event['type']}"
        if event["type"] != "ping":
            found.append(event)
    return found


def replies(*parts: Part, reason: FinishReason = STOP, stop: str | None = None, thought: int = 0) -> list[Any]:
    events = [ReplyParts((part,), number) for number, part in enumerate(parts, start=1)]
    return [Started(10, 4), *events, Finished(reason, 10, 4, len(parts), thought or None, stop)]


async def blocks(world: World, *parts: Part, **fields: Any) -> list[dict[str, Any]]:
    """The content of a reply, which is the same whole and in a stream."""
    world.backends.play(replies(*parts))
    whole = valid(await send(world, **fields))["content"]
    made: list[dict[str, Any]] = []
    for event in events_of(await send(world, stream=True, **fields)):
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(made)
                made.append({**event["content_block"], **({"input": ""} if "input" in event["content_block"] else {})})
            case "content_block_delta":
                assert event["index"] == len(made) - 1
                [(name, text)] = [pair for pair in event["delta"].items() if pair[0] != "type"]
                made[-1]["input" if name == "partial_json" else name] += text
    for block in made:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["input"] or "{}")
    assert made == whole
    return made


# Requests


async def test_every_field_reaches_the_replica(world: World) -> None:
    answer = await send(
        world,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        stop_sequences=["###"],
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        tools=[TOOL, {**TOOL, "name": "other", "type": "custom", "strict": True}],
        tool_choice={"type": "tool", "name": "look", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 1024},
        metadata={"user_id": "u"},
        service_tier="auto",
        unknown={"x": 1},
    )
    assert answer.status_code == 200, answer.text
    [call] = world.backends.calls
    assert call.messages == ({"role": "system", "content": "Be brief."}, USER)
    sampling = call.sampling
    assert (sampling.max_tokens, sampling.stop) == (100, ("###",))
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 40)
    assert [tool["function"]["name"] for tool in call.tools] == ["look", "other"]
    assert call.tools[0]["function"]["parameters"] == TOOL["input_schema"]
    assert call.tools[1]["function"]["strict"] is True
    assert (call.tool_choice, call.function, call.parallel_calls) == ("required", "look", False)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ("auto", None)),
        ({"type": "auto"}, ("auto", None)),
        ({"type": "any"}, ("required", None)),
        ({"type": "tool", "name": "look"}, ("required", "look")),
        ({"type": "none"}, ("none", None)),
    ],
)
async def test_a_tool_choice_has_the_meaning_of_chats(world: World, choice: Any, expected: Any) -> None:
    assert (await send(world, tools=[TOOL], tool_choice=choice)).status_code == 200
    [call] = world.backends.calls
    assert (call.tool_choice, call.function) == expected


CONVERSATION = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"role": "user", "content": "c"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "Looking."},
            {"type": "tool_use", "id": "t1", "name": "look", "input": {"a": "é"}},
            {"type": "tool_use", "id": "t2", "name": "look", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "5"}]},
            {"type": "tool_result", "tool_use_id": "t2", "content": "gone", "is_error": True},
            {"type": "text", "text": "Go on."},
        ],
    },
    {"role": "assistant", "content": "The"},
]


async def test_a_conversation_becomes_chat_messages_and_its_end_is_continued(world: World) -> None:
    assert (await send(world, messages=CONVERSATION, tools=[TOOL])).status_code == 200
    [call] = world.backends.calls
    calls = [
        {"id": "t1", "type": "function", "function": {"name": "look", "arguments": '{"a": "é"}'}},
        {"id": "t2", "type": "function", "function": {"name": "look", "arguments": "{}"}},
    ]
    assert call.messages == (
        {"role": "user", "content": "a\nb\nc"},
        {"role": "assistant", "content": "Looking.", "tool_calls": calls},
        {"role": "tool", "content": "5", "tool_call_id": "t1"},
        {"role": "tool", "content": "Error: gone", "tool_call_id": "t2"},
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": "The"},
    )
    assert call.continue_final


@pytest.mark.parametrize("empty", ["", [], [{"type": "thinking", "thinking": "Hm.", "signature": ""}]])
async def test_an_empty_message_of_the_assistant_at_the_end_is_left_out(world: World, empty: Any) -> None:
    await send(world, messages=[USER, {"role": "assistant", "content": empty}])
    [call] = world.backends.calls
    assert (call.messages, call.continue_final) == ((USER,), False)


async def test_more_tokens_than_the_model_has_are_its_limit(world: World) -> None:
    assert (await send(world, max_tokens=10**9)).status_code == 200
    assert world.backends.calls[0].sampling.max_tokens == world.settings.models["svc-chat"].max_output


async def test_a_form_of_the_reply_is_enforced(world: World) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    await send(world, output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "low"})
    grammar = world.backends.calls[0].sampling.grammar
    assert grammar is not None
    assert (json.loads(grammar.text), grammar.strict) == (schema, True)


async def test_a_stream_can_ask_to_be_resumed(world: World) -> None:
    await send(world, stream=True, stream_options={"resume": True})
    assert world.backends.calls[0].sampling.token_ids


# Refused requests

IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
USED = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
WRONG: list[tuple[dict[str, Any], int, str]] = [
    ({"model": "claude"}, 404, "'claude' does not exist"),
    ({"max_tokens": None}, 400, "max_tokens is missing"),
    ({"max_tokens": 0}, 400, "max_tokens must be at least 1"),
    ({"max_tokens": "5"}, 400, "max_tokens must be an integer"),
    ({"messages": []}, 400, "messages must have at least one message"),
    ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role must be one of"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, 400, 'messages[0].content[0].type is "image"'),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "messages[0].content[0].text is missing"),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content must be"),
    ({"messages": [USER, {"role": "assistant", "content": [USED]}]}, 400, "messages[1] has tool_use"),
    ({"system": [IMAGE]}, 400, "system[0]"),
    ({"temperature": 1.5}, 400, "temperature must be from 0 to 1"),
    ({"top_p": 0}, 400, "top_p must be above 0"),
    ({"top_k": -1}, 400, "top_k must be from 0"),
    ({"stop_sequences": [""]}, 400, "stop_sequences must not have an empty string"),
    ({"stop_sequences": ["a"] * 17}, 400, "stop_sequences must have at most 16"),
    ({"stop_sequences": "a"}, 400, "stop_sequences must be"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400, 'tools[0].type is "web_search_20250305"'),
    ({"tools": [{"name": "look"}]}, 400, "tools[0].input_schema is missing"),
    ({"tools": [{**TOOL, "name": "a b"}]}, 400, "tools[0].name must be"),
    ({"tools": [TOOL, TOOL]}, 400, "tools[1].name must not repeat"),
    ({"tools": [TOOL] * 129}, 400, "tools must have at most 128 entries"),
    ({"tools": [{**TOOL, "input_schema": {"pattern": "a" * 20_000}}]}, 400, "tools[0].input_schema"),
    ({"tool_choice": {"type": "any"}}, 400, "tool_choice.type must not be 'any'"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, 400, "tool_choice.name must name one"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, 400, "tool_choice.name is missing"),
    ({"tools": [TOOL], "tool_choice": {"type": "required"}}, 400, "tool_choice.type must be one of"),
    ({"thinking": {"type": "on"}}, 400, "thinking.type must be one of"),
    ({"mcp_servers": [{"name": "x"}]}, 400, "mcp_servers is not supported"),
    ({"output_format": {"type": "json_schema"}}, 400, "Send its value in output_config.format"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"pattern": "a" * 20_000}}}}, 400,
     "output_config.format.schema"),
    ({"stream_options": {"resume": True}}, 400, "stream_options is only possible with stream: true"),
    ({"messages": [USER] * 33_000}, 400, "prompt is too long: more than 32768 tokens > 32767 maximum"),
]  # fmt: skip
TYPES = {400: "invalid_request_error", 401: "authentication_error", 402: "billing_error", 404: "not_found_error",
         413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 529: "overloaded_error"}  # fmt: skip


def refused(answer: httpx.Response, status: int, says: str, path: str = "/messages") -> None:
    assert answer.status_code == status, answer.text
    error = valid(answer, path)
    assert error["error"]["type"] == TYPES[status]
    assert says in error["error"]["message"]
    assert error["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize(("fields", "status", "says"), WRONG)
async def test_a_wrong_field_is_named_as_this_format_names_it_and_costs_nothing(
    world: World, fields: dict[str, Any], status: int, says: str
) -> None:
    refused(await send(world, **fields), status, says)
    if set(fields) - {"max_tokens", "stream_options"}:
        refused(await send(world, path="/messages/count_tokens", **fields), status, says, "/messages/count_tokens")
    assert world.is_idle
    assert not world.backends.calls
    assert world.spent == 0


@pytest.mark.parametrize(
    ("answer", "status", "says"),
    [
        (Rejected(Rejection.CONTEXT, 40_000, 32_768), 400, "prompt is too long: 40000 tokens > 32767 maximum"),
        (
            Rejected(
                Rejection.INVALID, message="tools[0].function.parameters: no", param="tools[0].function.parameters"
            ),
            400,
            "tools[0].input_schema: no",
        ),
        (Rejected(Rejection.QUEUE_FULL), 529, "queue is full"),
        (BackendUnavailable("gone"), 529, "send it again"),
        (RuntimeError("fault"), 500, "failed to process"),
    ],
    ids=repr,
)
async def test_a_failure_has_the_formats_status_and_its_type(world: World, answer: Any, status: int, says: str) -> None:
    world.backends.play([answer])
    for stream in (False, True):
        response = await send(world, stream=stream)
        refused(response, status, says)
        assert ("retry-after" in response.headers) is (status == 529)
    await until(lambda: world.is_idle)
    assert world.spent == 0


async def test_keys_balance_limits_methods_and_sizes_have_the_formats_errors(
    make_world: Callable[..., Any],
) -> None:
    world: World = await make_world(max_body_bytes=10_000)
    refused(await send(world, headers={}), 401, "x-api-key")
    refused(await send(world, headers={"x-api-key": "wrong"}), 401, "well-formed")
    _, poor = world.new_account(credit=0)
    refused(await send(world, headers={"x-api-key": poor}), 402, "balance")
    _, slow = world.new_account(rpm=1)
    assert (await send(world, headers={"x-api-key": slow})).status_code == 200
    limited = await send(world, headers={"x-api-key": slow})
    refused(limited, 429, "per minute")
    assert {"retry-after", "retry-after-ms", "x-ratelimit-limit-requests"} <= set(limited.headers)
    refused(await send(world, system="x" * 20_000), 413, "larger than 10000 bytes")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=world.app()), base_url="http://test") as client:
        wrong = await client.get("/v1/messages")
        assert wrong.status_code == 405
        assert wrong.json()["error"]["type"] == "invalid_request_error"
        assert wrong.json()["request_id"] == wrong.headers["request-id"]


@pytest.mark.parametrize("path", ["/v1/messages", "/chat/completions", "/models", "/v1/user/balance", "/tokenize"])
async def test_a_key_in_either_header_opens_every_path_and_authorization_counts_first(world: World, path: str) -> None:
    method = "GET" if path in ("/models", "/v1/user/balance") else "POST"
    fields = {"prompt": "a"} if path == "/tokenize" else {}
    wrong = "sk-" + "0" * 64

    async def status(headers: dict[str, str]) -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=world.app()), base_url="http://test") as client:
            body = {"model": "svc-chat", **fields} if fields else body_of()
            return (await client.request(method, path, headers=headers, json=body)).status_code

    bearer, other = {"authorization": f"Bearer {world.key}"}, {"authorization": f"Bearer {wrong}"}
    assert await status(bearer) == 200
    assert await status({"x-api-key": world.key}) == 200
    assert await status({**bearer, "x-api-key": wrong}) == 200
    assert await status({**other, "x-api-key": world.key}) == 401
    assert await status({"authorization": "", "x-api-key": world.key}) == 401
    assert await status({"x-api-key": ""}) == 401
    assert await status({"x-api-key": f"{world.key} x"}) == 401


# Replies


async def test_a_whole_reply_has_its_text_its_end_and_the_bill(world: World) -> None:
    world.backends.play([Started(10, 4), Delta("Hel", 1), Delta("lo", 2), Finished(STOP, 10, 4, 2)])
    answer = await send(world)
    assert valid(answer) == {
        "id": answer.json()["id"],
        "type": "message",
        "role": "assistant",
        "model": "svc-chat",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 6,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": 2,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    await settled(world, requests=1, spent=6 * PRICE_IN + 4 * PRICE_IN // 2 + 2 * PRICE_OUT)


async def test_a_streamed_reply_begins_with_its_prompt_and_ends_with_the_bill(world: World) -> None:
    world.backends.play([Started(10, 4), Delta("Hel", 1), Delta("lo", 2), Finished(STOP, 10, 4, 2)])
    answer = await send(world, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    start, *middle, end, stop = events_of(answer)
    prompt = {"input_tokens": 6, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4}
    assert start["message"]["usage"] == {**prompt, "output_tokens": 0, "output_tokens_details": {"thinking_tokens": 0}}
    assert start["message"]["content"] == []
    assert middle == [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hel"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "lo"}},
        {"type": "content_block_stop", "index": 0},
    ]
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert end["usage"] == {**prompt, "output_tokens": 2, "output_tokens_details": {"thinking_tokens": 0}}
    assert stop == {"type": "message_stop"}
    await settled(world, requests=1, spent=6 * PRICE_IN + 4 * PRICE_IN // 2 + 2 * PRICE_OUT)


async def test_reasoning_text_and_calls_are_blocks_whole_and_streamed(world: World) -> None:
    parts = [Reasoning("H"), Reasoning("m."), Text("Look"), Text("ing.\u2028"), *CALL, Text("Done")]
    made = await blocks(world, *parts, tools=[TOOL], thinking={"type": "adaptive"})
    assert made == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "Looking.\u2028"},
        {"type": "tool_use", "id": "call_1", "name": "look", "input": {"a": 1}},
        {"type": "text", "text": "Done"},
    ]


@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}, {"type": "adaptive", "display": "omitted"}])
async def test_reasoning_that_is_not_asked_for_is_left_out_and_counted(world: World, thinking: Any) -> None:
    thought = [Reasoning("Hm.")] * (HIDDEN_PER_PING + 1)
    assert await blocks(world, *thought, Text("Yes"), thinking=thinking) == [{"type": "text", "text": "Yes"}]
    world.backends.play(replies(*thought, Text("Yes"), thought=len(thought)))
    answer = await send(world, stream=True, thinking=thinking)
    assert answer.text.count(PING.decode()) == 1, "the client learns that the reply goes on"
    usage = events_of(answer)[-2]["usage"]
    assert usage["output_tokens_details"] == {"thinking_tokens": len(thought)}
    assert usage["output_tokens"] == len(thought) + 1


CUT = [CallStarted(0, "call_1", "look"), CallArguments(0, '{"a": 1, "b": "x'), CallEnded(0, Ending.CUT)]
MALFORMED = [CallStarted(0, "call_1", "look"), CallArguments(0, '{"a": 1'), CallEnded(0, Ending.MALFORMED), Text("!")]


@pytest.mark.parametrize(
    ("parts", "reason", "stop", "expected"),
    [
        ([Text("a")], STOP, None, ("end_turn", None)),
        ([], STOP, None, ("end_turn", None)),
        ([Text("a")], STOP, "###", ("stop_sequence", "###")),
        ([Text("a")], LENGTH, None, ("max_tokens", None)),
        (CALL, STOP, None, ("tool_use", None)),
        (CALL, LENGTH, None, ("max_tokens", None)),
        (CUT, LENGTH, None, ("max_tokens", None)),
        (CUT, STOP, "x", ("max_tokens", None)),
        (MALFORMED, STOP, None, ("max_tokens", None)),
    ],
)
async def test_the_end_of_a_reply_has_its_reason(
    world: World, parts: list[Part], reason: FinishReason, stop: str | None, expected: tuple[str, str | None]
) -> None:
    world.backends.play(replies(*parts, reason=reason, stop=stop))
    whole = valid(await send(world, tools=[TOOL]))
    assert (whole["stop_reason"], whole["stop_sequence"]) == expected
    if any(part in parts for part in (CUT[0],)) and parts is not CALL:
        assert whole["content"][0]["input"] == {"a": 1}, "only values that are complete"
    end = events_of(await send(world, stream=True, tools=[TOOL]))[-2]["delta"]
    assert (end["stop_reason"], end["stop_sequence"]) == expected


async def test_a_stream_that_waits_sends_pings(make_world: Callable[..., Any]) -> None:
    world: World = await make_world(keep_alive_s=0.01)
    gate = asyncio.Event()
    world.backends.play([Started(10, 0), gate, Delta("a", 1), Finished(STOP, 10, 0, 1)])
    task = asyncio.create_task(send(world, stream=True))
    await until(lambda: world.backends.running)
    await asyncio.sleep(0.05)
    gate.set()
    answer = await task
    assert answer.text.startswith(PING.decode())
    assert events_of(answer)[0]["type"] == "message_start"


async def test_a_stream_that_fails_ends_with_an_error_event_and_what_was_sent_is_billed(world: World) -> None:
    world.backends.play([Started(10, 0), Delta("a", 1), RuntimeError("fault")])
    events = events_of(await send(world, stream=True))
    assert [event["type"] for event in events[-2:]] == ["content_block_delta", "error"]
    assert events[-1]["error"]["type"] == "api_error"
    await settled(world, requests=1, spent=price(10, 1))
    world.backends.play([Started(10, 0), Delta("a", 1), BackendUnavailable("gone")])
    assert events_of(await send(world, stream=True))[-1]["error"]["type"] == "overloaded_error"
    await settled(world, requests=2, spent=price(10, 1))


async def test_a_retry_with_an_idempotency_key_gets_the_same_reply_and_is_billed_once(world: World) -> None:
    headers = {"x-api-key": world.key, "idempotency-key": "k1"}
    first = await send(world, headers=headers)
    again = await send(world, headers=headers)
    assert (first.status_code, again.content) == (200, first.content)
    assert again.headers["idempotency-replayed"] == "true"
    await settled(world, requests=1, spent=price(10, 2))
    refused(await send(world, headers=headers, max_tokens=5), 400, "idempotency-key was used")


# Counting


async def test_a_count_asks_for_exactly_the_prompt_that_a_message_has(world: World) -> None:
    fields: dict[str, Any] = {
        "system": "Be brief.",
        "messages": CONVERSATION,
        "tools": [TOOL],
        "tool_choice": {"type": "tool", "name": "look"},
        "thinking": {"type": "adaptive"},
    }
    counted = await send(world, path="/v1/messages/count_tokens", **{**fields, "max_tokens": None})
    assert valid(counted, "/messages/count_tokens")["input_tokens"] > 10
    assert counted.headers["request-id"] == counted.headers["x-request-id"]
    assert (await send(world, **fields)).status_code == 200
    [(_, counting)], [call] = world.backends.token_calls, world.backends.calls
    for name in ("messages", "tools", "tool_choice", "function", "continue_final"):
        assert getattr(counting, name) == getattr(call, name)
    assert counting.only_count
    await settled(world, requests=1, spent=price(10, 2))


@pytest.mark.parametrize("path", ["/messages/count_tokens", "/tokenize"])
async def test_a_count_before_a_call_is_the_prompt_on_the_bill_after_it(
    world: World, model: ScriptedModel, path: str
) -> None:
    model.behind(world)
    if path == "/tokenize":
        tool = {"type": "function", "function": {"name": "look", "description": "é", "parameters": {"type": "object"}}}
        chat: dict[str, Any] = {"messages": [{"role": "system", "content": "Be brief."}, USER], "tools": [tool]}
        counted = (await send(world, path=path, **chat)).json()["count"]
        produced = (await send(world, path="/chat/completions", **chat)).json()["usage"]["completion_tokens"]
    else:
        fields: dict[str, Any] = {"system": "Be brief.", "messages": CONVERSATION, "tools": [TOOL]}
        counted = (await send(world, path=path, **fields)).json()["input_tokens"]
        usage = valid(await send(world, **fields))["usage"]
        assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]
        produced = usage["output_tokens"]
    assert counted > 20
    await settled(world, requests=1, spent=price(counted, produced))


async def test_a_count_is_free_and_a_lost_replica_is_told_in_the_format(world: World) -> None:
    _, poor = world.new_account(credit=0)
    free = await send(world, path="/messages/count_tokens", headers={"x-api-key": poor})
    assert free.json() == {"input_tokens": 2}
    world.backends.tokenized = BackendUnavailable("gone")
    refused(await send(world, path="/messages/count_tokens"), 529, "try again", "/messages/count_tokens")
    assert world.spent == 0
    assert world.balance == NANO
