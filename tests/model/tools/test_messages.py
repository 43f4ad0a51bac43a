"""Tools, earlier calls and their results in the messages that a chat template gets."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import jinja2
import pytest

from serve_app.model.tools.format_table import TOOL_FORMATS
from serve_app.model.tools.messages import conversation
from tests.model.tools.reading import Call, read, summary

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


def messages_of(*arguments: Any) -> list[dict[str, Any]]:
    return conversation(*arguments)[0]


def render(template: str, **variables: object) -> str:
    return jinja2.Environment().from_string(template).render(**variables)


def test_a_template_gets_arguments_as_objects_and_results_with_their_functions_name() -> None:
    given = copy.deepcopy(TALK)
    result = messages_of(TOOL_FORMATS["hermes"], TALK, [WEATHER, TIME])
    assert given == TALK, "nothing that is given is changed"
    assert [c["function"] for c in result[2]["tool_calls"]] == [
        {"name": "get_weather", "arguments": {"city": "巴黎"}},
        {"name": "get_time", "arguments": {}},
    ]
    assert [m["name"] for m in result if m["role"] == "tool"] == ["get_time", "get_weather"]
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }};{% endfor %}"
    )
    assert render(template + "{% endfor %}", messages=result).count('{"city": ') == 1


def test_a_template_gets_definitions_it_can_rely_on() -> None:
    _, tools = conversation(TOOL_FORMATS["hermes"], TALK, [WEATHER, TIME])
    assert tools is not None
    first, second = (tool["function"] for tool in tools)
    assert first == {key: value for key, value in WEATHER["function"].items() if key != "strict"}  # type: ignore[attr-defined]
    assert second == {"name": "get_time", "description": "", "parameters": {"type": "object", "properties": {}}}
    assert conversation(TOOL_FORMATS["hermes"], TALK)[1] is None


@pytest.mark.parametrize("tool_format", ["mistral", "mistral_named"])
def test_mistrals_templates_get_ids_of_nine_letters_that_still_belong_together(tool_format: str) -> None:
    kept = [{**TALK[2], "tool_calls": [call("a1B2c3D4e", "get_time", "{}")]}]
    assert messages_of(TOOL_FORMATS[tool_format], kept)[0]["tool_calls"][0]["id"] == "a1B2c3D4e"
    messages = messages_of(TOOL_FORMATS[tool_format], TALK, [WEATHER])
    calls = [c["id"] for c in messages[2]["tool_calls"]]
    assert calls == [messages[4]["tool_call_id"], messages[3]["tool_call_id"]]
    assert all(len(i) == 9 and i.isalnum() and i.isascii() for i in calls)
    assert len(set(calls)) == 2


def test_templates_that_take_one_call_a_message_get_each_with_its_result() -> None:
    """Llama's template refuses two calls in a message, and leaves out the text of a message with one."""
    result = messages_of(TOOL_FORMATS["llama3"], TALK, [WEATHER])
    assert [(m["role"], m["content"]) for m in result] == [
        ("system", "Be brief."),
        ("user", "Weather and time in 巴黎?"),
        ("assistant", "I look."),
        ("assistant", ""),
        ("tool", "sunny"),
        ("assistant", ""),
        ("tool", "12:00"),
        ("user", "And tomorrow?"),
    ]
    assert [len(m["tool_calls"]) for m in result if "tool_calls" in m] == [1, 1]


def test_a_result_without_its_call_stays_where_it_is() -> None:
    lost = [TALK[1], {"role": "tool", "tool_call_id": "gone", "content": "?"}, TALK[2], TALK[3]]
    for tool_format in TOOL_FORMATS.values():
        assert "?" in json.dumps(messages_of(tool_format, lost, [WEATHER]))
    result = messages_of(TOOL_FORMATS["llama3"], lost)
    assert [m["content"] for m in result if m["role"] == "tool"] == ["?", "12:00"]


