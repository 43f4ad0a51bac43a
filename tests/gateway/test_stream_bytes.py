"""The exact bytes of each kind of stream, from a model's tokens through engine, replica and gateway to a socket.

They lie in `golden/`, with the reply's id, the time of its beginning and the ids of its calls replaced by fixed ones.
After an intended change, `WRITE_GOLDEN=1` writes them again: read the difference.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
from openai._streaming import SSEDecoder

from tests.gateway import connections
from tests.gateway.connections import post
from tests.gateway.scripted_model import FAILS, QWEN, TEMPLATE, ScriptedModel
from tests.gateway.strict_sse import Call, Choice, read
from tests.gateway.world import World

GOLDEN = Path(__file__).parent / "golden"
USAGE = {"stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class Kind:
    """A kind of stream: the model's tokens, the request, and what the client must read."""

    says: tuple[tuple[bytes, ...], ...]  # the tokens of each choice
    reads: tuple[Choice, ...]
    fields: dict[str, Any] = field(default_factory=dict)
    fails: bool = False
    template: str = TEMPLATE


def said(*pieces: str | bytes) -> tuple[bytes, ...]:
    return tuple(piece.encode() if isinstance(piece, str) else piece for piece in pieces)


def one(*pieces: str | bytes, reads: Choice, fails: bool = False, template: str = TEMPLATE, **fields: Any) -> Kind:
    return Kind((said(*pieces),), (reads,), fields, fails, template)


def text(content: str, finish_reason: str | None = "stop") -> Choice:
    return Choice(content=content, finish_reason=finish_reason)


def calls(*made: tuple[str, str], content: str = "", finish_reason: str = "tool_calls", **more: Any) -> Choice:
    told = [Call(f"call_{number}", name, arguments) for number, (name, arguments) in enumerate(made, 1)]
    return Choice(content=content, calls=told, finish_reason=finish_reason, **more)


FAMILY = "👨‍👩‍👧".encode()
TOOLS: dict[str, Any] = {
    "template": QWEN,
    "tools": [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
        for name in ("get_weather", "get_time")
    ],
}
WEATHER = ("<tool_call>", '\n{"name": "get_weather", "arg', 'uments": {"city"', ': "北', '京"}}\n', "</tool_call>")
TIME = ("\n<tool_", 'call>\n{"name": "get_time", "arguments": {}}\n</tool_call>')
KINDS = {
    "text": one("Hello", " world", ".", reads=text("Hello world.")),
    "usage": one("Hello", " world", ".", reads=text("Hello world."), **USAGE),
    "length": one("Hello", " world", ".", reads=text("Hello world", "length"), max_tokens=2),
    "empty": one(reads=text(""), **USAGE),
    "characters": one("你", FAMILY[:2], FAMILY[2:9], FAMILY[9:], " e", "\u0301", reads=text("你👨‍👩‍👧 e\u0301")),
    "line_ends": one(
        "a\nb", "\r\nc", "\x85", "\u2028\u2029", "\v\f\x1c\0",
        '"\\/', reads=text('a\nb\r\nc\x85\u2028\u2029\v\f\x1c\0"\\/')
    ),
    "stop": one("The", " END", " EN", "D of it", reads=text("The END"), stop=[" END of", "D of"]),
    "nearly_stop": one("a", "##", "b", "#", reads=text("a##b#"), stop=["###"]),
    "half_a_character": one("Hi ", FAMILY[:3], reads=text("Hi ", "length"), max_tokens=2),
    "logprobs": one("Hel", "lo", FAMILY[:4], FAMILY[4:], reads=text("Hello👨‍👩‍👧"), logprobs=True, top_logprobs=2),
    "logprobs_stop": one("a", "#", "#", "b", "##", "#", reads=text("a##b"), logprobs=True, stop="###"),
    "prefix": one(
        " is", " Paris.",
        reads=text(" is Paris."),
        messages=[
            {"role": "user", "content": "The capital of France?"},
            {"role": "assistant", "content": "It", "prefix": True},
        ],
        **USAGE,
    ),
    "choices": Kind(
        (said("Red", "."), said("Green", " it is"), said()),
        (text("Red."), text("Green it is"), text("")),
        {"n": 3, "seed": 1, **USAGE},
    ),
    "reasoning": one(
        "<think>", "\nHm", ", 2", ".\n", "</think>", "\n\n", "Two", ".",
        reads=Choice(reasoning="Hm, 2.", content="Two.", finish_reason="stop"),
        template=QWEN,
        **USAGE,
    ),
    "reasoning_length": one(
        "<think>", "\nHm", ", 2",
        reads=Choice(reasoning="Hm, 2", finish_reason="length"),
        template=QWEN,
        max_tokens=3,
        **USAGE,
    ),
    "call": one(*WEATHER, reads=calls(("get_weather", '{"city": "北京"}')), **TOOLS),
    "calls": one(*WEATHER, *TIME, reads=calls(("get_weather", '{"city": "北京"}'), ("get_time", "{}")), **TOOLS),
    "text_call": one(
        "<think>", "\nHm.", "\n</think>\n", "I look", ".\n", *WEATHER,
        reads=calls(("get_weather", '{"city": "北京"}'), content="I look.", reasoning="Hm."),
        **TOOLS,
        **USAGE,
    ),
    "call_length": one(
        *WEATHER,
        reads=calls(("get_weather", '{"city": "北'), finish_reason="length"),
        max_tokens=4,
        **TOOLS,
    ),
    "call_logprobs": one(*TIME, reads=calls(("get_time", "{}")), logprobs=True, **TOOLS),
    "call_choices": Kind(
        (said(*TIME), said("No.")),
        (calls(("get_time", "{}")), text("No.")),
        {"n": 2, "tools": TOOLS["tools"], **USAGE},  # without it, the choice that ends last has the usage
        template=QWEN,
    ),
    "failure": one("Hel", "lo", FAILS, reads=text("Hello", None), fails=True, **USAGE),
}  # fmt: skip


