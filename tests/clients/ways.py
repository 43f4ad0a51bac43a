"""One request in each of the SDK's ways, whole or streamed, sync or async, and the reply as one value."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI, OpenAI
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionTokenLogprob

#: The server can tell whole from streamed, but not sync from async.
WAYS = ("whole", "streamed, async")
OTHER_WAYS = ("streamed", "whole, async")


@dataclass
class Call:
    """A tool call; `pieces` are its arguments as they came."""

    id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


@dataclass
class Choice:
    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    tokens: list[ChatCompletionTokenLogprob] = field(default_factory=list)
    finish_reason: str = ""


@dataclass
class Reply:
    id: str
    model: str
    fingerprint: str
    choices: list[Choice]
    usage: CompletionUsage

    @property
    def content(self) -> str:
        [choice] = self.choices
        return choice.content

    @property
    def finish_reason(self) -> str:
        [choice] = self.choices
        return choice.finish_reason


Ask = Callable[..., Awaitable[Reply]]

QUESTION = [{"role": "user", "content": "Name the capital of France."}]


def whole(reply: ChatCompletion) -> Reply:
    assert reply.object == "chat.completion"
    assert reply.usage is not None
    assert [choice.index for choice in reply.choices] == list(range(len(reply.choices)))
    choices = [
        Choice(
            choice.message.content or "",
            getattr(choice.message, "reasoning_content", None) or "",
            [
                Call(call.id, call.function.name, [call.function.arguments])
                for call in choice.message.tool_calls or ()
                if call.type == "function"
            ],
            list(choice.logprobs.content or ()) if choice.logprobs else [],
            choice.finish_reason,
        )
        for choice in reply.choices
    ]
    return Reply(reply.id, reply.model, reply.system_fingerprint or "", choices, reply.usage)


def joined(chunks: Iterable[ChatCompletionChunk]) -> Reply:
    """A stream with usage as one reply; fails if its chunks do not follow the contract."""
    chunks = list(chunks)
    choices: dict[int, Choice] = {}
    *body, last = chunks
    assert not last.choices
    assert last.usage is not None
    for chunk in body:
        assert chunk.object == "chat.completion.chunk"
        assert (chunk.id, chunk.created, chunk.model) == (last.id, last.created, last.model)
        assert chunk.usage is None
        [part] = chunk.choices
        if part.index not in choices:
            assert part.delta.role == "assistant"
        choice = choices.setdefault(part.index, Choice())
        assert not choice.finish_reason, "a choice goes on after its end"
        choice.content += part.delta.content or ""
        choice.reasoning += getattr(part.delta, "reasoning_content", None) or ""
        for call in part.delta.tool_calls or ():
            assert call.function is not None
            if call.index == len(choice.calls):  # a new one: its id and name come once, and first
                assert call.id
                assert call.type == "function"
                assert call.function.name
                choice.calls.append(Call(call.id, call.function.name))
            else:
                assert call.index == len(choice.calls) - 1
                assert call.id is None
                assert call.function.name is None
            choice.calls[call.index].pieces.append(call.function.arguments or "")
        if part.logprobs is not None:
            choice.tokens += part.logprobs.content or ()
        choice.finish_reason = part.finish_reason or ""
    in_order = [choices[index] for index in sorted(choices)]
    assert all(choice.finish_reason for choice in in_order)
    return Reply(last.id, last.model, last.system_fingerprint or "", in_order, last.usage)


def asking(way: str, client: OpenAI, async_client: AsyncOpenAI) -> Ask:
    """Sends requests in this way."""
    asynchronous = way.endswith("async")
    if way.startswith("whole"):

        async def ask(**fields: Any) -> Reply:
            fields = {"model": "svc-chat", "messages": QUESTION, **fields}
            if asynchronous:
                return whole(await async_client.chat.completions.create(**fields))
            return whole(await asyncio.to_thread(client.chat.completions.create, **fields))
    else:

        async def ask(**fields: Any) -> Reply:
            options = {"stream": True, "stream_options": {"include_usage": True}}
            fields = {"model": "svc-chat", "messages": QUESTION, **options, **fields}
            if asynchronous:
                return joined([chunk async for chunk in await async_client.chat.completions.create(**fields)])
            return await asyncio.to_thread(lambda: joined(client.chat.completions.create(**fields)))

    return ask
