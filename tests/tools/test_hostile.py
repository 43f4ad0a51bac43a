"""Replies that are made to hurt: they take linear time and never raise."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable

import pytest

from serve_app.tools import FAMILIES, Ending, ReasoningSplitter, Text
from serve_app.tools.json_text import MAX_DEPTH
from serve_app.tools.reasoning import MARKERS
from tests.tools.reading import Call, read, reply, summary

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


def seconds(family: str, pieces: list[str]) -> float:
    start = time.thread_time()
    summary(read(family, pieces))
    return time.thread_time() - start


@pytest.mark.parametrize("kind", LONG)
def test_a_long_reply_is_read_in_linear_time(kind: str) -> None:
    """Quadratic work would take hours here: 10^12 steps."""
    text = LONG[kind](SIZE)
    family = "hermes" if "<tool" in text else "mistral" if "[TOOL" in text else "plain"
    assert seconds(family, [text]) < 20
    assert seconds(family, [text[at : at + 5] for at in range(0, len(text), 5)]) < 30


def test_a_long_reasoning_is_split_in_linear_time() -> None:
    for text in ("<think>" + "</thin" * 150_000, "<think>" + " " * SIZE, "<think>" * 150_000):
        splitter = ReasoningSplitter(MARKERS[0])
        start = time.thread_time()
        for at in range(0, len(text), 3):
            splitter.push(text[at : at + 3])
        splitter.finish()
        assert time.thread_time() - start < 20


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
    """The reader doesn't recurse: neither its depth nor anyone's limit matters."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            for family in FAMILIES:
                read(family, [LONG["deep arrays"](200_000), LONG["deep objects"](200_000)])
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


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unclosed_string_stays_where_it_is(family: str) -> None:
    assert read(family, ['<tool_call>{"na', "me </tool_call> and so on"])[0] == Text(
        '<tool_call>{"name </tool_call> and so on'
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reply_may_be_pushed_in_empty_pieces(family: str) -> None:
    assert read(family, ["", "a", "", "", "b", ""]) == [Text("ab")]


@pytest.mark.parametrize("family", FAMILIES)
def test_finishing_twice_says_nothing_twice(family: str) -> None:
    parser = FAMILIES[family].parser((), random.Random(0))
    assert parser.push("x <") + parser.finish("stop") != []
    assert parser.finish("stop") == []
