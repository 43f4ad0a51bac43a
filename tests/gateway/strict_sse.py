"""Reads a streamed reply as strictly as docs/api.md describes it; shares no code with the writer.

Sources of the rules: the section "Streaming" of the wire contract, and the HTML standard's section on parsing event
streams, of which only what every client library reads alike is allowed here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

DONE = "[DONE]"
CHUNK = ("id", "object", "created", "model", "system_fingerprint", "choices")
REASONS = ("stop", "length", "tool_calls", "content_filter")


@dataclass
class Call:
    """A tool call, joined from its pieces."""

    id: str
    name: str
    arguments: str = ""

    @property
    def is_whole(self) -> bool:
        try:
            return isinstance(json.loads(self.arguments), dict)
        except ValueError:
            return False


@dataclass
class Choice:
    """One choice, joined from its chunks."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    tokens: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    begins_with_call: bool = field(default=False, compare=False)


@dataclass
class Reply:
    """A stream's content. `error` is its failure; without one it ended with `[DONE]`."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    keep_alives: int = 0
    resumed: int = 0


def frames(body: bytes) -> list[str]:
    """The frames of a stream. Each must be complete and one line: a comment or data. Raises AssertionError."""
    assert b"\r" not in body, "lines end with a line feed alone"
    assert body.endswith(b"\n\n"), "the last frame is not whole"
    found = body.decode("utf-8", "strict")[:-2].split("\n\n")
    for frame in found:
        assert frame.splitlines() == [frame], "a frame is one line, for every splitter of lines"
        assert frame in (": keep-alive", ": resumed") or frame.startswith("data: "), frame
        assert frame.removeprefix("data: ").strip() == frame.removeprefix("data: ") != "", "empty or padded data"
        assert "\0" not in frame
    return found


def read(body: bytes, *, with_usage: bool = False, choices: int = 1) -> Reply:
    """The reply in a stream that keeps all the rules. Raises AssertionError for one that does not."""
    reply = Reply()
    data = []
    for frame in frames(body):
        if frame.startswith(":"):
            reply.keep_alives += frame == ": keep-alive"
            reply.resumed += frame == ": resumed"
        else:
            data.append(frame.removeprefix("data: "))
    ended = data.pop() if data[-1] == DONE else None
    events = [_json(text) for text in data]
    if ended is None:
        reply.error = _error(events.pop())
    assert all("error" not in event for event in events)
    if ended is not None and with_usage:
        last = events.pop()
        assert last["choices"] == []
        reply.usage = _usage(last["usage"])
        _head(events[0], last)
    for event in events:
        _head(events[0], event)
        is_last = ended is not None and not with_usage and event is events[-1]
        if is_last:
            reply.usage = _usage(event["usage"])
            assert event["choices"][0]["finish_reason"] is not None
        else:
            assert event.get("usage", "absent") == (None if with_usage else "absent")
        [choice] = event["choices"]
        _add(reply, choice)
    if ended is not None:
        assert sorted(reply.choices) == list(range(choices))
        for choice in reply.choices.values():
            assert choice.finish_reason is not None
            _ended(choice)
    return reply


def _json(text: str) -> dict[str, Any]:
    def once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        pairs = list(pairs)
        assert len({name for name, _ in pairs}) == len(pairs), "a name twice in one object"
        return dict(pairs)

    def never(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    value = json.loads(text, object_pairs_hook=once, parse_constant=never)
    assert isinstance(value, dict)
    return value


def _head(first: dict[str, Any], event: dict[str, Any]) -> None:
    assert tuple(event)[: len(CHUNK)] == CHUNK
    assert set(event) <= {*CHUNK, "usage"}
    assert event["object"] == "chat.completion.chunk"
    assert all(event[name] == first[name] for name in CHUNK[:-1]), "the same throughout"
    assert event["id"].startswith("chatcmpl-")
    assert isinstance(event["created"], int)


def _error(event: dict[str, Any]) -> dict[str, Any]:
    assert set(event) == {"error"}
    assert set(event["error"]) == {"message", "type", "param", "code"}
    found: dict[str, Any] = event["error"]
    return found


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_cache_hit_tokens"] + usage["prompt_cache_miss_tokens"] == usage["prompt_tokens"]
    assert usage["prompt_cache_hit_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert 0 <= usage["completion_tokens_details"]["reasoning_tokens"] <= usage["completion_tokens"]
    return usage


def _add(reply: Reply, part: dict[str, Any]) -> None:
    assert list(part) == ["index", "delta", "logprobs", "finish_reason"]
    delta = part["delta"]
    if part["index"] not in reply.choices:
        assert list(delta) == ["role", "content"], "a choice opens with its role"
        assert delta["role"] == "assistant"
        assert delta["content"] in ("", None)
        assert part["logprobs"] is None
        assert part["finish_reason"] is None
        reply.choices[part["index"]] = Choice(begins_with_call=delta["content"] is None)
        return
    choice = reply.choices[part["index"]]
    assert choice.finish_reason is None, "nothing follows the finish chunk"
    assert "role" not in delta
    if part["finish_reason"] is not None:
        assert part["finish_reason"] in REASONS
        assert delta == {}, "the finish chunk says nothing else"
        choice.finish_reason = part["finish_reason"]
        return
    if part["logprobs"] is not None:
        assert set(part["logprobs"]) == {"content", "refusal"}
        choice.tokens += part["logprobs"]["content"]
    assert delta, "a delta that says nothing"
    assert set(delta) <= {"content", "reasoning_content", "tool_calls"}
    assert len(delta) == 1
    if not (choice.content or choice.reasoning or choice.calls or choice.tokens):
        assert choice.begins_with_call == ("tool_calls" in delta), "null content opens a reply of calls"
    if "reasoning_content" in delta:
        assert not choice.content
        assert not choice.calls
        assert delta["reasoning_content"]
        choice.reasoning += delta["reasoning_content"]
    elif "content" in delta:
        assert delta["content"] or part["logprobs"]
        choice.content += delta["content"]
    else:
        assert isinstance(delta["tool_calls"], list)
        assert delta["tool_calls"]
        for call in delta["tool_calls"]:
            _add_call(choice, call)


def _add_call(choice: Choice, call: dict[str, Any]) -> None:
    function = call["function"]
    if call["index"] == len(choice.calls):
        assert set(call) == {"index", "id", "type", "function"}
        assert call["type"] == "function"
        assert function["name"]
        assert call["id"] not in {other.id for other in choice.calls}
        choice.calls.append(Call(call["id"], function["name"]))
    else:
        assert call["index"] == len(choice.calls) - 1, "calls come one after the other"
        assert set(call) == {"index", "function"}, "id, type and name come once"
        assert set(function) == {"arguments"}
    choice.calls[-1].arguments += function["arguments"]


def _ended(choice: Choice) -> None:
    if choice.finish_reason == "tool_calls":
        assert choice.calls
        assert all(call.is_whole for call in choice.calls)
    elif choice.calls:
        # Ended by its length, or by a stop string inside the call.
        assert choice.finish_reason == "length" or not choice.calls[-1].is_whole, "whole calls wait for their results"
