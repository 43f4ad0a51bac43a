"""The format for chat templates that use none of the other formats: calls as plain JSON on separate lines.

The system text from `messages.tools_as_text` asks the model for this form:

    {"name": "get_weather", "arguments": {"city": "Paris"}}

Small models also write an array of such objects, or put a code fence around them; the parser reads both. Only the name
of an offered function distinguishes a call from a reply that is JSON.
"""

from __future__ import annotations

import re

from serve_app.model.tools.parser import ReplyParser
from serve_app.model.tools.source import Steps
from serve_app.model.tools.tool_format import ToolFormat

FENCE = "```"

_WORD_CHARACTERS = re.compile(r"\w+")
_LONGEST_WORD = 32


class PlainParser(ReplyParser):
    """Reads calls of offered functions at the beginning of lines."""

    _first = "{[`"

    def _text_and_calls(self) -> Steps[None]:
        source = self._source
        while c := (yield from source.skip_space()):
            fenced = c == "`" and (yield from source.skip(FENCE))
            if fenced:
                yield from source.skip_span(_WORD_CHARACTERS, _LONGEST_WORD)
                c = yield from source.skip_space()
            if not (yield from self._read_calls(c)):
                self._calls.end_attempt()
            if fenced and self._calls.after_call:
                yield from source.skip_space()
                if (yield from source.skip(FENCE)) or source.is_over:
                    self._calls.drop_held()
            yield from self._read_line()
            if self._only_first and not self._calls.after_call:
                return
        self._end_text()

    def _read_calls(self, c: str) -> Steps[bool]:
        if c == "{" and (yield from self._calls.read_object(marked=False)):
            yield from self._calls.read_objects_after(marked=False)
            return True
        if c == "[":
            self._source.at += 1
            return (yield from self._calls.read_array(marked=False))
        return False

    def _read_line(self) -> Steps[None]:
        """Reads the rest of the line as text. White space at its end stays held, because a call may follow."""
        source = self._source
        while (yield from source.more()):
            end = source.text.find("\n", source.at)
            self._calls.add_text(source.take_text(end if end >= 0 else len(source.text)))
            if end >= 0:
                return


PLAIN = ToolFormat(
    "plain",
    PlainParser,
    '{"name": "NAME", "arguments": ARGUMENTS}',
    lambda template: True,
    separator="\n",
    bare="{[`",
    reads_tools=False,
    reads_calls=False,
    reads_results=False,
)
