"""Tests of what each format writes, and what is read in it."""

from __future__ import annotations

import pytest

from serve_app.contracts.generation import CallArguments, CallEnded, CallStarted, Ending, Text
from serve_app.model.tools.format_table import TOOL_FORMATS, format_of
from tests.model.tools.reading import Call, read, reply

PARIS = Call("get_weather", '{"city": "Paris"}')
TIME = Call("get_time", "{}")

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
V3_PARIS = f'{BEGIN}function{SEP}get_weather\n```json\n{{"city": "Paris"}}\n```{END}'

GOLDEN = [
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', [PARIS]),
    (
        "hermes",
        'Let me see.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
        ["Let me see.", PARIS, TIME],
    ),
    ("hermes", '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call> done', [PARIS, " done"]),
    ("hermes", '<tool_call>{"name": "get_time"}</tool_call>', [TIME]),
    ("hermes", '<tool_call>{"name": "get_time", "arguments": null}</tool_call>', [TIME]),
    (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
        [PARIS],
    ),
    ("hermes", '<tool_call>\n{"name": "unheard_of", "arguments": {}}\n</tool_call>', [Call("unheard_of", "{}")]),
    ("hermes", '<tool_call>{"name": "get_time", "arguments": {}</tool_call>', [TIME]),  # a bracket short
    ("hermes", '<tool_call>{"name": "get_time", "arguments": {}}<tool_call>{"name": "get_time"}', [TIME, TIME]),
    ("llama3", '{"name": "get_weather", "parameters": {"city": "Paris"}}', [PARIS]),
    ("llama3", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}', [PARIS]),
    ("llama3", '{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}', [PARIS]),
    (
        "llama3",
        '{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_time", "parameters": {}}',
        None,
    ),
    ("llama3", "Well: <|python_tag|>" + '{"name": "get_time", "parameters": {}}', ["Well:", TIME]),
    ("llama3", '<|python_tag|>brave_search.call(query="Paris")', ['<|python_tag|>brave_search.call(query="Paris")']),
    ("llama3", '{"name": "Ada", "parameters": {}}', ['{"name": "Ada", "parameters": {}}']),
    ("deepseek_v3", f"{CALLS_BEGIN}{V3_PARIS}{CALLS_END}", [PARIS]),
    ("deepseek_v3", f"I look.{CALLS_BEGIN}{V3_PARIS}\n{V3_PARIS}{CALLS_END}", ["I look.", PARIS, PARIS]),
    ("deepseek_v3", f"{V3_PARIS} and so on", [PARIS, " and so on"]),
    ("deepseek_v31", f'{CALLS_BEGIN}{BEGIN}get_weather{SEP}{{"city": "Paris"}}{END}{CALLS_END}', [PARIS]),
    (
        "deepseek_v31",
        f'Ja.{CALLS_BEGIN}{BEGIN}get_weather{SEP}{{"city": "Paris"}}{END}{BEGIN}get_time{SEP}{{}}{END}{CALLS_END}',
        ["Ja.", PARIS, TIME],
    ),
    ("mistral", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "a1b2c3d4e"}]', [PARIS]),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "get_time", "arguments": {}}]',
        [PARIS, TIME],
    ),
    ("mistral", '[{"name": "get_time", "arguments": {}}]', [TIME]),  # the marker is lost where it is a special token
    ("mistral", '[{"name": "Ada"}]', ['[{"name": "Ada"}]']),
    ("mistral", "[TO BE DONE]", ["[TO BE DONE]"]),
    ("mistral_named", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[ARGS]{}', [PARIS, TIME]),
    ("mistral_named", '[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Paris"}', [PARIS]),
    ("mistral_named", 'Hm.[TOOL_CALLS]get_weather{"city": "Paris"}', ["Hm.", PARIS]),
    ("plain", '{"name": "get_weather", "arguments": {"city": "Paris"}}', [PARIS]),
    ("plain", '```json\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n```', [PARIS]),
    (
        "plain",
        '[{"name": "get_weather", "arguments": {"city": "Paris"}},\n {"name": "get_time", "parameters": {}}]',
        [PARIS, TIME],
    ),
    (
        "plain",
        'Sure:\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n{"name": "get_time", "arguments": {}}\nDone.',
        ["Sure:", PARIS, TIME, "\nDone."],
    ),
    ("plain", '{"name": "Ada", "arguments": {}}', ['{"name": "Ada", "arguments": {}}']),
    ("plain", '{"name": "get_time"}', ['{"name": "get_time"}']),
    ("plain", '{"answer": [1, 2]}\n', ['{"answer": [1, 2]}\n']),
    ("plain", 'See {"name": "get_time", "arguments": {}}', ['See {"name": "get_time", "arguments": {}}']),
    ("plain", "```python\nprint(1)\n```\n", ["```python\nprint(1)\n```\n"]),
]


