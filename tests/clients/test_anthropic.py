"""The Anthropic SDK against the Messages format: its own types validate every reply and every event of a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

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
from tests.gateway.conftest import fast, make_world, world
from tests.gateway.connections import served
from tests.gateway.world import World

anthropic = pytest.importorskip("anthropic", reason="anthropic is not in the test environment")

__all__ = ["fast", "make_world", "world"]

QUESTION: dict[str, Any] = {"model": "svc-chat", "max_tokens": 100, "messages": [{"role": "user", "content": "Hi"}]}
TOOL: dict[str, Any] = {"name": "look", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALL = [CallStarted(0, "call_1", "look"), CallArguments(0, '{"a"'), CallArguments(0, ": 1}"), CallEnded(0)]
CUT = [CallStarted(0, "call_1", "look"), CallArguments(0, '{"a": 1, "b": "x'), CallEnded(0, Ending.CUT)]
MALFORMED = [CallStarted(0, "call_1", "look"), CallArguments(0, '{"a": 1'), CallEnded(0, Ending.MALFORMED), Text("!")]
REPLIES: dict[str, tuple[list[Part], FinishReason, str | None]] = {
    "text": ([Text("Hel"), Text("lo")], FinishReason.STOP, None),
    "nothing": ([], FinishReason.STOP, None),
    "cut text": ([Text("Hello")], FinishReason.LENGTH, None),
    "a stop sequence": ([Text("Hello")], FinishReason.STOP, "###"),
    "reasoning": ([Reasoning("H"), Reasoning("m."), Text("Yes")], FinishReason.STOP, None),
    "only reasoning": ([Reasoning("Hm.")], FinishReason.LENGTH, None),
    "a call": ([Reasoning("Hm."), Text("Look"), *CALL], FinishReason.STOP, None),
    "two calls": (
        [*CALL, CallStarted(1, "call_2", "look"), CallArguments(1, "{}"), CallEnded(1)],
        FinishReason.STOP,
        None,
    ),
    "a cut call": (CUT, FinishReason.LENGTH, None),
    "a malformed call": (list(MALFORMED), FinishReason.STOP, None),
}


@pytest.fixture
async def client(world: World) -> AsyncIterator[Any]:
    """The SDK with strict validation: it rejects replies that do not fit its types."""
    async with (
        served(world) as port,
        anthropic.AsyncAnthropic(
            base_url=f"http://127.0.0.1:{port}", api_key=world.key, max_retries=0, _strict_response_validation=True
        ) as made,
    ):
        yield made


def script(parts: list[Part], reason: FinishReason, stop: str | None) -> list[Any]:
    events = [ReplyParts((part,), number) for number, part in enumerate(parts, start=1)]
    return [Started(10, 4), *events, Finished(reason, 10, 4, len(parts), None, stop)]


@pytest.mark.parametrize(("parts", "reason", "stop"), REPLIES.values(), ids=REPLIES)
async def test_a_streamed_reply_adds_up_to_the_whole_one(
    world: World, client: Any, parts: list[Part], reason: FinishReason, stop: str | None
) -> None:
    fields = {**QUESTION, "tools": [TOOL], "thinking": {"type": "adaptive"}}
    world.backends.play(script(parts, reason, stop))
    whole = await client.messages.create(**fields)
    events = [event async for event in await client.messages.create(**fields, stream=True)]
    assert (events[0].type, events[-1].type) == ("message_start", "message_stop")
    assert events[0].message.usage.input_tokens == 6
    async with client.messages.stream(**fields) as stream:
        async for _ in stream:
            pass
        last = await stream.get_final_message()
    for made in (whole, last):
        assert made.id.startswith("msg_")
        assert (made.usage.input_tokens, made.usage.cache_read_input_tokens) == (6, 4)
        assert made.usage.output_tokens == len(parts)
        assert made.stop_sequence == stop
    assert [block.model_dump(exclude_none=True) for block in last.content] == [
        block.model_dump(exclude_none=True) for block in whole.content
    ]
    assert last.stop_reason == whole.stop_reason


async def test_a_key_can_be_a_bearer_token(world: World) -> None:
    async with (
        served(world) as port,
        anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{port}", auth_token=world.key) as client,
    ):
        assert (await client.messages.create(**QUESTION)).content[0].text == "Hello world"


async def test_a_count_is_an_integer_of_the_sdk(client: Any) -> None:
    counted = await client.messages.count_tokens(model="svc-chat", messages=QUESTION["messages"], tools=[TOOL])
    assert counted.input_tokens == 2


async def test_errors_are_the_sdks_classes(world: World, client: Any) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature must be from 0 to 1") as refused:
        await client.messages.create(**QUESTION, extra_body={"temperature": 2})
    assert refused.value.request_id
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(**{**QUESTION, "model": "claude"})
    with pytest.raises(anthropic.AuthenticationError):
        await client.with_options(api_key="wrong").messages.create(**QUESTION)
    world.backends.play([Rejected(Rejection.CONTEXT, 40_000, 32_768)])
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 40000 tokens > 32767 maximum"):
        await client.messages.create(**QUESTION)
    world.backends.play([Started(10, 0), Delta("a", 1), BackendUnavailable("gone")])
    with pytest.raises(anthropic.APIStatusError) as failed:
        async for _ in await client.messages.create(**QUESTION, stream=True):
            pass
    assert failed.value.body["error"]["type"] == "overloaded_error"
