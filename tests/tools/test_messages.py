"""Tools, earlier calls and their results in the messages that a chat template gets."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import jinja2
import pytest

from serve_app.tools import FAMILIES, conversation
from tests.tools.reading import Call, read, summary

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather",
        "strict": True,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}


def call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather and time in 巴黎?"},
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [call("call_1", "get_weather", '{"city": "巴黎"}'), call("call_2", "get_time", "")],
    },
    {"role": "tool", "tool_call_id": "call_2", "content": "12:00"},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    {"role": "user", "content": "And tomorrow?"},
]


def render(template: str, **variables: object) -> str:
    return jinja2.Environment().from_string(template).render(**variables)


def test_a_template_gets_arguments_as_objects_and_results_with_their_functions_name() -> None:
    given = copy.deepcopy(TALK)
    told = conversation(FAMILIES["hermes"], TALK, [WEATHER, TIME])
    assert given == TALK, "nothing that is given is changed"
    assert [c["function"] for c in told.messages[2]["tool_calls"]] == [
        {"name": "get_weather", "arguments": {"city": "巴黎"}},
        {"name": "get_time", "arguments": {}},
    ]
    assert [m["name"] for m in told.messages if m["role"] == "tool"] == ["get_time", "get_weather"]
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }};{% endfor %}"
    )
    assert render(template + "{% endfor %}", messages=told.messages).count('{"city": ') == 1


def test_a_template_gets_definitions_it_can_rely_on() -> None:
    told = conversation(FAMILIES["hermes"], TALK, [WEATHER, TIME])
    assert told.tools is not None
    first, second = (tool["function"] for tool in told.tools)
    assert first == {key: value for key, value in WEATHER["function"].items() if key != "strict"}  # type: ignore[attr-defined]
    assert second == {"name": "get_time", "description": "", "parameters": {"type": "object", "properties": {}}}
    assert conversation(FAMILIES["hermes"], TALK).tools is None


@pytest.mark.parametrize("family", ["mistral", "mistral_named"])
def test_mistrals_templates_get_ids_of_nine_letters_that_still_belong_together(family: str) -> None:
    kept = [{**TALK[2], "tool_calls": [call("a1B2c3D4e", "get_time", "{}")]}]
    assert conversation(FAMILIES[family], kept).messages[0]["tool_calls"][0]["id"] == "a1B2c3D4e"
    messages = conversation(FAMILIES[family], TALK, [WEATHER]).messages
    calls = [c["id"] for c in messages[2]["tool_calls"]]
    assert calls == [messages[4]["tool_call_id"], messages[3]["tool_call_id"]]
    assert all(len(i) == 9 and i.isalnum() and i.isascii() for i in calls)
    assert len(set(calls)) == 2


def test_templates_that_take_one_call_a_message_get_each_with_its_result() -> None:
    """Llama's template refuses two calls in a message, and leaves out the text of a message with one."""
    told = conversation(FAMILIES["llama3"], TALK, [WEATHER]).messages
    assert [(m["role"], m["content"]) for m in told] == [
        ("system", "Be brief."),
        ("user", "Weather and time in 巴黎?"),
        ("assistant", "I look."),
        ("assistant", ""),
        ("tool", "sunny"),
        ("assistant", ""),
        ("tool", "12:00"),
        ("user", "And tomorrow?"),
    ]
    assert [len(m["tool_calls"]) for m in told if "tool_calls" in m] == [1, 1]


def test_a_result_without_its_call_stays_where_it_is() -> None:
    lost = [TALK[1], {"role": "tool", "tool_call_id": "gone", "content": "?"}, TALK[2], TALK[3]]
    for family in FAMILIES.values():
        assert "?" in json.dumps(conversation(family, lost, [WEATHER]).messages)
    told = conversation(FAMILIES["llama3"], lost).messages
    assert [m["content"] for m in told if m["role"] == "tool"] == ["?", "12:00"]


def test_a_template_without_tools_gets_them_as_text() -> None:
    """As the bundled model's: each message is its role and its content, and nothing else is looked at."""
    told = conversation(FAMILIES["plain"], TALK, [WEATHER, TIME])
    assert told.tools is None
    assert [m["role"] for m in told.messages] == ["system", "user", "assistant", "user"]
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    text = render(template, messages=told.messages)
    assert "<system>Be brief.\n\nYou can call these functions:" in text
    assert '"description": "The weather"' in text
    assert '{"name": "NAME", "arguments": {ARGUMENTS}}' in text
    assert (
        '<assistant>I look.\n{"name": "get_weather", "arguments": {"city": "巴黎"}}\n'
        '{"name": "get_time", "arguments": {}}\n' in text
    )
    assert "<user>Result of get_time:\n12:00\n\nResult of get_weather:\nsunny\n\nAnd tomorrow?" in text


def test_tools_without_a_system_message_bring_one() -> None:
    told = conversation(FAMILIES["plain"], [TALK[1]], [TIME]).messages
    assert [m["role"] for m in told] == ["system", "user"]
    assert conversation(FAMILIES["plain"], [TALK[1]]).messages == (TALK[1],)
    developer = conversation(FAMILIES["plain"], [{"role": "developer", "content": "Be kind."}], [TIME]).messages
    assert len(developer) == 1
    assert developer[0]["content"].startswith("Be kind.\n\n")


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v31", "plain"])
def test_calls_that_are_written_out_are_what_the_parser_reads(family: str) -> None:
    told = conversation(FAMILIES[family], TALK, [WEATHER]).messages
    assert "tool_calls" not in told[2]
    said = summary(read(family, [told[2]["content"]]))
    assert said == ["I look.", Call("get_weather", '{"city": "巴黎"}'), Call("get_time", "{}")]


def test_deepseek_keeps_the_role_of_results() -> None:
    told = conversation(FAMILIES["deepseek_v31"], TALK, [WEATHER]).messages
    assert [m["role"] for m in told] == ["system", "user", "assistant", "tool", "tool", "user"]
    assert "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>" in told[0]["content"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("arguments", ['{"city": "Pa', "7", "[1]", "null", '{"a":' * 100_000, "\ud800", " "])
def test_arguments_that_are_no_object_are_told_all_the_same(family: str, arguments: str) -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [call("1", "get_time", arguments)]}]
    for message in conversation(FAMILIES[family], messages).messages:
        for told in message.get("tool_calls", ()):
            assert isinstance(told["function"]["arguments"], dict)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_conversation_is_told_whole(family: str) -> None:
    rng = random.Random(0)
    talk: list[dict[str, Any]] = []
    for turn in range(200):
        calls = [call(f"c{turn}-{i}", "get_time", "{}") for i in range(rng.randint(1, 3))]
        results = [{"role": "tool", "tool_call_id": c["id"], "content": f"r{c['id']}."} for c in calls]
        rng.shuffle(results)
        talk += [{"role": "user", "content": f"u{turn}."}, {"role": "assistant", "content": "", "tool_calls": calls}]
        talk += results
    told = conversation(FAMILIES[family], talk).messages
    text = "".join(str(m["content"]) for m in told)
    for message in talk:
        assert text.count(message["content"]) == 1 or not message["content"]
