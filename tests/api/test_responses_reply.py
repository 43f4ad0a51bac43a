"""A response's events are those of the SDK's types, and end with the response that is sent without a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from serve_app.api.door import ReplyEvent, ReplyHead
from serve_app.api.errors import replica_lost
from serve_app.api.responses_reply import custom_input
from serve_app.contracts.generation import (
    CallArguments,
    CallEnded,
    CallStarted,
    Delta,
    Ending,
    Finished,
    FinishReason,
    Reasoning,
    ReplyParts,
    Text,
    TokenLogprob,
)
from tests.api.responses import CUSTOM, DOOR, FUNCTION, NAMESPACE, parsed

HEAD = ReplyHead("resp_" + "a" * 32, 1_767_225_600, "svc-chat", "fp_1")
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOLS = [FUNCTION, CUSTOM, NAMESPACE, {"type": "web_search"}]
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def token(text: str) -> TokenLogprob:
    return TokenLogprob(1, text, text.encode(), -0.5, (TokenLogprob(2, "x", b"x", float("-inf")),))


def call(name: str, *pieces: str, ending: Ending | None = Ending.COMPLETE, index: int = 0) -> list[ReplyEvent]:
    parts: list[Any] = [CallStarted(index, f"call_{index}", name), *(CallArguments(index, piece) for piece in pieces)]
    return [ReplyParts((part,), 1) for part in parts + ([CallEnded(index, ending)] if ending else [])]


def says(text: str, *tokens: TokenLogprob) -> ReplyParts:
    return ReplyParts((Text(text),), 1, tokens)


REPLIES: dict[str, tuple[list[ReplyEvent], FinishReason]] = {
    "text": ([Delta("Hel", 1), Delta("lo\u2028", 2)], STOP),
    "text cut short": ([Delta("Hel", 1)], LENGTH),
    "nothing": ([], STOP),
    "log-probabilities": ([Delta("", 1, (token("H"),)), Delta("Hello", 2, (token("ello"),))], STOP),
    "log-probabilities to the end": ([Delta("Hi", 1, (token("Hi"),)), Delta("", 2, (token("!"),))], STOP),
    "reasoning": ([ReplyParts((Reasoning("Hm."),), 1), ReplyParts((Reasoning(" So."), Text("Yes")), 2)], STOP),
    "reasoning cut short": ([ReplyParts((Reasoning("Hm."),), 1)], LENGTH),
    "calls": ([says("Look: "), *call("look", '{"a"', ":1}"), *call("look", "{}", index=1)], STOP),
    "a custom call": (call("patch", '{"input"', ':"a\\nb"}'), STOP),
    "a call in a namespace": (call("mcp__files__look", "{}"), STOP),
    "a call cut short": (call("look", '{"a"', ending=Ending.CUT), STOP),
    "a custom call cut short": (call("patch", '{"inp', ending=Ending.CUT), LENGTH),
    "a malformed call": ([*call("look", '{"a"', ending=Ending.MALFORMED), says("oops")], STOP),
    "a call that never ends": (call("look", '{"a"', ending=None), LENGTH),
}


def events_of(raw: bytes) -> list[dict[str, Any]]:
    """Checks the frames and returns the data of the events."""
    frames = raw.decode().split("\n\n")
    assert frames.pop() == ""
    found = []
    for frame in frames:
        event, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert event == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def streamed(events: Sequence[ReplyEvent], reason: FinishReason, **fields: Any) -> list[dict[str, Any]]:
    stream = DOOR.stream(parsed(tools=TOOLS, stream=True, **fields), HEAD)
    pieces = [stream.event(event) for event in events]
    return events_of(b"".join([*pieces, stream.end(Finished(reason, 10, 4, 5, 2))]))


def whole(events: Sequence[ReplyEvent], reason: FinishReason, **fields: Any) -> dict[str, Any]:
    reply = DOOR.whole(parsed(tools=TOOLS, **fields))
    for event in events:
        reply.add_event(event)
    body: dict[str, Any] = json.loads(reply.body(HEAD, Finished(reason, 10, 4, 5, 2)))
    return body


@pytest.mark.parametrize("name", REPLIES)
def test_every_event_fits_the_sdk_and_the_last_has_the_response_that_is_sent_without_a_stream(name: str) -> None:
    events = streamed(*REPLIES[name])
    for event in events:
        EVENT.validate_python(event)
    expected = whole(*REPLIES[name])
    Response.model_validate(expected)
    assert events[-1]["response"] == expected
    assert events[-1]["type"] == f"response.{expected['status']}"


@pytest.mark.parametrize("name", REPLIES)
def test_the_items_in_the_events_are_those_of_the_response_and_deltas_add_up(name: str) -> None:
    *events, last = streamed(*REPLIES[name])
    output = last["response"]["output"]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == output
    added = [event for event in events if event["type"] == "response.output_item.added"]
    assert [(event["output_index"], event["item"]["id"]) for event in added] == [
        (at, item["id"]) for at, item in enumerate(output)
    ]
    for at, item in enumerate(output):
        mine = [event for event in events if event.get("output_index") == at]
        text = "".join(event["delta"] for event in mine if event["type"].endswith(".delta"))
        content = item["content"][0]["text"] if "content" in item else item.get("arguments", item.get("input"))
        assert text == content


@pytest.mark.parametrize("name", [name for name, (_, reason) in REPLIES.items() if reason is STOP])
def test_the_sdk_accumulates_the_response_that_was_sent(name: str) -> None:
    if (events := streamed(*REPLIES[name]))[-1]["type"] != "response.completed":
        return  # the SDK keeps only complete responses
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=[], text_format=omit)
    for event in events:
        state.handle_event(EVENT.validate_python(event))
    accumulated = state._completed_response
    assert accumulated is not None
    sent = Response.model_validate(events[-1]["response"])
    assert [item.id for item in accumulated.output] == [item.id for item in sent.output]
    assert (accumulated.id, accumulated.output_text, accumulated.usage) == (sent.id, sent.output_text, sent.usage)


def test_status_and_reason_say_how_the_reply_ended() -> None:
    complete, cut = whole(*REPLIES["text"]), whole(*REPLIES["text cut short"])
    assert (complete["status"], complete["incomplete_details"]) == ("completed", None)
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert cut["output"][0]["status"] == "incomplete"
    half = whole(*REPLIES["a call cut short"])
    assert (half["status"], half["output"][0]["status"]) == ("incomplete", "incomplete")


def test_items_have_what_the_model_said() -> None:
    [thought, answer] = whole(*REPLIES["reasoning"])["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm. So."}]
    assert answer["content"][0]["text"] == "Yes"
    [_, first, second] = whole(*REPLIES["calls"])["output"]
    assert (first["name"], first["call_id"], first["arguments"]) == ("look", "call_0", '{"a":1}')
    assert second["call_id"] == "call_1"
    [custom] = whole(*REPLIES["a custom call"])["output"]
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "patch", "a\nb")
    [inner] = whole(*REPLIES["a call in a namespace"])["output"]
    assert (inner["namespace"], inner["name"]) == ("mcp__files", "look")


def test_log_probabilities_belong_to_the_text() -> None:
    [message] = whole(*REPLIES["log-probabilities"], include=["message.output_text.logprobs"])["output"]
    logprobs = message["content"][0]["logprobs"]
    assert [one["token"] for one in logprobs] == ["H", "ello"]
    assert logprobs[0]["top_logprobs"] == [{"token": "x", "logprob": -9999.0, "bytes": [120]}]
    [message] = whole(*REPLIES["log-probabilities to the end"])["output"]
    assert [one["token"] for one in message["content"][0]["logprobs"]] == ["Hi", "!"]
    mixed = ReplyParts((Reasoning("Hm."), Text("Yes")), 3, (token("Hm."), token("</think>"), token("Yes")))
    *_, message = whole([mixed], STOP)["output"]
    assert [one["token"] for one in message["content"][0]["logprobs"]] == ["Yes"]


def test_a_response_repeats_the_request_and_names_the_tools_that_were_left_out() -> None:
    sent: dict[str, Any] = {
        "instructions": "Be brief.", "temperature": 0.5, "top_p": 0.9, "metadata": {"a": "b"}, "user": "ada",
        "max_output_tokens": 7, "truncation": "auto", "parallel_tool_calls": False, "prompt_cache_key": "k",
        "safety_identifier": "s", "top_logprobs": 0, "max_tool_calls": 2,
        "tool_choice": {"type": "function", "name": "look"},
        "text": {"format": {"type": "json_schema", "name": "s", "schema": {}, "strict": True}, "verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto"},
    }  # fmt: skip
    reply = whole(*REPLIES["text"], **sent)
    assert {name: reply[name] for name in sent} == sent
    assert [tool["name"] for tool in reply["tools"]] == ["look", "patch", "mcp__files"]
    assert reply["omitted_tools"] == ["web_search"]
    assert reply["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 15,
    }


@pytest.mark.parametrize("events", [[], [Delta("Hel", 1)]])
def test_a_failed_stream_ends_with_an_event_that_fits_the_sdk(events: list[ReplyEvent]) -> None:
    stream = DOOR.stream(parsed(stream=True), HEAD)
    raw = b"".join(stream.event(event) for event in events) + stream.error_event(replica_lost(stream=True))
    found = events_of(raw)
    for event in found:
        EVENT.validate_python(event)
    assert found[0]["type"] == "response.created"
    assert found[-1]["type"] == "response.failed"
    assert found[-1]["response"]["status"] == "failed"
    assert found[-1]["response"]["error"]["code"] == "server_error"
    assert "send it again" in found[-1]["response"]["error"]["message"]


def test_arguments_that_are_nested_too_deeply_are_the_input_of_a_custom_tool_as_they_are() -> None:
    assert custom_input("[" * 100_000) == "[" * 100_000
