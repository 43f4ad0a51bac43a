"""One conversation in the format of each door, sent by the SDK that its users have, and the reply as one value."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal, Protocol

import anthropic
import openai
from anthropic import AsyncAnthropic
from anthropic.types import Message as AnthropicMessage
from anthropic.types import RawMessageStreamEvent
from openai import AsyncOpenAI
from openai.types import Completion
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseOutputMessage, ResponseStreamEvent
from pydantic import BaseModel

from tests.clients import ways


@dataclass(frozen=True)
class System:
    text: str


@dataclass(frozen=True)
class User:
    text: str


@dataclass(frozen=True)
class Call:
    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Result:
    call_id: str
    text: str


Turn = System | User | Call | Result


@dataclass(frozen=True)
class Tool:
    name: str
    parameters: dict[str, Any]
    strict: bool = True


@dataclass(frozen=True)
class Question:
    """`tool_choice` is the name of a tool, `any` for at least one call, or `auto` or `none`."""

    turns: Sequence[Turn]
    tools: Sequence[Tool] = ()
    tool_choice: str = "auto"
    model: str = "svc-chat"
    max_tokens: int = 60
    temperature: float = 0.0
    more: dict[str, Any] = field(default_factory=dict)  # in the words of the format


@dataclass(frozen=True)
class Answer:
    text: str
    calls: tuple[Call, ...]
    end: Literal["stop", "length", "calls"]
    prompt_tokens: int
    output_tokens: int


class Format(Protocol):
    """The client has the key; `errors` is the module with its exceptions."""

    name: str
    errors: ModuleType
    has_tools: bool

    async def whole(self, question: Question) -> Answer: ...

    async def streamed(self, question: Question) -> Answer: ...

    async def begun(self, question: Question) -> Any:
        """Returns a stream whose first text has come, to be closed."""

    def with_key(self, key: str, retries: int = 0) -> Format: ...

    async def parsed(self, question: Question, kind: type[BaseModel]) -> BaseModel | None:
        """Returns a reply of a class, by the SDK's own helper."""


