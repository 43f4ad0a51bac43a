"""For any cut of a reply into pieces, the result is the same, and no character is lost or sent twice."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serve_app.contracts.generation import Ending, Part, Reasoning, Text
from serve_app.model.tools.format_table import TOOL_FORMATS
from serve_app.model.tools.parser import ReplyParser, merged
from serve_app.model.tools.reasoning import MARKERS, Markers
from tests.model.tools.reading import OFFERED, Call, cut_at, read, summary

HARD = "你好，世界 👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301\u0323 क्षि \u202eabc\u202c 🇩🇪"


def written(tool_format: str, calls: list[tuple[str, str]]) -> str:
    """Calls as the format has them."""
    chosen = TOOL_FORMATS[tool_format]
    single = [arguments.join(chosen.around(name)) for name, arguments in calls]
    return chosen.opening + ("; " if chosen.separator is None else chosen.separator).join(single) + chosen.closing


def hard_replies(tool_format: str) -> list[str]:
    arguments = json.dumps(
        {HARD: [HARD, '</tool_call> [TOOL_CALLS] <｜tool▁call▁end｜> ``` \\ " }{']}, ensure_ascii=False
    )
    calls = written(tool_format, [("get_weather", arguments), ("get_time", "{}")])
    text = f"{HARD} < [ <tool_ [TOOL_ <｜tool▁ <|python_ {HARD}"
    before = "" if tool_format == "llama3" else f"{text}\n\n"
    return [before + calls, before + calls + "\n" + text, text + calls[: len(calls) // 2], calls[: len(calls) // 2]]


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_a_reply_cut_at_any_place_reads_the_same(tool_format: str) -> None:
    for reply in hard_replies(tool_format):
        whole = read(tool_format, [reply])
        assert read(tool_format, reply) == whole, "character by character"
        for at in range(len(reply) + 1):
            assert read(tool_format, [reply[:at], reply[at:]]) == whole


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_a_reply_cut_at_any_two_places_reads_the_same(tool_format: str) -> None:
    reply = written(tool_format, [("get_time", '{"é": "\\u00e9👩‍👧"}')]) + "\n." * 2
    whole = read(tool_format, [reply])
    for first in range(len(reply) + 1):
        for second in range(first, len(reply) + 1):
            assert read(tool_format, [reply[:first], reply[first:second], reply[second:]]) == whole


@pytest.mark.parametrize("reason", ["length", "stop"])
@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_a_reply_that_ends_anywhere_loses_no_text_and_no_argument(tool_format: str, reason: str) -> None:
    arguments = json.dumps({"city": HARD}, ensure_ascii=False)
    before = "" if tool_format == "llama3" else f"{HARD}\n"
    reply = before + written(tool_format, [("get_weather", arguments)])
    for end in range(len(reply) + 1):
        said = summary(read(tool_format, [reply[:end]], reason))
        calls = [part for part in said if isinstance(part, Call)]
        text = "".join(part for part in said if isinstance(part, str))
        assert len(calls) <= 1
        if not calls:
            assert text == reply[:end]
            continue
        assert text == HARD * bool(before)
        assert arguments.startswith(calls[0].arguments)
        started = reply.index(arguments)
        assert len(calls[0].arguments) == max(0, min(end - started, len(arguments)))


@pytest.mark.parametrize("reason", ["length", "stop"])
@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_a_required_call_that_is_cut_anywhere_is_no_text(tool_format: str, reason: str) -> None:
    arguments = [json.dumps({"city": city}) for city in ("Rome", HARD)]
    chosen = TOOL_FORMATS[tool_format]
    single = chosen.around("get_weather")
    replies = [chosen.opening + arguments[0].join(single) + chosen.closing]
    if chosen.separator is not None:
        replies.append(written(tool_format, [("get_weather", text) for text in arguments]))
    for reply in replies:
        for end in range(len(reply) + 1):
            parser = chosen.parser(OFFERED, only_calls=True)
            said = summary(merged([*parser.feed(reply[:end]), *parser.feed_end(reason)]))
            assert all(isinstance(part, Call) for part in said), reply[:end]
            cut = [part for part in said if isinstance(part, Call) and part.ending is not Ending.COMPLETE]
            assert len(said) - len(cut) == sum(f": {text}" in reply[:end] or text in reply[:end] for text in arguments)


@pytest.mark.parametrize("reason", ["length", "stop"])
@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_a_call_that_a_grammar_has_checked_and_that_is_cut_is_no_text(tool_format: str, reason: str) -> None:
    chosen = TOOL_FORMATS[tool_format]
    before = f"{HARD}\n" if chosen.begins else ""
    reply = before + written(tool_format, [("get_weather", '{"city": "Rome"}')])
    for end in range(len(before) + max(1, len(chosen.begins)), len(reply) + 1):
        parser = chosen.parser(OFFERED, only_first=not chosen.begins, checked=True)
        said = summary(merged([*parser.feed(reply[:end]), *parser.feed_end(reason)]))
        assert [part for part in said if isinstance(part, str)] == ([HARD] if before else []), reply[:end]
    parser = chosen.parser(OFFERED, only_first=not chosen.begins, checked=True)
    assert merged([*parser.feed("a <tool [TOOL_ <｜tool"), *parser.feed_end(reason)]) == [
        Text("a <tool [TOOL_ <｜tool")
    ]


# Pieces of what the formats write, in any order, as a confused model may generate them.
FRAGMENTS = sorted(
    {
        marker
        for tool_format in TOOL_FORMATS.values()
        for marker in (*tool_format.markers, *tool_format.around("get_time"), tool_format.opening, tool_format.closing)
    }
    | set('{}[]":,;\\\n `<(1n')
    | {'"name"', '"arguments"', '"parameters"', '"get_time"', "get_time", "{}", '{"a": 1}', "null", "true", "```json"}
    | {
        '{"name": "get_time", "arguments": {}}',
        "<",
        "<tool",
        "</tool_call",
        "[TOOL",
        "<｜",
        "é",
        "👩‍👧",
        "你",
        "  ",
        "\r\n",
    }
)


LONG = [pytest.mark.slow, pytest.mark.long]


@pytest.mark.parametrize("count", [20, pytest.param(150, marks=LONG)])
@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_any_reply_reads_the_same_in_any_pieces(tool_format: str, count: int) -> None:
    @settings(max_examples=count)
    @given(
        st.lists(st.sampled_from(FRAGMENTS), max_size=14),
        st.sampled_from(["stop", "length"]),
        st.lists(st.integers(0, 200), max_size=8),
    )
    def check(fragments: list[str], reason: str, places: list[int]) -> None:
        reply = "".join(fragments)
        whole = read(tool_format, [reply], reason)
        assert read(tool_format, cut_at(reply, places), reason) == whole
        assert read(tool_format, reply, reason) == whole
        in_order(whole, reply)
        if not any(isinstance(part, Call) for part in summary(whole)):
            assert whole == ([Text(reply)] if reply else [])

    check()


def in_order(parts: list[Part], reply: str) -> None:
    """All texts are in the reply, one after the other: no text is repeated or out of order."""
    at = 0
    for part in parts:
        if isinstance(part, Text):
            found = reply.find(part.text, at)
            assert found >= 0
            at = found + len(part.text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(max_size=8) | st.sampled_from(FRAGMENTS), JSON, max_size=3)
NAMES = st.sampled_from(OFFERED)
WRITERS: list[Callable[[object], str]] = [
    lambda value: json.dumps(value),
    lambda value: json.dumps(value, ensure_ascii=False),
    lambda value: json.dumps(value, indent=2, ensure_ascii=False),
    lambda value: json.dumps(value, separators=(",", ":")),
]


def without_surrogates(value: object) -> bool:
    return not re.search("[\ud800-\udfff]", json.dumps(value, ensure_ascii=False))


@pytest.mark.parametrize("count", [15, pytest.param(100, marks=LONG)])
@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_what_a_format_writes_is_read_back_verbatim(tool_format: str, count: int) -> None:
    @settings(max_examples=count)
    @given(
        calls=st.lists(st.tuples(NAMES, ARGUMENTS.filter(without_surrogates)), min_size=1, max_size=3),
        writer=st.sampled_from(WRITERS),
        text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<[{`"), max_size=20),
        places=st.lists(st.integers(0, 500), max_size=12),
    )
    @example(calls=[("get_time", {})], writer=WRITERS[0], text="", places=[])
    def check(
        calls: list[tuple[str, dict[str, object]]], writer: Callable[[object], str], text: str, places: list[int]
    ) -> None:
        told = [(name, writer(arguments)) for name, arguments in calls]
        text = "" if tool_format == "llama3" else text.rstrip(" \t\r\n")
        reply = (text + "\n" if text else "") + written(tool_format, told)
        said = summary(read(tool_format, cut_at(reply, places)))
        assert said == ([text] if text else []) + [Call(name, arguments) for name, arguments in told]

    check()


@pytest.mark.parametrize("markers", MARKERS, ids=lambda markers: markers.begin)
def test_reasoning_cut_at_any_place_is_split_the_same(markers: Markers) -> None:
    begin, end = markers.begin, markers.end
    for left_open in (False, True):
        for reply in (
            f"{begin}\n{HARD} {end[:-1]} {begin}\n\n{end}\n\n{HARD} {end}{begin}",
            f" {begin}{end}{HARD}",
            f"{HARD}{begin}x{end}",
            f"{begin}\n{HARD}  ",
            begin[:-1],
            "",
        ):
            whole = split([reply], markers, left_open)
            assert split(list(reply), markers, left_open) == whole
            for at in range(len(reply) + 1):
                assert split([reply[:at], reply[at:]], markers, left_open) == whole


def split(pieces: list[str], markers: Markers, left_open: bool) -> list[Part]:
    parser = ReplyParser(markers=markers, left_open=left_open)
    return merged([*(part for piece in pieces for part in parser.feed(piece)), *parser.feed_end("stop")])


@pytest.mark.parametrize("count", [30, pytest.param(200, marks=LONG)])
def test_reasoning_text_and_calls_come_apart_in_any_pieces(count: int) -> None:
    fragments = [*FRAGMENTS, "<think>", "</think>", "<think>\n", "\n</think>\n\n", "<thi", "</thin"]

    @settings(max_examples=count)
    @given(st.lists(st.sampled_from(fragments), max_size=12), st.booleans(), st.lists(st.integers(0, 200), max_size=8))
    def check(chosen: list[str], left_open: bool, places: list[int]) -> None:
        reply = "".join(chosen)

        def parts(of: list[str]) -> list[Part]:
            parser = TOOL_FORMATS["hermes"].parser(OFFERED, markers=MARKERS[0], left_open=left_open)
            return merged([*(part for piece in of for part in parser.feed(piece)), *parser.feed_end("stop")])

        whole = parts([reply])
        assert parts(cut_at(reply, places)) == whole
        assert parts(list(reply)) == whole
        assert not any(isinstance(part, Reasoning) for part in whole[1:]), "reasoning is in one piece, at the beginning"

    check()