@pytest.mark.parametrize(("tool_format", "text", "expected"), GOLDEN)
def test_calls_are_read_as_the_format_writes_them(
    tool_format: str, text: str, expected: list[str | Call] | None
) -> None:
    assert reply(tool_format, text) == (expected if expected is not None else [PARIS, TIME])


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
@pytest.mark.parametrize("text", ["", " ", "\n\n", "Hello.", " Hello. \n", "a < b [c] {d} `e`", "<", "[", "{", "```"])
def test_text_without_calls_is_unchanged(tool_format: str, text: str) -> None:
    assert read(tool_format, [text]) == ([Text(text)] if text else [])


@pytest.mark.parametrize("tool_format", ["hermes", "llama3", "deepseek_v31", "mistral", "mistral_named", "plain"])
def test_arguments_come_as_soon_as_they_are_written(tool_format: str) -> None:
    chosen = TOOL_FORMATS[tool_format]
    before, after = chosen.around("get_weather")
    parser = chosen.parser(("get_weather",), 1)
    first = parser.feed(chosen.opening + before + "{")
    assert [type(part) for part in first] == [CallStarted, CallArguments]
    for c in '"city": "Pa':
        assert parser.feed(c) == [CallArguments(0, c)]
    assert parser.feed('ris"}') == [CallArguments(0, 'ris"}'), CallEnded(0)]
    assert parser.feed(after + chosen.closing) == []
    assert parser.feed_end("stop") == []


def test_text_waits_only_while_it_may_begin_a_marker() -> None:
    parser = TOOL_FORMATS["hermes"].parser((), 1)
    assert parser.feed("a <tool") == [Text("a")]
    assert parser.feed("_box> b") == [Text(" <tool_box> b")]
    assert parser.feed("<tool_call") == []
    assert parser.feed_end("length") == [Text("<tool_call")]


CUT = [
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa', Call("get_weather", '{"city": "Pa')),
    ("llama3", '{"name": "get_weather", "parameters": {"city": "Pa', Call("get_weather", '{"city": "Pa')),
    ("deepseek_v3", f'{CALLS_BEGIN}{BEGIN}function{SEP}get_weather\n```json\n{{"', Call("get_weather", '{"')),
    ("deepseek_v31", f"{CALLS_BEGIN}{BEGIN}get_weather{SEP}{{", Call("get_weather", "{")),
    ("mistral", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Pa', Call("get_weather", '{"city": "Pa')),
    ("mistral_named", '[TOOL_CALLS]get_weather[ARGS]{"city": "Pa', Call("get_weather", '{"city": "Pa')),
    ("plain", '{"name": "get_weather", "arguments": {"city": "Pa', Call("get_weather", '{"city": "Pa')),
]


@pytest.mark.parametrize("reason", ["length", "stop"])
@pytest.mark.parametrize(("tool_format", "text", "call"), CUT)
def test_a_call_that_the_end_of_the_reply_cuts_is_reported_as_cut(
    tool_format: str, text: str, call: Call, reason: str
) -> None:
    assert reply(tool_format, text, reason) == [Call(call.name, call.arguments, Ending.CUT)]


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "get_time"'),
        ("hermes", '<tool_call>\n{"name": "get_time", "argum'),
        ("llama3", '{"name": "get_time", "parameters": '),
        ("mistral_named", "[TOOL_CALLS]get_time[ARGS]"),
        ("plain", '{"name": "get_time", '),
    ],
)
def test_a_call_cut_by_length_behind_its_name_is_a_cut_call_and_otherwise_text(tool_format: str, text: str) -> None:
    assert reply(tool_format, text, "length") == [Call("get_time", "", Ending.CUT)]
    assert reply(tool_format, text, "stop") == [text]


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "get_ti'),
        ("mistral_named", "[TOOL_CALLS]get_ti"),
        ("deepseek_v31", f"{CALLS_BEGIN}{BEGIN}get_ti"),
    ],
)
def test_a_call_cut_within_its_name_is_text(tool_format: str, text: str) -> None:
    assert reply(tool_format, text, "length") == [text]