@pytest.fixture
def model() -> Iterator[Callable[..., ScriptedModel]]:
    made: list[ScriptedModel] = []

    def make(*choices: tuple[bytes, ...], **options: Any) -> ScriptedModel:
        made.append(ScriptedModel(*choices, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def golden(name: str, body: bytes) -> bytes:
    """The bytes that are expected; compared are those of `body` with its own id and time."""
    path = GOLDEN / f"{name}.sse"
    if os.environ.get("WRITE_GOLDEN"):
        path.write_bytes(body)
    return path.read_bytes()


def fixed(body: bytes) -> bytes:
    """The body with its id and time replaced. Both must be the same in all chunks."""
    [(reply_id, created)] = set(re.findall(rb'^data: {"id":"(chatcmpl-[0-9a-f]{32})".*?"created":(\d+)', body, re.M))
    body = body.replace(reply_id, b"chatcmpl-1").replace(b'"created":' + created, b'"created":1700000000')
    for number, call_id in enumerate(re.findall(rb'"id":"(call_[0-9A-Za-z]{24})","type":"function"', body), 1):
        assert body.count(call_id) == 1
        body = body.replace(call_id, b"call_%d" % number)
    return body


def one_after_the_other(body: bytes) -> bytes:
    """The stream with the chunks of each choice together: their interleaving depends on timing."""
    frames = body.split(b"\n\n")

    def turn(frame: bytes) -> int:
        found = re.search(rb'"choices":\[{"index":(\d)', frame)
        return int(found[1]) if found else 9

    return b"\n\n".join(sorted(frames, key=turn))


def sdk(body: bytes) -> list[openai.types.chat.ChatCompletionChunk]:
    """The chunks as OpenAI's client library decodes them, strictly."""
    events = list(SSEDecoder().iter_bytes(iter([body])))
    assert all(event.id is None and event.event is None and event.retry is None for event in events)
    return [
        openai.types.chat.ChatCompletionChunk.model_validate(json.loads(event.data), strict=True)
        for event in events
        if event.data != "[DONE]" and not event.data.startswith('{"error"')
    ]


@pytest.mark.parametrize("name", KINDS)
async def test_a_stream_has_exactly_these_bytes(world: World, model: Callable[..., ScriptedModel], name: str) -> None:
    kind = KINDS[name]
    model(*kind.says, template=kind.template).behind(world)
    body = one_after_the_other(fixed(await post(world, stream=True, **kind.fields)))
    assert body == golden(name, body)
    reply = read(body, with_usage="stream_options" in kind.fields, choices=len(kind.reads))
    assert (reply.error is not None) == kind.fails
    for number, choice in enumerate(kind.reads):
        found = reply.choices[number]
        tokens, found.tokens = found.tokens, []
        assert found == choice
        if kind.fields.get("logprobs"):
            spelled = b"".join(bytes(token["bytes"]) for token in tokens)
            assert spelled == (b"".join(kind.says[number]) if choice.calls else choice.content.encode())
        by_sdk = [part.choices[0] for part in sdk(body) if part.choices and part.choices[0].index == number]
        assert "".join(part.delta.content or "" for part in by_sdk) == choice.content
        assert by_sdk[-1].finish_reason == choice.finish_reason
        pieces = [call for part in by_sdk for call in part.delta.tool_calls or []]
        for index, call in enumerate(choice.calls):
            told = [piece.function for piece in pieces if piece.index == index and piece.function]
            assert "".join(piece.arguments or "" for piece in told) == call.arguments


async def test_a_stream_that_waits_for_its_first_token_is_kept_alive_in_exactly_these_bytes(
    make_world: Callable[..., Any], model: Callable[..., ScriptedModel]
) -> None:
    world: World = await make_world(keep_alive_s=0.02)
    scripted = model(said("Hello")).behind(world)
    scripted.runner.gate.clear()
    call = connections.Call(world, stream=True)
    await call.until(": keep-alive")
    scripted.runner.gate.set()
    body = fixed((await call.done()).body)
    assert read(body).choices[0] == text("Hello")
    assert [part.choices[0].delta.content for part in sdk(body)] == ["", "Hello", None]
    once = re.sub(rb"^(: keep-alive\n\n)+", rb": keep-alive\n\n", body)  # their number depends on timing
    assert once == golden("keep_alive", once)
