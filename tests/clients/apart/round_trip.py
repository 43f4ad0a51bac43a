"""LiteLLM and LlamaIndex: a tool call is streamed, its result goes back, and an answer comes.

SERVICE_URL and SERVICE_KEY name the service. With FORCED=1 the call is forced, as a small model needs it; without, the
model chooses to call.
"""

import json
import os
from typing import Any, Literal

import litellm
import pytest
from llama_index.core.base.llms.types import ChatMessage, ToolCallBlock
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

URL, KEY = os.environ["SERVICE_URL"], os.environ["SERVICE_KEY"]
FORCED = bool(os.environ.get("FORCED"))
ASKED = "What is the weather in Paris?"
SUNNY = "Sunny, 21 degrees."


def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather in a city."""
    assert city in ("Paris", "Rome")
    return SUNNY


WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
        },
    },
}


LITELLM: dict[str, Any] = {
    "model": "openai/svc-chat",
    "api_base": URL,
    "api_key": KEY,
    "tools": [WEATHER],
    "temperature": 0,
    "num_retries": 0,
}
CALLS: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False} if FORCED else {}
ANSWERS: dict[str, Any] = {"tool_choice": "none", "max_tokens": 30} if FORCED else {}


def test_litellm_streams_a_call_and_gets_an_answer_for_its_result() -> None:
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    chunks = list(litellm.completion(messages=messages, stream=True, **CALLS, **LITELLM))
    called = litellm.stream_chunk_builder(chunks, messages=messages)
    assert called.choices[0].finish_reason == "tool_calls"
    [call] = called.choices[0].message.tool_calls
    arguments = json.loads(call.function.arguments)
    told = {"role": "tool", "tool_call_id": call.id, "content": get_weather(**arguments)}
    messages += [called.choices[0].message, told]
    stream = litellm.completion(
        messages=messages, stream=True, stream_options={"include_usage": True}, **ANSWERS, **LITELLM
    )
    answered = litellm.stream_chunk_builder(list(stream), messages=messages)
    assert answered.choices[0].message.content
    assert not answered.choices[0].message.tool_calls
    assert answered.usage.prompt_tokens > 20


async def test_litellm_streams_a_call_async() -> None:
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    stream = await litellm.acompletion(messages=messages, stream=True, **CALLS, **LITELLM)
    called = litellm.stream_chunk_builder([chunk async for chunk in stream], messages=messages)
    [call] = called.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


def test_litellm_maps_refusals_to_its_own_errors() -> None:
    given = {**LITELLM, "messages": [{"role": "user", "content": "Hi"}]}
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**{**given, "api_key": "sk-nonsense"})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**{**given, "messages": [{"role": "user", "content": "harbour " * 40_000}]})


@pytest.fixture
def llama_index() -> OpenAILike:
    return OpenAILike(
        model="svc-chat",
        api_base=URL,
        api_key=KEY,
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=32768,
        max_tokens=200,
        temperature=0,
        max_retries=0,
    )


def called_by(message: ChatMessage) -> list[ToolCallBlock]:
    return [block for block in message.blocks if isinstance(block, ToolCallBlock)]


def test_llama_index_streams_a_call_and_gets_an_answer_for_its_result(llama_index: OpenAILike) -> None:
    tool = FunctionTool.from_defaults(get_weather)
    asked = ChatMessage(role="user", content=ASKED)
    *_, last = llama_index.stream_chat_with_tools(
        [tool], chat_history=[asked], tool_required=FORCED, allow_parallel_tool_calls=False
    )
    [call] = llama_index.get_tool_calls_from_response(last)
    assert call.tool_name == "get_weather"
    result = tool(**call.tool_kwargs)
    told = ChatMessage(role="tool", content=result.content, additional_kwargs={"tool_call_id": call.tool_id})
    conversation = [asked, last.message, told]
    *_, answered = llama_index.stream_chat(conversation)
    assert answered.message.content
    assert not called_by(answered.message)


async def test_llama_index_streams_text_async(llama_index: OpenAILike) -> None:
    pieces = [
        piece.delta async for piece in await llama_index.astream_chat([ChatMessage(role="user", content="Hello")])
    ]
    assert len([piece for piece in pieces if piece]) > 1
