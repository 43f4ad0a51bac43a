"""Hostile replies: no character is copied often, and reading them never raises."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import pytest

from serve_app.contracts.generation import Ending, Text
from serve_app.model.tools import parser
from serve_app.model.tools.format_table import TOOL_FORMATS
from serve_app.model.tools.parser import ReplyParser
from serve_app.model.tools.reasoning import MARKERS
from serve_app.model.tools.source import MAX_DEPTH, Source
from tests.model.tools.reading import Call, read, reply, summary

SIZE = 20_000  # characters

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


class CountingSource(Source):
    """Counts the characters that it copies."""

    copied = 0

    def feed(self, text: str) -> None:
        super().feed(text)
        self.copied += len(self.text)

    def take_held(self) -> str:
        held = super().take_held()
        self.copied += len(held)
        return held

    def put_back_held(self) -> None:
        super().put_back_held()
        self.copied += len(self.text)

    def holds_beginning_of(self, constants: tuple[str, ...]) -> bool:
        self.copied += sum(map(len, self._held))
        return super().holds_beginning_of(constants)


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> list[CountingSource]:
    """The sources of the parsers that are made from here on."""
    made: list[CountingSource] = []

    def make() -> CountingSource:
        made.append(CountingSource())
        return made[-1]

    monkeypatch.setattr(parser, "Source", make)
    return made


@pytest.mark.parametrize("kind", LONG)
def test_no_character_of_a_long_reply_is_copied_often(kind: str, sources: list[CountingSource]) -> None:
    text = LONG[kind](SIZE)
    tool_format = "hermes" if "<tool" in text else "mistral" if "[TOOL" in text else "plain"
    whole = summary(read(tool_format, [text]))
    assert summary(read(tool_format, [text[at : at + 5] for at in range(0, len(text), 5)])) == whole
    for source in sources:
        assert source.copied < 4 * len(text)


def test_no_character_of_a_long_reasoning_is_copied_often(sources: list[CountingSource]) -> None:
    for text in ("<think>" + "</thin" * (SIZE // 6), "<think>" + " " * SIZE, "<think>" * (SIZE // 7)):
        reader = ReplyParser(markers=MARKERS[0])
        for at in range(0, len(text), 3):
            reader.feed(text[at : at + 3])
        reader.feed_end("stop")
        assert sources[-1].copied < 4 * len(text)


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
                read(tool_format, [LONG["deep arrays"](SIZE), LONG["deep objects"](SIZE)])
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
    reader = TOOL_FORMATS[tool_format].parser()
    assert reader.feed("x <") + reader.feed_end("stop") != []
    assert reader.feed_end("stop") == []