class Chat:
    name = "chat"
    errors = openai
    has_tools = True

    def __init__(self, client: AsyncOpenAI) -> None:
        self._client = client

    def with_key(self, key: str, retries: int = 0) -> Chat:
        return Chat(_another_openai(self._client, key, retries))

    async def whole(self, question: Question) -> Answer:
        return self._answer(ways.whole(await self._client.chat.completions.create(**self._body(question))))

    async def streamed(self, question: Question) -> Answer:
        body = {**self._body(question), "stream": True, "stream_options": {"include_usage": True}}
        return self._answer(ways.joined([chunk async for chunk in await self._client.chat.completions.create(**body)]))

    async def begun(self, question: Question) -> Any:
        stream = await self._client.chat.completions.create(**self._body(question), stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                return stream
        raise AssertionError("no text came")

    async def parsed(self, question: Question, kind: type[BaseModel]) -> BaseModel | None:
        reply = await self._client.chat.completions.parse(**self._body(question), response_format=kind)
        return reply.choices[0].message.parsed

    def _body(self, question: Question) -> dict[str, Any]:
        messages: list[dict[str, Any]] = []
        for turn in question.turns:
            match turn:
                case System(text):
                    messages.append({"role": "system", "content": text})
                case User(text):
                    messages.append({"role": "user", "content": text})
                case Call(id, name, arguments):
                    call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
                    messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
                case Result(call_id, text):
                    messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
        tools = [
            {
                "type": "function",
                "function": {"name": tool.name, "parameters": tool.parameters, "strict": tool.strict},
            }
            for tool in question.tools
        ]
        choice = {"any": "required", "auto": "auto", "none": "none"}.get(
            question.tool_choice, {"type": "function", "function": {"name": question.tool_choice}}
        )
        return {
            "model": question.model,
            "messages": messages,
            "max_tokens": question.max_tokens,
            "temperature": question.temperature,
            **({"tools": tools, "tool_choice": choice} if tools else {}),
            **question.more,
        }

    def _answer(self, reply: ways.Reply) -> Answer:
        [choice] = reply.choices
        ends: dict[str, Literal["stop", "length", "calls"]] = {
            "stop": "stop",
            "length": "length",
            "tool_calls": "calls",
        }
        calls = tuple(Call(call.id, call.name, call.arguments) for call in choice.calls)
        usage = reply.usage
        return Answer(choice.content, calls, ends[choice.finish_reason], usage.prompt_tokens, usage.completion_tokens)


class Responses:
    name = "responses"
    errors = openai
    has_tools = True

    def __init__(self, client: AsyncOpenAI) -> None:
        self._client = client

    def with_key(self, key: str, retries: int = 0) -> Responses:
        return Responses(_another_openai(self._client, key, retries))

    async def whole(self, question: Question) -> Answer:
        return self._answer(await self._client.responses.create(**self._body(question)))

    async def streamed(self, question: Question) -> Answer:
        stream = await self._client.responses.create(**self._body(question), stream=True)
        return self._answer(response_of([event async for event in stream]))

    async def begun(self, question: Question) -> Any:
        stream = await self._client.responses.create(**self._body(question), stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                return stream
        raise AssertionError("no text came")

    async def parsed(self, question: Question, kind: type[BaseModel]) -> BaseModel | None:
        return (await self._client.responses.parse(**self._body(question), text_format=kind)).output_parsed

    async def counted(self, question: Question) -> int:
        body = self._body(question)
        fields = {name: body[name] for name in ("model", "input", "tools", "tool_choice") if name in body}
        return (await self._client.responses.input_tokens.count(**fields)).input_tokens

    def _body(self, question: Question) -> dict[str, Any]:
        items: list[dict[str, Any]] = []
        for turn in question.turns:
            match turn:
                case System(text):
                    items.append({"role": "system", "content": text})
                case User(text):
                    items.append({"role": "user", "content": [{"type": "input_text", "text": text}]})
                case Call(id, name, arguments):
                    items.append({"type": "function_call", "call_id": id, "name": name, "arguments": arguments})
                case Result(call_id, text):
                    items.append({"type": "function_call_output", "call_id": call_id, "output": text})
        tools = [
            {"type": "function", "name": tool.name, "parameters": tool.parameters, "strict": tool.strict}
            for tool in question.tools
        ]
        choice = {"any": "required", "auto": "auto", "none": "none"}.get(
            question.tool_choice, {"type": "function", "name": question.tool_choice}
        )
        return {
            "model": question.model,
            "input": items,
            "max_output_tokens": question.max_tokens,
            "temperature": question.temperature,
            "store": False,
            **({"tools": tools, "tool_choice": choice} if tools else {}),
            **question.more,
        }

    def _answer(self, reply: Response) -> Answer:
        assert reply.object == "response"
        assert reply.usage is not None
        assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens
        calls = tuple(
            Call(item.call_id, item.name, item.arguments)
            for item in reply.output
            if isinstance(item, ResponseFunctionToolCall)
        )
        if reply.status == "incomplete":
            assert reply.incomplete_details is not None
            assert reply.incomplete_details.reason == "max_output_tokens"
        else:
            assert reply.status == "completed"
        end: Literal["stop", "length", "calls"] = (
            "length" if reply.status == "incomplete" else "calls" if calls else "stop"
        )
        return Answer(reply.output_text, calls, end, reply.usage.input_tokens, reply.usage.output_tokens)


def response_of(events: Sequence[ResponseStreamEvent]) -> Response:
    """Returns the reply at the end of a stream. Fails if the events before it do not tell the same."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    texts: dict[tuple[str, int], str] = {}
    arguments: dict[str, str] = {}
    items: list[Any] = []
    open_items: set[int] = set()
    for event in events:
        if event.type == "response.output_item.added":
            assert event.output_index == len(items)
            items.append(event.item)
            open_items.add(event.output_index)
        elif event.type == "response.content_part.added":
            assert event.item_id == items[event.output_index].id
            texts[event.item_id, event.content_index] = ""
        elif event.type == "response.output_text.delta":
            texts[event.item_id, event.content_index] += event.delta
        elif event.type == "response.output_text.done":
            assert event.text == texts[event.item_id, event.content_index]
        elif event.type == "response.function_call_arguments.delta":
            arguments[event.item_id] = arguments.get(event.item_id, "") + event.delta
        elif event.type == "response.function_call_arguments.done":
            assert event.arguments == arguments.get(event.item_id, "")
        elif event.type == "response.output_item.done":
            open_items.remove(event.output_index)
            items[event.output_index] = event.item
    assert not open_items
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert [item.model_dump() for item in last.response.output] == [item.model_dump() for item in items]
    for item in last.response.output:
        if isinstance(item, ResponseOutputMessage):
            for index, part in enumerate(item.content):
                assert part.type == "output_text"
                assert part.text == texts[item.id, index]
        elif isinstance(item, ResponseFunctionToolCall):
            assert item.id is not None
            assert item.arguments == arguments[item.id]
    return last.response


class Messages:
    name = "messages"
    errors = anthropic
    has_tools = True

    def __init__(self, client: AsyncAnthropic) -> None:
        self._client = client

    def with_key(self, key: str, retries: int = 0) -> Messages:
        return Messages(
            self._client.with_options(
                api_key=key, max_retries=retries, _extra_kwargs={"_strict_response_validation": True}
            )
        )

    async def whole(self, question: Question) -> Answer:
        return self._answer(await self._client.messages.create(**self._body(question)))

    async def streamed(self, question: Question) -> Answer:
        stream = await self._client.messages.create(**self._body(question), stream=True)
        return self._answer(message_of([event async for event in stream]))

    async def begun(self, question: Question) -> Any:
        stream = await self._client.messages.create(**self._body(question), stream=True)
        async for event in stream:
            if event.type == "content_block_delta" and event.delta.type == "text_delta":
                return stream
        raise AssertionError("no text came")

    async def parsed(self, question: Question, kind: type[BaseModel]) -> BaseModel | None:
        return (await self._client.messages.parse(**self._body(question), output_format=kind)).parsed_output

    async def counted(self, question: Question) -> int:
        body = self._body(question)
        fields = {name: body[name] for name in ("model", "messages", "system", "tools", "tool_choice") if name in body}
        return (await self._client.messages.count_tokens(**fields)).input_tokens

    def _body(self, question: Question) -> dict[str, Any]:
        system: list[dict[str, Any]] = []
        messages: list[dict[str, Any]] = []
        for turn in question.turns:
            match turn:
                case System(text):
                    system.append({"type": "text", "text": text})
                case User(text):
                    messages.append({"role": "user", "content": text})
                case Call(id, name, arguments):
                    block: dict[str, Any] = {"type": "tool_use", "id": id, "name": name, "input": json.loads(arguments)}
                    messages.append({"role": "assistant", "content": [block]})
                case Result(call_id, text):
                    block = {"type": "tool_result", "tool_use_id": call_id, "content": text}
                    messages.append({"role": "user", "content": [block]})
        tools = [
            {"name": tool.name, "input_schema": tool.parameters, **({"strict": True} if tool.strict else {})}
            for tool in question.tools
        ]
        choice = (
            {"type": question.tool_choice}
            if question.tool_choice in ("any", "auto", "none")
            else {"type": "tool", "name": question.tool_choice}
        )
        return {
            "model": question.model,
            "messages": messages,
            "max_tokens": question.max_tokens,
            **({"system": system} if system else {}),
            **({"tools": tools, "tool_choice": choice} if tools else {}),
            # The SDK has no arguments for sampling any more.
            "extra_body": {"temperature": question.temperature, **question.more},
        }

    def _answer(self, reply: AnthropicMessage) -> Answer:
        assert (reply.type, reply.role) == ("message", "assistant")
        ends: dict[str | None, Literal["stop", "length", "calls"]] = {
            "end_turn": "stop",
            "stop_sequence": "stop",
            "max_tokens": "length",
            "tool_use": "calls",
        }
        calls = tuple(
            Call(block.id, block.name, json.dumps(block.input)) for block in reply.content if block.type == "tool_use"
        )
        text = "".join(block.text for block in reply.content if block.type == "text")
        usage = reply.usage
        prompt = usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
        return Answer(text, calls, ends[reply.stop_reason], prompt, usage.output_tokens)


def message_of(events: Sequence[RawMessageStreamEvent]) -> AnthropicMessage:
    """Returns the message that a stream builds. Fails if its events are not in order."""
    first, *body, last = [event for event in events if str(event.type) != "ping"]
    assert first.type == "message_start"
    assert last.type == "message_stop"
    message = first.message.model_dump()
    assert message["content"] == []
    assert message["stop_reason"] is None
    is_open, inputs = False, ""
    for event in body:
        if event.type == "content_block_start":
            assert not is_open
            assert event.index == len(message["content"])
            is_open, inputs = True, ""
            message["content"].append(event.content_block.model_dump())
        elif event.type == "content_block_delta":
            assert is_open
            assert event.index == len(message["content"]) - 1
            block = message["content"][-1]
            if event.delta.type == "text_delta":
                block["text"] += event.delta.text
            elif event.delta.type == "thinking_delta":
                block["thinking"] += event.delta.thinking
            elif event.delta.type == "input_json_delta":
                inputs += event.delta.partial_json
        elif event.type == "content_block_stop":
            assert is_open
            is_open = False
            if message["content"][-1]["type"] == "tool_use":
                message["content"][-1]["input"] = json.loads(inputs or "{}")
        elif event.type == "message_delta":
            assert not is_open
            message["stop_reason"] = event.delta.stop_reason
            message["stop_sequence"] = event.delta.stop_sequence
            told = event.usage.model_dump(exclude_none=True)
            message["usage"].update(told)
    return AnthropicMessage.model_validate(message)


class Completions:
    """The prompt is the last turn's text, as it is."""

    name = "completions"
    errors = openai
    has_tools = False

    def __init__(self, client: AsyncOpenAI) -> None:
        self._client = client

    def with_key(self, key: str, retries: int = 0) -> Completions:
        return Completions(_another_openai(self._client, key, retries))

    async def whole(self, question: Question) -> Answer:
        return self._answer(await self._client.completions.create(**self._body(question)))

    async def streamed(self, question: Question) -> Answer:
        stream = await self._stream(question, stream_options={"include_usage": True})
        *body, last = [chunk async for chunk in stream]
        assert not last.choices
        for chunk in body:
            assert (chunk.object, chunk.id) == ("text_completion", last.id)
            fields = chunk.model_dump()
            fields["choices"] = [{**choice, "finish_reason": "stop"} for choice in fields["choices"]]
            Completion.model_validate(fields)
        ended = body[-1].choices[0]
        assert [chunk.choices[0].finish_reason for chunk in body[:-1]] == [None] * len(body[:-1])
        ended.text = "".join(choice.text for chunk in body for choice in chunk.choices)
        return self._answer(last.model_copy(update={"choices": [ended]}))

    async def _stream(self, question: Question, **more: Any) -> Any:
        """The SDK's type requires a finish reason in each chunk, but the format has null before the last one."""
        lenient = self._client.with_options(_extra_kwargs={"_strict_response_validation": False})
        return await lenient.completions.create(**self._body(question), stream=True, **more)

    async def begun(self, question: Question) -> Any:
        stream = await self._stream(question)
        async for chunk in stream:
            if chunk.choices[0].text:
                return stream
        raise AssertionError("no text came")

    async def parsed(self, question: Question, kind: type[BaseModel]) -> BaseModel | None:
        raise AssertionError("the format has no schemas")

    def _body(self, question: Question) -> dict[str, Any]:
        turn = question.turns[-1]
        assert isinstance(turn, User)
        return {
            "model": question.model,
            "prompt": turn.text,
            "max_tokens": question.max_tokens,
            "temperature": question.temperature,
            **question.more,
        }

    def _answer(self, reply: Completion) -> Answer:
        assert reply.object == "text_completion"
        assert reply.usage is not None
        [choice] = reply.choices
        end: Literal["stop", "length"] = "length" if choice.finish_reason == "length" else "stop"
        return Answer(choice.text, (), end, reply.usage.prompt_tokens, reply.usage.completion_tokens)


def _another_openai(client: AsyncOpenAI, key: str, retries: int) -> AsyncOpenAI:
    return client.with_options(api_key=key, max_retries=retries, _extra_kwargs={"_strict_response_validation": True})


async def closed(stream: Any) -> None:
    """Hangs up."""
    await asyncio.shield(stream.close())
