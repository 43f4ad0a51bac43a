"""Reads replies in pieces and returns the result; also checks what holds for every reply."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass

from serve_app.contracts.generation import CallArguments, CallEnded, CallStarted, Ending, Part, Text
from serve_app.model.tools.format_table import TOOL_FORMATS
from serve_app.model.tools.parser import merged

OFFERED = ("get_weather", "get_time")


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str
    ending: Ending = Ending.COMPLETE


def read(
    tool_format: str, pieces: Iterable[str], reason: str = "stop", offered: Iterable[str] = OFFERED, seed: int = 0
) -> list[Part]:
    """All parts of a reply, neighbours joined."""
    parser = TOOL_FORMATS[tool_format].parser(tuple(offered), seed)
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return merged([*parts, *parser.feed_end(reason)])


def summary(parts: list[Part]) -> list[str | Call]:
    """Texts and calls in their order. Calls are numbered, have unique ids, and don't overlap."""
    result: list[str | Call] = []
    open_call: CallStarted | None = None
    arguments = ""
    ids: list[str] = []
    for part in parts:
        match part:
            case Text(text):
                assert open_call is None
                assert text
                result.append(text)
            case CallStarted(index, call_id, _):
                assert open_call is None
                assert index == len(ids)
                ids.append(call_id)
                open_call, arguments = part, ""
            case CallArguments(index, text):
                assert open_call is not None
                assert index == open_call.index
                arguments += text
            case CallEnded(index, ending):
                assert open_call is not None
                assert index == open_call.index
                if ending is Ending.COMPLETE:
                    assert isinstance(json.loads(arguments), dict)
                result.append(Call(open_call.name, arguments, ending))
                open_call = None
    assert open_call is None, "every call ends"
    assert len(set(ids)) == len(ids)
    return result


def reply(tool_format: str, text: str, reason: str = "stop") -> list[str | Call]:
    return summary(read(tool_format, [text], reason))


def cut_at(text: str, places: Iterable[int]) -> list[str]:
    """The text in pieces, cut at each of the places."""
    at = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in itertools.pairwise(at)]
