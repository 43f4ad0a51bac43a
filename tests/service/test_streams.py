"""Many streams at once, clients that go away, and long prompts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.service.harness import HELD, Service, charge, nano, until
from tests.service.replies import reply

pytestmark = pytest.mark.service


async def read(service: Service, key: str, number: int) -> tuple[str, Any]:
    """Text and usage of one whole stream."""
    async with service.async_client(key) as client:
        stream = await client.chat.completions.create(
            model="svc-chat",
            messages=[{"role": "user", "content": f"Write a sentence about the number {number}."}],
            stream=True,
            stream_options={"include_usage": True},
            max_tokens=4,
            temperature=0,
        )
        text, usage = "", None
        async for chunk in stream:
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
            usage = chunk.usage or usage
        assert usage is not None
        return text, usage


async def test_32_streams_at_once_all_finish_and_are_billed_exactly(service: Service) -> None:
    account = service.account("many")
    before = account.nano
    replies = await asyncio.gather(*(read(service, account.key, number) for number in range(32)))
    assert all(text for text, _ in replies)
    view = account.settled(32)
    assert before - nano(view["balance"]) == sum(charge(usage) for _, usage in replies)
    assert view["usage"]["completion_tokens"] == sum(usage.completion_tokens for _, usage in replies)


def test_a_client_that_is_killed_frees_its_slot_and_pays_for_what_was_produced(service: Service) -> None:
    account = service.account("gone", concurrency=1)
    with service.hold(after=5) as hold:
        stream = account.client().chat.completions.create(
            model=HELD, messages=hold.messages, stream=True, max_tokens=100
        )
        received = ""
        for chunk in stream:
            received += chunk.choices[0].delta.content or ""
            if received == reply(5):
                break
        stream.response.close()
        # The slot is free again although the reply has not ended.
        until(lambda: service.chat(account.key, model=HELD, max_tokens=1).status_code == 200)
        view = account.settled(2)
    assert view["usage"]["completion_tokens"] == 5 + 1
    assert nano("5") - nano(view["balance"]) == nano(view["usage"]["charged"]) == charge(view["usage"])


@pytest.mark.slow
def test_a_client_that_hangs_up_without_streaming_stops_the_model_too(service: Service) -> None:
    account = service.account("gone, whole", concurrency=1)
    body: dict[str, Any] = {"model": HELD, "max_tokens": 100}
    headers = {"authorization": f"Bearer {account.key}"}
    with service.hold(after=5) as hold:
        body["messages"] = hold.messages
        with service.http.stream("POST", "/chat/completions", json=body, headers=headers) as answer:
            assert answer.status_code == 200  # the reply has begun, with a line feed
            hold.reached()
        view = account.settled(1)
    assert view["usage"]["completion_tokens"] == 5
    assert nano("5") - nano(view["balance"]) == nano(view["usage"]["charged"]) == charge(view["usage"])


def test_a_long_reply_that_is_not_streamed_is_begun_early_and_reads_the_same(service: Service) -> None:
    account = service.account("long, whole")
    with service.hold() as hold:
        body = {"model": HELD, "messages": hold.messages, "max_tokens": 20}
        with service.http.stream(
            "POST", "/chat/completions", json=body, headers={"authorization": f"Bearer {account.key}"}
        ) as answer:
            assert answer.status_code == 200
            assert "content-length" not in answer.headers
            assert answer.headers["content-type"] == "application/json"
            pieces = answer.iter_raw()
            assert next(pieces).startswith(b"\n")
            hold.release()
            rest = b"".join(pieces)
    assert reply(20).encode() in rest
    view = account.settled(1)
    assert nano("5") - nano(view["balance"]) == charge(view["usage"])


@pytest.mark.slow
@pytest.mark.long
def test_a_long_prompt_is_answered_and_counted_right(service: Service) -> None:
    account = service.account("long prompt, 9000")
    tokens = 9_000
    filler = "The harbour was quiet and the boats lay still in the evening light. "
    each = service.reply_tokens(filler * 2) - service.reply_tokens(filler)
    content = filler * (tokens // each)
    messages = [{"role": "user", "content": content + "\nName the capital of France."}]
    assert abs(service.prompt_tokens(messages) - tokens) < 200
    stream = account.client(timeout=1200).chat.completions.create(
        model="svc-chat",
        messages=messages,
        temperature=0,
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens == service.prompt_tokens(messages)
    assert 1 <= usage.completion_tokens <= 8
    view = account.settled(1)
    assert nano("5") - nano(view["balance"]) == charge(usage)


def test_a_waiting_stream_is_kept_alive_with_whole_comment_frames(service: Service) -> None:
    account = service.account("keep alive")
    with (
        service.hold(after=0) as hold,
        service.http.stream(
            "POST",
            "/chat/completions",
            json={"model": HELD, "messages": hold.messages, "max_tokens": 1, "stream": True},
            headers={"authorization": f"Bearer {account.key}"},
        ) as answer,
    ):
        assert answer.status_code == 200
        pieces = answer.iter_text()
        text = next(pieces)
        hold.release()
        frames = (text + "".join(pieces)).split("\n\n")
    assert frames[0] == ": keep-alive"
    assert all(frame.startswith(("data: ", ": keep-alive")) for frame in frames if frame)
    assert frames[-2] == "data: [DONE]"
