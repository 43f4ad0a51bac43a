"""The frame of every tool-call parser: text goes in as it comes, parts come out as soon as they are certain.

Of a reply without calls, the texts together are the reply to the character. White space between calls, before the
first and after the last belongs to them and is dropped, as are their markers; every other character is in exactly one
text or in a call's arguments. A call that goes wrong before its name and the beginning of its arguments are known
comes out as the text that it is; nothing that a model writes raises.
"""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Collection

from serve_app.tools.calls import CallReader
from serve_app.tools.parts import Part, merged
from serve_app.tools.source import Source, Steps

_SPACE = " \t\r\n"


class Parser(ABC):
    """Reads one reply.

    `offered` are the names of the functions that the model was told about, `rng` makes the calls' ids. With
    `only_first` there are calls only at the reply's beginning: one that begins otherwise is text whatever is in it,
    and so is what a family takes for calls only where it stands alone.
    """

    _first: str  # characters that calls at the reply's beginning can begin with

    def __init__(self, offered: Collection[str], rng: random.Random, only_first: bool = False) -> None:
        self._source = Source()
        self._calls = CallReader(self._source, offered, rng)
        self._only_first = only_first
        self._grammar = self._beginning() if only_first else self._reply()
        self._proceed()

    def push(self, text: str) -> list[Part]:
        """What is certain now that `text` has come."""
        self._source.append(text)
        return self._proceed()

    def finish(self, reason: str) -> list[Part]:
        """What was held back, at the end of the reply. `reason` is why it ended; "length" cuts calls short.

        A call that is open ends as cut. One that was not open yet is cut only when its name was known and the reply
        ended by its length; else it is text.
        """
        self._source.ended = True
        self._calls.by_length = reason == "length"
        return self._proceed()

    @abstractmethod
    def _reply(self) -> Steps[None]:
        """The family's grammar of a reply; returns at its end."""

    def _beginning(self) -> Steps[None]:
        c = yield from self._source.space()
        if c and c in self._first:
            yield from self._reply()

    def _proceed(self) -> list[Part]:
        try:
            next(self._grammar)
        except StopIteration:
            self._source.at = len(self._source.text)
            self._calls.release()
        self._source.flush()  # arguments don't wait for the next push
        parts = merged(self._calls.parts)
        self._calls.parts.clear()
        return parts

    def _text(self, openers: tuple[str, ...], closers: tuple[str, ...] = ()) -> Steps[str]:
        """Read text up to one of `openers`, which is stepped over and held; empty at the end of the reply.

        `closers` right after a call belong to it, at the end of the reply even their beginnings; else they are text.
        """
        markers = (*openers, *closers)
        first = re.compile("[" + "".join(sorted({re.escape(marker[0]) for marker in markers})) + "]")
        source = self._source
        while (yield from source.more()):
            found = first.search(source.text, source.at)
            self._plain(found.start() if found else len(source.text))
            if found:
                marker = yield from source.any_of(markers)
                if marker in openers:
                    return marker
                if self._calls.after_call and (marker or (source.over and source.holds_beginning_of(closers))):
                    self._calls.drop()
                else:
                    self._calls.release()
        self._rest()
        return ""

    def _plain(self, end: int) -> None:
        """The source's text up to `end` is plain, but white space at its end may belong to a call."""
        source = self._source
        solid = source.at + len(source.text[source.at : end].rstrip(_SPACE))
        if solid > source.at:
            source.at = solid
            self._calls.release()
        source.at = end

    def _rest(self) -> None:
        """At the end of the reply: what is held may still belong to the call before."""
        if self._calls.after_call:
            self._calls.drop()
        else:
            self._calls.release()

    def _more_objects(self, marked: bool) -> Steps[None]:
        """Read the calls that follow one, objects too: side by side, or with commas or semicolons in between."""
        source = self._source
        c = yield from source.space()
        while c and c in ",;{":
            if c != "{":
                source.at += 1
                c = yield from source.space()
            if c != "{":
                break
            if not (yield from self._calls.object(marked)):
                self._calls.release()
                break
            c = yield from source.space()
