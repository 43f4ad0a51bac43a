"""Reasoning through OpenAI's Python SDK, strict about types, of a scripted model: the bundled one does not reason."""

from __future__ import annotations

from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from tests.clients.served import Served
from tests.clients.ways import WAYS, Ask, asking


@pytest.fixture(params=WAYS)
def ask_capable(request: pytest.FixtureRequest, capable: Served, client: OpenAI, async_client: AsyncOpenAI) -> Ask:
    strict = {"_strict_response_validation": True}
    where: Any = {"api_key": capable.key, "base_url": capable.base_url, "_extra_kwargs": strict}
    return asking(request.param, client.with_options(**where), async_client.with_options(**where))


async def test_reasoning_comes_apart_from_the_answer_and_is_counted(ask_capable: Ask) -> None:
    reply = await ask_capable(messages=[{"role": "user", "content": "Think: what is 2 + 2?"}])
    [choice] = reply.choices
    assert choice.reasoning.strip() == "Twice two is four."
    assert choice.content.strip() == "4"
    assert choice.finish_reason == "stop"
    assert reply.usage.completion_tokens_details is not None
    reasoning = reply.usage.completion_tokens_details.reasoning_tokens
    assert reasoning is not None
    assert len("Twice two is four.") < reasoning < reply.usage.completion_tokens


async def test_a_reply_that_is_cut_while_it_reasons_has_no_answer(ask_capable: Ask) -> None:
    reply = await ask_capable(messages=[{"role": "user", "content": "Think: what is 2 + 2?"}], max_tokens=20)
    [choice] = reply.choices
    assert (choice.content, choice.finish_reason) == ("", "length")
    assert choice.reasoning.strip()
    details = reply.usage.completion_tokens_details
    assert details is not None
    assert details.reasoning_tokens == 20
