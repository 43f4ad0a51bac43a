"""Reasoning comes apart from content."""

from __future__ import annotations

import random

import pytest

from serve_app.tools import FAMILIES, Markers, Reasoning, ReasoningSplitter, ReplyReader, Text, detect_reasoning
from serve_app.tools.parts import CallStarted, Part

THINK = Markers("<think>", "</think>")


def split(reply: str, left_open: bool = False) -> list[Part]:
    splitter = ReasoningSplitter(THINK, left_open)
    return [*splitter.push(reply), *splitter.finish()]


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
def test_reasoning_at_the_beginning_is_told_from_content(reply: str, expected: list[Part]) -> None:
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
    splitter = ReasoningSplitter(THINK)
    assert splitter.push("<think>") == []
    assert splitter.push("\nfirst ") == [Reasoning("first")]
    assert splitter.push("second") == [Reasoning(" second")]
    assert splitter.push("</thi") == []
    assert splitter.push("nk>\n\nYes") == [Text("Yes")]
    assert splitter.push(" \n") == [Text(" \n")]
    assert splitter.finish() == []


def test_calls_that_are_only_thought_of_are_reasoning() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    reader = ReplyReader(ReasoningSplitter(THINK), FAMILIES["hermes"].parser(["f"], random.Random(0)))
    parts = [*reader.push(f"<think>I could say {call}</think>\n{call}"), *reader.finish("stop")]
    assert parts[0] == Reasoning(f"I could say {call}")
    assert isinstance(parts[1], CallStarted)


def test_without_markers_and_tools_all_is_text() -> None:
    reader = ReplyReader()
    assert reader.push("<think> <tool_call>") == [Text("<think> <tool_call>")]
    assert reader.finish("stop") == []


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
    assert detect_reasoning(template) == markers


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
