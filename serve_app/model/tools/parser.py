"""The frame of every parser of replies: text goes in as it comes, parts come out as soon as they are certain.

A reply is reasoning, where the model has markers for it, then text and calls. Of a reply without reasoning and calls,
the texts together are the reply to the character. White space between calls, before the first and after the last
belongs to them and is dropped, as are their markers; every other character is in exactly one text or in the arguments
of a call. A call that goes wrong before its name and the beginning of its arguments are known comes out as the text
that it is. Nothing that a model writes raises.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Collection, Iterable
from dataclasses import replace

from serve_app.contracts.generation import CallArguments, Part, Reasoning, Text
from serve_app.model.tools.calls import CallReader
from serve_app.model.tools.reasoning import Markers, read_reasoning
from serve_app.model.tools.source import Source, Steps

_WithText = Reasoning | Text | CallArguments


class ReplyParser:
    """Parses one reply. This class finds no calls; each format of calls has a subclass.

    `offered` are the names of the functions in the prompt, `seed` decides the ids of calls. With `only_first` there
    are calls only at the beginning: a reply that begins otherwise is text whatever it contains, and so is what a
    format takes for calls only where it stands alone. `markers` are those of reasoning, None for a model without;
    `left_open` says that the prompt has the first one already.
    """

    _first = ""  # the characters that calls at the beginning of a reply can begin with

    def __init__(
        self,
        offered: Collection[str] = (),
        seed: int | str = 0,
        only_first: bool = False,
        markers: Markers | None = None,
        left_open: bool = False,
    ) -> None:
        self._source = Source()
        self._calls = CallReader(self._source, offered, random.Random(seed))
        self._only_first = only_first
        self._steps = self._whole_reply(markers, left_open)
        self._proceed()

    def feed(self, text: str) -> list[Part]:
        """What is certain now that `text` has come."""
        self._source.feed(text)
        return self._proceed()

    def feed_end(self, reason: str) -> list[Part]:
        """What was held back until the end of the reply, which ended for this reason; "length" cuts calls short.

        A call that is open ends as cut. One that was not open yet is cut only when its name was known and the reply
        ended by its length; otherwise it is text.
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
        """The format's grammar. What comes after its end is text."""
        return
        yield

    def _proceed(self) -> list[Part]:
        try:
            next(self._steps)
        except StopIteration:
            self._source.at = len(self._source.text)
            self._calls.keep_as_text()
        self._source.pass_on()  # arguments do not wait for the next text
        parts = merged(self._calls.parts)
        self._calls.parts.clear()
        return parts

    def _text_until(self, openers: tuple[str, ...], closers: tuple[str, ...] = ()) -> Steps[str]:
        """Read text up to one of `openers`, which is stepped over and held; empty at the end of the reply.

        `closers` right after a call belong to it, at the end of the reply even their beginnings; otherwise they are
        text.
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
        """At the end of the reply: what is held may still belong to the call before."""
        if self._calls.after_call:
            self._calls.drop_held()
        else:
            self._calls.keep_as_text()


def merged(parts: Iterable[Part]) -> list[Part]:
    """The same parts with neighbours of one kind joined, and none without text.

    Text is joined once: a reply in many small pieces takes linear time.
    """
    result: list[Part] = []
    nonempty = (part for part in parts if getattr(part, "text", True))
    for _, run in itertools.groupby(nonempty, lambda part: (type(part), getattr(part, "index", None))):
        first, *rest = run
        if isinstance(first, _WithText):
            first = replace(first, text="".join(part.text for part in (first, *rest) if isinstance(part, _WithText)))
        result.append(first)
    return result
