"""Reasoning is separated from content."""

from __future__ import annotations

import pytest

from serve_app.contracts.generation import CallStarted, Part, Reasoning, Text
from serve_app.model.tools.format_table import TOOL_FORMATS
from serve_app.model.tools.parser import ReplyParser
from serve_app.model.tools.reasoning import Markers, markers_of

THINK = Markers("<think>", "</think>")


def split(reply: str, left_open: bool = False) -> list[Part]:
    parser = ReplyParser(markers=THINK, left_open=left_open)
    return [*parser.feed(reply), *parser.feed_end("stop")]


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", [Reasoning("Hm."), Text("Yes.")]),
        ("\n<think>Hm.</think>Yes.", [Reasoning("Hm."), Text("Yes.")]),
        ("<think>\n\n</think>\n\nYes.", [Text("Yes.")]),
        ("<think>\nHm.", [Reasoning("Hm.")]),
        ("Yes.", [Text("Yes.")]),
        (" Yes.\n", [Text(" Yes.\n")]),
        ("<thinking>Yes.", [Text("<thinking>Yes.")]),
        ("What does <think>a</think> mean?", [Text("What does <think>a</think> mean?")]),
        ("<think>a</think>b<think>c</think>", [Reasoning("a"), Text("b<think>c</think>")]),
        ("<think>a </thin b</think>c", [Reasoning("a </thin b"), Text("c")]),
        ("Hm.</think>Yes.", [Text("Hm.</think>Yes.")]),
        ("", []),
    ],
)
def test_reasoning_at_the_beginning_is_separated_from_content(reply: str, expected: list[Part]) -> None:
    assert split(reply) == expected


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("\nHm.\n</think>\n\nYes.", [Reasoning("Hm."), Text("Yes.")]),
        ("<think>\nHm.\n</think>Yes.", [Reasoning("Hm."), Text("Yes.")]),  # the marker again
        ("</think>Yes.", [Text("Yes.")]),
        ("Hm. a < b", [Reasoning("Hm. a < b")]),
    ],
)
def test_a_prompt_that_ends_with_the_marker_has_begun_the_reasoning(reply: str, expected: list[Part]) -> None:
    assert split(reply, left_open=True) == expected


def test_reasoning_comes_while_it_is_thought() -> None:
    parser = ReplyParser(markers=THINK)
    assert parser.feed("<think>") == []
    assert parser.feed("\nfirst ") == [Reasoning("first")]
    assert parser.feed("second") == [Reasoning(" second")]
    assert parser.feed("</thi") == []
    assert parser.feed("nk>\n\nYes") == [Text("Yes")]
    assert parser.feed(" \n") == [Text(" \n")]
    assert parser.feed_end("stop") == []


def test_calls_that_are_only_thought_of_are_reasoning() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parser = TOOL_FORMATS["hermes"].parser(["f"], markers=THINK)
    parts = [*parser.feed(f"<think>I could say {call}</think>\n{call}"), *parser.feed_end("stop")]
    assert parts[0] == Reasoning(f"I could say {call}")
    assert isinstance(parts[1], CallStarted)


def test_without_markers_and_tools_all_is_text() -> None:
    parser = ReplyParser()
    assert parser.feed("<think> <tool_call>") == [Text("<think> <tool_call>")]
    assert parser.feed_end("stop") == []


@pytest.mark.parametrize(
    ("template", "markers"),
    [
        ("{%- if '</think>' in content %} ... {{- '<think>\\n\\n</think>\\n\\n' }}", THINK),
        ("{{'<｜Assistant｜><think>\\n'}} ... content.split('</think>')[-1]", THINK),
        ("[THINK]' + chunk + '[/THINK]'", Markers("[THINK]", "[/THINK]")),
        ("{{ '<|im_start|>' + message['role'] }}", None),
        (None, None),
    ],
)
def test_the_markers_are_seen_in_the_chat_template(template: str | None, markers: Markers | None) -> None:
    assert markers_of(template) == markers


@pytest.mark.parametrize(
    ("prompt", "left_open"),
    [
        ("<｜User｜>Hi<｜Assistant｜><think>\n", True),
        ("<|im_start|>assistant\n<think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<｜Assistant｜></think>", False),
        ("<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n", False),
        ("", False),
    ],
)
def test_the_rendered_prompt_says_whether_reasoning_has_begun(prompt: str, left_open: bool) -> None:
    assert THINK.left_open(prompt) is left_open
