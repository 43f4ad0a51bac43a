"""The base class of reply parsers: takes text as it arrives, and returns parts as soon as they are certain.

A reply consists of optional reasoning, if the model has markers for it, followed by text and calls. Without reasoning
and calls, the text parts joined together are exactly the reply. White space around calls is dropped, like their
markers. Every other character is in exactly one text part or in the arguments of a call. If a call becomes invalid
before its name and the beginning of its arguments are known, it is returned as text. The parser never raises an
exception.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Collection, Iterable

from msgspec.structs import replace

from serve_app.contracts.generation import CallArguments, Part, Reasoning, Text
from serve_app.model.tools.calls import CallReader
from serve_app.model.tools.reasoning import Markers, read_reasoning
from serve_app.model.tools.source import Source, Steps

_WithText = Reasoning | Text | CallArguments


class ReplyParser:
    """Parses one reply. This class finds no calls; each tool-call format has a subclass.

    `offered` has the names of the functions in the prompt. `seed` determines the ids of calls.

    - `only_first`: only calls at the beginning are read. Everything after other text is text, whatever it contains.
    - `markers`: the reasoning markers; None for a model without reasoning.
    - `left_open`: the prompt already contains the first reasoning marker.
    - `checked`: a grammar excludes text that begins like a call, so an incomplete call without a known name is dropped,
      not returned as text.
    - `only_calls`: the grammar excludes all text besides reasoning, so no text is returned.
    """

    _first = ""  # possible first characters of calls at the beginning of a reply

    def __init__(
        self,
        offered: Collection[str] = (),
        seed: int | str = 0,
        only_first: bool = False,
        markers: Markers | None = None,
        left_open: bool = False,
        checked: bool = False,
        only_calls: bool = False,
    ) -> None:
        self._source = Source()
        self._calls = CallReader(self._source, offered, random.Random(seed), checked, only_calls)
        self._only_first = only_first
        self._steps = self._read_reply(markers, left_open)
        self._proceed()

    def feed(self, text: str) -> list[Part]:
        """Adds `text` and returns the parts that are certain now."""
        self._source.feed(text)
        return self._proceed()

    def feed_end(self, reason: str) -> list[Part]:
        """Ends the reply and returns the parts that were held back. `reason` is the finish reason.

        A call that the end of the reply cuts off is returned as incomplete if its name and the beginning of its
        arguments are known. If only its name is known, it is returned as incomplete if `reason` is "length" or if a
        grammar has checked the reply. All other incomplete calls are text; if a grammar has checked the reply, they
        are dropped.
        """
        self._source.ended = True
        self._calls.by_length = reason == "length"
        return self._proceed()

    def _read_reply(self, markers: Markers | None, left_open: bool) -> Steps[None]:
        if markers is not None:
            yield from read_reasoning(self._source, markers, left_open, self._calls.parts)
        if self._only_first:
            c = yield from self._source.skip_space()
            if not c or c not in self._first:
                return
        yield from self._text_and_calls()

    def _text_and_calls(self) -> Steps[None]:
        """Reads text and calls in the format's syntax. When these steps end, the rest of the reply is plain text."""
        return
        yield

    def _proceed(self) -> list[Part]:
        try:
            next(self._steps)
        except StopIteration:
            self._source.at = len(self._source.text)
            self._calls.keep_as_text()
        self._source.pass_on()  # so arguments are returned now, not with the next text
        parts = merged(self._calls.parts)
        self._calls.parts.clear()
        return parts

    def _text_until(self, openers: tuple[str, ...], closers: tuple[str, ...] = ()) -> Steps[str]:
        """Reads text up to one of `openers` and returns the opener, which stays held. Returns "" at the reply's end.

        `closers` directly after a call belong to the call, and so does an incomplete closer at the end of the reply.
        Elsewhere, closers are text.
        """
        markers = (*openers, *closers)
        first = re.compile("[" + "".join(sorted({re.escape(marker[0]) for marker in markers})) + "]")
        source = self._source
        while (yield from source.more()):
            found = first.search(source.text, source.at)
            self._calls.add_text(source.take_text(found.start() if found else len(source.text)))
            if found:
                marker = yield from source.skip_any(markers)
                if marker in openers:
                    return marker
                if self._calls.after_call and (marker or (source.is_over and source.holds_beginning_of(closers))):
                    self._calls.drop_held()
                else:
                    self._calls.keep_as_text()
        self._end_text()
        return ""

    def _end_text(self) -> None:
        """Drops the text that is held at the end of the reply if it follows a call, or else adds it as plain text."""
        if self._calls.after_call:
            self._calls.drop_held()
        else:
            self._calls.keep_as_text()


def merged(parts: Iterable[Part]) -> list[Part]:
    """Joins adjacent parts of one kind and removes parts with empty text.

    Joins each text only once, so a reply in many small pieces takes linear time.
    """
    result: list[Part] = []
    nonempty = (part for part in parts if getattr(part, "text", True))
    for _, run in itertools.groupby(nonempty, lambda part: (type(part), getattr(part, "index", None))):
        first, *rest = run
        if isinstance(first, _WithText):
            first = replace(first, text="".join(part.text for part in (first, *rest) if isinstance(part, _WithText)))
        result.append(first)
    return result
