"""The base class of reply parsers: takes text as it arrives, and returns parts as soon as they are certain.

A reply is reasoning, if the model has markers for it, then text and calls. If a reply has no reasoning and no calls,
its texts together are exactly the reply. White space between calls, before the first and after the last belongs to the
calls and is dropped, as are their markers. Every other character is in exactly one text or in the arguments of a call.
A call that becomes invalid before its name and the beginning of its arguments are known is returned as text. No reply
of a model makes the parser raise.
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

    `offered` are the names of the functions in the prompt; `seed` determines the ids of calls. With `only_first`, calls
    can only be at the beginning. A reply that begins differently is text, whatever it contains. A form that the format
    reads as a call only if it stands alone is then text, too. With `checked`, a grammar allows no text that begins like
    a call, so a call that was cut before it is known is dropped. With `only_calls`, the grammar allows no text at all
    beside reasoning, and none is returned. `markers` are the reasoning markers, None for a model
    without reasoning. `left_open` says that the prompt already contains the first marker.
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
        self._steps = self._whole_reply(markers, left_open)
        self._proceed()

    def feed(self, text: str) -> list[Part]:
        """Adds `text` and returns the parts that are certain now."""
        self._source.feed(text)
        return self._proceed()

    def feed_end(self, reason: str) -> list[Part]:
        """Ends the reply and returns the parts that were held back. A `reason` of "length" cuts calls short.

        An open call ends as cut. A call that was not open yet is cut only if its name was known and the length limit
        ended the reply, or a grammar has checked it; otherwise it is text.
        """
        self._source.ended = True
        self._calls.by_length = reason == "length"
        return self._proceed()

    def _whole_reply(self, markers: Markers | None, left_open: bool) -> Steps[None]:
        if markers is not None:
            yield from read_reasoning(self._source, markers, left_open, self._calls.parts)
        if self._only_first:
            c = yield from self._source.skip_space()
            if not c or c not in self._first:
                return
        yield from self._text_and_calls()

    def _text_and_calls(self) -> Steps[None]:
        """Reads the reply by the format's grammar. Text after the end of the grammar is plain text."""
        return
        yield

    def _proceed(self) -> list[Part]:
        try:
            next(self._steps)
        except StopIteration:
            self._source.at = len(self._source.text)
            self._calls.keep_as_text()
        self._source.pass_on()  # returns arguments now instead of with the next text
        parts = merged(self._calls.parts)
        self._calls.parts.clear()
        return parts

    def _text_until(self, openers: tuple[str, ...], closers: tuple[str, ...] = ()) -> Steps[str]:
        """Reads text up to one of `openers`, which is skipped, held and returned. Returns "" at the end of the reply.

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
        """Handles the held text at the end of the reply. It may still belong to the call before it."""
        if self._calls.after_call:
            self._calls.drop_held()
        else:
            self._calls.keep_as_text()


def merged(parts: Iterable[Part]) -> list[Part]:
    """Returns the same parts, with adjacent parts of one kind joined and parts with empty text removed.

    Text is joined only once, so a reply in many small pieces takes linear time.
    """
    result: list[Part] = []
    nonempty = (part for part in parts if getattr(part, "text", True))
    for _, run in itertools.groupby(nonempty, lambda part: (type(part), getattr(part, "index", None))):
        first, *rest = run
        if isinstance(first, _WithText):
            first = replace(first, text="".join(part.text for part in (first, *rest) if isinstance(part, _WithText)))
        result.append(first)
    return result
