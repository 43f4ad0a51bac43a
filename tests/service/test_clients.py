"""Clients over the real service, behind its proxy: what tests/clients proves for one process holds for all of them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import pytest
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel

from tests.clients.apart import NODE
from tests.clients.ways import Ask, asking
from tests.service.harness import FRANCE, Service, charge, nano

pytestmark = pytest.mark.service

WAYS = (pytest.param("whole", marks=pytest.mark.slow), "streamed, async")


class GetWeather(BaseModel):
    """The weather of the coming days."""

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


WEATHER: Any = pydantic_function_tool(GetWeather)


@pytest.fixture
def client(service: Service) -> Iterator[OpenAI]:
    with service.client(_strict_response_validation=True) as made:
        yield made


@pytest.fixture(params=WAYS)
async def ask(request: pytest.FixtureRequest, service: Service, client: OpenAI) -> AsyncIterator[Ask]:
    async with service.async_client(_strict_response_validation=True) as async_client:
        yield asking(request.param, client, async_client)


async def test_several_choices_have_their_tokens_and_the_prompt_is_counted_once(service: Service, ask: Ask) -> None:
    reply = await ask(messages=FRANCE, n=3, seed=5, logprobs=True, top_logprobs=2, max_tokens=8)
    assert len(reply.choices) == 3
    assert reply.usage.prompt_tokens == service.prompt_tokens(FRANCE)
    for choice in reply.choices:
        assert b"".join(bytes(token.bytes or ()) for token in choice.tokens) == choice.content.encode()


async def test_a_forced_call_comes_and_its_result_goes_back(ask: Ask) -> None:
    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    tools = {"tools": [WEATHER], "temperature": 1.2, "seed": 2}
    [choice] = (await ask(messages=asked, tool_choice="required", parallel_tool_calls=False, **tools)).choices
    [call] = choice.calls
    assert choice.finish_reason == "tool_calls"
    GetWeather.model_validate_json(call.arguments)
    said = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    told = {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}
    messages = [*asked, {"role": "assistant", "content": None, "tool_calls": [said]}, told]
    answered = await ask(messages=messages, tool_choice="none", max_tokens=20, **tools)
    assert answered.content


def test_choices_of_one_request_are_billed_as_their_usage_says(service: Service) -> None:
    account = service.account("choices")
    before = account.nano
    reply = account.client().chat.completions.create(model="svc-chat", messages=FRANCE, n=4, max_tokens=6, seed=1)
    assert before - nano(account.settled(1)["balance"]) == charge(reply.usage)
    assert reply.usage.prompt_tokens == service.prompt_tokens(FRANCE)


@pytest.mark.slow
def test_a_parsed_reply_is_of_the_class_that_was_asked_for(client: OpenAI) -> None:
    reply = client.chat.completions.parse(
        model="svc-chat",
        messages=[{"role": "user", "content": "The weather of Rome for 2 days, as JSON."}],
        response_format=GetWeather,
        temperature=1.2,
        seed=1,
    )
    assert isinstance(reply.choices[0].message.parsed, GetWeather)


@pytest.mark.slow
@pytest.mark.parametrize("file", ["core.test.js", "formats.test.js"])
def test_the_sdks_for_node_pass_their_core_cases(service: Service, file: str) -> None:
    node = shutil.which("node")
    if node is None or not (NODE / "node_modules").exists():
        pytest.skip("`make test` installs the SDKs for Node where there is npm")
    keys = {
        "SERVICE_KEY": service.account("node").key,
        "EMPTY_KEY": service.account("node, empty", credit=None).key,
        "SLOW_KEY": service.account("node, slow", rpm=1).key,
    }
    done = subprocess.run(
        [node, "--test", file],
        env={**os.environ, "SERVICE_URL": f"{service.base_url}/v1", **keys},
        cwd=NODE,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
