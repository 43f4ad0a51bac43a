"""Many streams at once, clients that go away, and long prompts."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest

from tests.service.harness import FRANCE, Service, charge, nano, until

pytestmark = pytest.mark.service


async def read(service: Service, key: str, number: int) -> tuple[str, Any]:
    """Text and usage of one whole stream."""
    async with service.async_client(key) as client:
        stream = await client.chat.completions.create(
            model="svc-chat",
            messages=[{"role": "user", "content": f"Write a sentence about the number {number}."}],
            stream=True,
            stream_options={"include_usage": True},
            max_tokens=24,
            seed=number,
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
    assert all(text and "�" not in text for text, _ in replies)
    view = account.settled(32)
    assert before - nano(view["balance"]) == sum(charge(usage) for _, usage in replies)
    assert view["usage"]["completion_tokens"] == sum(usage.completion_tokens for _, usage in replies)


def test_a_client_that_is_killed_frees_its_slot_and_pays_for_what_was_produced(service: Service) -> None:
    account = service.account("gone", concurrency=1)
    stream = account.client().chat.completions.create(
        model="svc-chat", messages=FRANCE, stream=True, max_tokens=4000, extra_body={"ignore_eos": True}
    )
    received = 0
    for chunk in stream:
        received += bool(chunk.choices[0].delta.content)
        if received == 5:
            break
    stream.response.close()
    # The slot is free again although the reply had thousands of tokens to go.
    until(lambda: service.chat(account.key, max_tokens=1).status_code == 200, 10)
    view = account.settled(2)
    produced = view["usage"]["completion_tokens"] - 1
    assert 5 <= produced < 200
    assert nano("5") - nano(view["balance"]) == nano(view["usage"]["charged"]) == charge(view["usage"])


@pytest.mark.slow
def test_a_client_that_hangs_up_without_streaming_stops_the_model_too(service: Service) -> None:
    account = service.account("gone, whole", concurrency=1)
    for attempt in range(1, 6):  # HAProxy keeps some of these hang-ups to itself, not all
        with pytest.raises(httpx.TimeoutException):
            # Gives up before the reply has begun: from then on its line feeds would keep it waiting.
            service.chat(account.key, max_tokens=4000, ignore_eos=True, temperature=1, timeout=0.7)
        view = account.settled(attempt, 10)
    usage = view["usage"]
    assert usage["completion_tokens"] < attempt * 2000  # of 4000 each
    assert nano("5") - nano(view["balance"]) == nano(usage["charged"]) == charge(usage)


@pytest.mark.slow
def test_a_long_reply_that_is_not_streamed_is_begun_early_and_reads_the_same(service: Service) -> None:
    account = service.account("long, whole")
    answer = service.chat(account.key, max_tokens=800, ignore_eos=True, temperature=1, seed=7)
    assert answer.status_code == 200
    assert "content-length" not in answer.headers
    assert answer.content.startswith(b"\n")
    assert answer.json()["usage"]["completion_tokens"] == 800
    reply = account.client().chat.completions.create(
        model="svc-chat", messages=FRANCE, max_tokens=800, temperature=1, seed=7, extra_body={"ignore_eos": True}
    )
    assert reply.choices[0].message.content
    assert reply.usage.completion_tokens == 800
    view = account.settled(2)
    assert nano("5") - nano(view["balance"]) == charge(view["usage"])


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("tokens", [9_000])
def test_a_long_prompt_is_answered_and_counted_right(service: Service, tokens: int) -> None:
    account = service.account(f"long {tokens}")
    filler = "The harbour was quiet and the boats lay still in the evening light. "
    each = service.reply_tokens(filler * 2) - service.reply_tokens(filler)
    content = filler * (tokens // each)
    messages = [{"role": "user", "content": content + "\nName the capital of France."}]
    assert abs(service.prompt_tokens(messages) - tokens) < 200
    started = time.monotonic()
    stream = account.client(timeout=300).chat.completions.create(
        model="svc-chat",
        messages=messages,
        temperature=0,
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    print(f"{tokens} tokens: {time.monotonic() - started:.1f} s")
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens == service.prompt_tokens(messages)
    assert 1 <= usage.completion_tokens <= 8
    view = account.settled(1)
    assert nano("5") - nano(view["balance"]) == charge(usage)


def test_a_waiting_stream_is_kept_alive_with_whole_comment_frames(service: Service) -> None:
    account = service.account("keep alive")
    content = "The harbour was quiet and the boats lay still in the evening light. " * 240  # read for seconds
    with service.http.stream(
        "POST",
        "/chat/completions",
        json={"model": "svc-chat", "messages": [{"role": "user", "content": content}], "max_tokens": 1, "stream": True},
        headers={"authorization": f"Bearer {account.key}"},
    ) as answer:
        assert answer.status_code == 200
        frames = answer.read().decode().split("\n\n")
    assert frames[0] == ": keep-alive"
    assert all(frame.startswith(("data: ", ": keep-alive")) for frame in frames if frame)
    assert frames[-2] == "data: [DONE]"
