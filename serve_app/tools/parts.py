"""What a reply is made of, as it is read: reasoning, text, and tool calls piece by piece."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum


class Ending(StrEnum):
    """How a tool call ended."""

    COMPLETE = "complete"  # its arguments are one whole JSON object
    CUT = "cut"  # the reply ended within it
    MALFORMED = "malformed"  # its arguments turned out to be no JSON when some of them were out; the rest is text


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text between the reasoning markers."""

    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A tool call begins. `index` counts the calls of a reply from 0; `id` comes only here."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the call's arguments: all pieces together are JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The last that is said of a call. Calls don't overlap."""

    index: int
    ending: Ending = Ending.COMPLETE


Part = Reasoning | Text | CallStarted | CallArguments | CallEnded


def merged(parts: Iterable[Part]) -> list[Part]:
    """The same parts with neighbours of one kind joined, and none without text.

    Text is joined in one go: a reply in many small pieces stays linear.
    """
    result: list[Part] = []
    run: list[str] = []
    kind: Reasoning | Text | CallArguments | None = None

    def close() -> None:
        if kind is not None and run:
            result.append(replace(kind, text="".join(run)))
        run.clear()

    for part in parts:
        if not isinstance(part, Reasoning | Text | CallArguments):
            close()
            kind = None
            result.append(part)
        elif part.text:
            if kind is None or type(kind) is not type(part) or getattr(kind, "index", 0) != getattr(part, "index", 0):
                close()
                kind = part
            run.append(part.text)
    close()
    return result