def test_what_closes_a_complete_call_is_no_text_when_it_is_cut() -> None:
    assert reply("hermes", '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool', "length") == [TIME]
    assert reply("hermes", '<tool_call>\n{"name": "get_time", "arguments": {}', "length") == [TIME]
    assert reply("mistral", '[TOOL_CALLS][{"name": "get_time", "arguments": {}}, ', "length") == [TIME]


MALFORMED = [
    ("hermes", "<tool_call>\nnothing\n</tool_call>"),
    ("hermes", "<tool_call></tool_call>"),
    ("hermes", '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "a\\ud800", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": 7}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "\\ud800"}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{name: "f"}</tool_call>'),
    ("hermes", "<tool_call>[]</tool_call>"),
    ("hermes", '<tool_call>{"x": 01, "name": "f"}</tool_call>'),
    ("hermes", '<tool_call>{"x": tru, "name": "f"}</tool_call>'),
    ("llama3", '{"name": "get_time", "parameters": 7}'),
    ("llama3", '{"parameters": {}}'),
    ("deepseek_v3", f"{CALLS_BEGIN}{CALLS_END}"),
    ("deepseek_v3", f"{CALLS_BEGIN}{BEGIN}function{SEP}get_time\n{{}}{END}"),
    ("deepseek_v3", f"{BEGIN}get time{SEP}{{}}{END}"),
    ("deepseek_v31", f"{BEGIN}{SEP}{{}}{END}"),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS][]"),
    ("mistral", "[TOOL_CALLS][1, 2]"),
    ("mistral_named", "[TOOL_CALLS]f[ARGS][1]"),
    ("mistral_named", "[TOOL_CALLS]f[CALL_ID]{}"),
    ("mistral_named", "[TOOL_CALLS]f g[ARGS]{}"),
    ("plain", '{"name": "get_time", "arguments": {}'.replace("{}", "7}")),
    ("plain", '[{"name": "get_time", "arguments": true}]'),
]


@pytest.mark.parametrize(("tool_format", "text"), MALFORMED)
def test_a_malformed_call_is_text_unchanged(tool_format: str, text: str) -> None:
    assert read(tool_format, [f"a {text} b"]) == [Text(f"a {text} b")]
    assert read(tool_format, [text], "length") == [Text(text)]


def test_arguments_that_go_wrong_end_the_call_and_the_rest_is_text() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call> b'
    assert reply("hermes", text) == [Call("f", '{"a": ', Ending.MALFORMED), "oops}}</tool_call> b"]


def test_a_malformed_call_does_not_take_the_next_one_with_it() -> None:
    text = '<tool_call>{nothing}</tool_call>\n<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
    assert reply("hermes", text) == ["<tool_call>{nothing}</tool_call>", TIME]


def test_line_breaks_within_arguments_come_out_as_json() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"code": "a\n\tb"}}</tool_call>'
    assert reply("hermes", text) == [Call("f", '{"code": "a\\u000a\\u0009b"}')]


def test_ids_are_made_by_the_random_numbers_that_are_handed_in() -> None:
    text = [GOLDEN[1][1]]
    assert read("hermes", text, seed=1) == read("hermes", text, seed=1) != read("hermes", text, seed=2)


@pytest.mark.parametrize(
    ("template", "tool_format"),
    [
        ('... <tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>', "hermes"),
        ("<tool_call>\\n<function=example>\\n<parameter=a>\\n</function>\\n</tool_call>", "plain"),
        ("<tool_call>{name}\\n<arg_key>{k}</arg_key>", "plain"),
        ("'<|start_header_id|>' ... '\"parameters\": ' tool_call.arguments | tojson", "llama3"),
        ('<|start_header_id|> Respond in the format {"name": name, "parameters": dict}. <|python_tag|>', "llama3"),
        ("{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>' }}", "plain"),
        (f"'{CALLS_BEGIN}{BEGIN}' + tool['type'] + '{SEP}' + name + '\\n' + '```json'", "deepseek_v3"),
        (f"'{CALLS_BEGIN}{BEGIN}' + name + '{SEP}' + tool['function']['arguments']", "deepseek_v31"),
        ('{{- "[TOOL_CALLS][" }}', "mistral"),
        ("'[TOOL_CALLS]' + tool['function']['name'] + '[ARGS]' + arguments", "mistral_named"),
        ("{{ '<|im_start|>' + message['role'] }}", "plain"),
        ("", "plain"),
        (None, "plain"),
    ],
)
def test_the_format_is_seen_in_the_chat_template(template: str | None, tool_format: str) -> None:
    assert format_of(template) is TOOL_FORMATS[tool_format]
