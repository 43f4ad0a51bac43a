"""Hostile replies: reading them takes linear time and never raises."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import pytest

from serve_app.contracts.generation import Ending, Text
from serve_app.model.tools.format_table import TOOL_FORMATS
from serve_app.model.tools.parser import ReplyParser
from serve_app.model.tools.reasoning import MARKERS
from serve_app.model.tools.source import MAX_DEPTH
from tests.model.tools.reading import Call, read, reply, summary
from tests.processor_time import at_most

SIZE = 1_000_000  # characters

LONG: dict[str, Callable[[int], str]] = {
    "words": lambda size: "word " * (size // 5),
    "blanks": lambda size: " \n" * (size // 2),
    "brackets": lambda size: "<[{" * (size // 3),
    "half markers": lambda size: "<tool_cal" * (size // 9),
    "markers": lambda size: "<tool_call>" * (size // 11),
    "other markers": lambda size: "[TOOL_CALLS]<|python_tag|><｜tool▁calls▁begin｜>" * (size // 46),
    "an unclosed string": lambda size: '<tool_call>{"' + "x" * size,
    "backslashes": lambda size: '<tool_call>{"name": "f", "arguments": {"' + "\\\\" * (size // 2),
    "a long name": lambda size: '<tool_call>{"name": "' + "f" * size + '", "arguments": {}}</tool_call>',
    "a long bare name": lambda size: "[TOOL_CALLS]" + "f" * size + "[ARGS]{}",
    "a long number": lambda size: '<tool_call>{"name": "f", "arguments": {"n": ' + "1" * size,
    "arguments before the name": lambda size: '<tool_call>{"arguments": {"a": "' + "x" * size + '"}, "name": "f"}',
    "arguments as text": lambda size: '<tool_call>{"name": "f", "arguments": "' + "x" * size + '"}',
    "deep arrays": lambda size: '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * size,
    "deep objects": lambda size: '{"name": "get_time", "arguments": ' + '{"a":' * (size // 5),
    "many values": lambda size: '<tool_call>{"name": "f", "arguments": {"a": [1' + ",1" * (size // 2),
    "many calls": lambda size: '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n' * (size // 54),
    "many objects": lambda size: '{"name": "get_time", "arguments": {}}\n' * (size // 38),
    "lines": lambda size: "{\n" * (size // 2),
}

TAKE_SECONDS = (
    "words", "half markers", "other markers", "a long number", "deep objects", "many values", "many calls",
    "many objects", "lines",
)  # fmt: skip


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in TAKE_SECONDS)) for kind in LONG]
)
def test_a_long_reply_is_read_in_linear_time(kind: str) -> None:
    """Quadratic work would take hours here: 10^12 steps."""
    text = LONG[kind](SIZE)
    tool_format = "hermes" if "<tool" in text else "mistral" if "[TOOL" in text else "plain"
    with at_most(20):
        summary(read(tool_format, [text]))
    with at_most(30):
        summary(read(tool_format, [text[at : at + 5] for at in range(0, len(text), 5)]))


def test_a_long_reasoning_is_split_in_linear_time() -> None:
    for text in ("<think>" + "</thin" * 150_000, "<think>" + " " * SIZE, "<think>" * 150_000):
        parser = ReplyParser(markers=MARKERS[0])
        with at_most(20):
            for at in range(0, len(text), 3):
                parser.feed(text[at : at + 3])
            parser.feed_end("stop")


def test_nesting_beyond_what_readers_of_json_take_ends_the_call() -> None:
    def nested(depth: int) -> str:
        return '{"a":' * (depth - 1) + "{}" + "}" * (depth - 1)

    fine, deeper = nested(MAX_DEPTH), nested(MAX_DEPTH + 1)
    wrap = '<tool_call>{{"name": "f", "arguments": {}}}</tool_call>'.format
    assert reply("hermes", wrap(fine)) == [Call("f", fine)]
    call, rest = reply("hermes", wrap(deeper))
    assert isinstance(call, Call)
    assert call.ending is Ending.MALFORMED
    assert wrap(deeper).endswith(str(rest))


def test_a_small_stack_is_enough_for_any_nesting() -> None:
    """The reader doesn't recurse: no depth and no recursion limit matters."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            for tool_format in TOOL_FORMATS:
                read(tool_format, [LONG["deep arrays"](200_000), LONG["deep objects"](200_000)])
        except BaseException as error:
            failures.append(error)

    limit = sys.getrecursionlimit()
    thread = threading.Thread(target=run)
    sys.setrecursionlimit(120)
    try:
        thread.start()
        thread.join()
    finally:
        sys.setrecursionlimit(limit)
    assert not failures


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_an_unclosed_string_stays_where_it_is(tool_format: str) -> None:
    assert read(tool_format, ['<tool_call>{"na', "me </tool_call> and so on"])[0] == Text(
        '<tool_call>{"name </tool_call> and so on'
    )


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_a_reply_may_be_pushed_in_empty_pieces(tool_format: str) -> None:
    assert read(tool_format, ["", "a", "", "", "b", ""]) == [Text("ab")]


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_finishing_twice_returns_nothing_twice(tool_format: str) -> None:
    parser = TOOL_FORMATS[tool_format].parser()
    assert parser.feed("x <") + parser.feed_end("stop") != []
    assert parser.feed_end("stop") == []