def test_a_template_without_tools_gets_them_as_text() -> None:
    """As the bundled model's: it uses only the role and the content of each message."""
    result, tools = conversation(TOOL_FORMATS["plain"], TALK, [WEATHER, TIME])
    assert tools is None
    assert [m["role"] for m in result] == ["system", "user", "assistant", "user"]
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    text = render(template, messages=result)
    assert "<system>Be brief.\n\nYou can call these functions:" in text
    assert '"description": "The weather"' in text
    assert '{"name": "NAME", "arguments": {ARGUMENTS}}' in text
    assert (
        '<assistant>I look.\n{"name": "get_weather", "arguments": {"city": "巴黎"}}\n'
        '{"name": "get_time", "arguments": {}}\n' in text
    )
    assert "<user>Result of get_time:\n12:00\n\nResult of get_weather:\nsunny\n\nAnd tomorrow?" in text


def test_tools_without_a_system_message_bring_one() -> None:
    result = messages_of(TOOL_FORMATS["plain"], [TALK[1]], [TIME])
    assert [m["role"] for m in result] == ["system", "user"]
    assert messages_of(TOOL_FORMATS["plain"], [TALK[1]]) == [TALK[1]]
    developer = messages_of(TOOL_FORMATS["plain"], [{"role": "developer", "content": "Be kind."}], [TIME])
    assert len(developer) == 1
    assert developer[0]["content"].startswith("Be kind.\n\n")


@pytest.mark.parametrize("tool_format", ["deepseek_v3", "deepseek_v31", "plain"])
def test_calls_that_are_written_out_are_what_the_parser_reads(tool_format: str) -> None:
    result = messages_of(TOOL_FORMATS[tool_format], TALK, [WEATHER])
    assert "tool_calls" not in result[2]
    said = summary(read(tool_format, [result[2]["content"]]))
    assert said == ["I look.", Call("get_weather", '{"city": "巴黎"}'), Call("get_time", "{}")]


def test_deepseek_keeps_the_role_of_results() -> None:
    result = messages_of(TOOL_FORMATS["deepseek_v31"], TALK, [WEATHER])
    assert [m["role"] for m in result] == ["system", "user", "assistant", "tool", "tool", "user"]
    assert "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>" in result[0]["content"]


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
@pytest.mark.parametrize("arguments", ['{"city": "Pa', "7", "[1]", "null", '{"a":' * 100_000, "\ud800", " "])
def test_arguments_that_are_no_object_stay_in_the_messages(tool_format: str, arguments: str) -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [call("1", "get_time", arguments)]}]
    for message in messages_of(TOOL_FORMATS[tool_format], messages):
        for result in message.get("tool_calls", ()):
            assert isinstance(result["function"]["arguments"], dict)


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_a_long_conversation_stays_complete(tool_format: str) -> None:
    rng = random.Random(0)
    talk: list[dict[str, Any]] = []
    for turn in range(200):
        calls = [call(f"c{turn}-{i}", "get_time", "{}") for i in range(rng.randint(1, 3))]
        results = [{"role": "tool", "tool_call_id": c["id"], "content": f"r{c['id']}."} for c in calls]
        rng.shuffle(results)
        talk += [{"role": "user", "content": f"u{turn}."}, {"role": "assistant", "content": "", "tool_calls": calls}]
        talk += results
    result = messages_of(TOOL_FORMATS[tool_format], talk)
    text = "".join(str(m["content"]) for m in result)
    for message in talk:
        assert text.count(message["content"]) == 1 or not message["content"]


def test_arguments_that_are_nested_too_deeply_stay_text() -> None:
    deep = "[" * 300 + "]" * 300
    asked = {"role": "assistant", "content": None, "tool_calls": [call("c", "f", f'{{"a": {deep}}}')]}
    for tool_format in TOOL_FORMATS.values():
        assert deep in str(messages_of(tool_format, [asked]))
