"""Any other model: calls as plain JSON on lines of their own, as `messages.describe` asks for.

    {"name": "get_weather", "arguments": {"city": "Paris"}}

An array of such objects and a fence of backquotes around them are understood too, because small models write them.
Only the name of an offered function tells a call from a reply that is JSON.
"""

from __future__ import annotations

import json
import re

from serve_app.tools.parser import Parser
from serve_app.tools.source import Steps

FENCE = "```"

_OF_WORDS = re.compile(r"\w+")
_LONGEST_WORD = 32


class PlainParser(Parser):
    """Reads calls of offered functions at the beginnings of lines."""

    _first = "{[`"

    def _reply(self) -> Steps[None]:
        source = self._source
        while c := (yield from source.space()):
            fenced = c == "`" and (yield from source.constant(FENCE))
            if fenced:
                yield from source.run(_OF_WORDS, _LONGEST_WORD)
                c = yield from source.space()
            if not (yield from self._at_beginning(c)):
                self._calls.release()
            if fenced and self._calls.after_call:
                yield from source.space()
                if (yield from source.constant(FENCE)) or source.over:
                    self._calls.drop()
            yield from self._line()
            if self._only_first and not self._calls.after_call:
                return
        self._rest()

    def _at_beginning(self, c: str) -> Steps[bool]:
        if c == "{" and (yield from self._calls.object(marked=False)):
            yield from self._more_objects(marked=False)
            return True
        if c == "[":
            self._source.at += 1
            return (yield from self._calls.array(marked=False))
        return False

    def _line(self) -> Steps[None]:
        """Read the rest of the line as text; not the white space at its end, where a call may follow."""
        source = self._source
        while (yield from source.more()):
            end = source.text.find("\n", source.at)
            self._plain(end if end >= 0 else len(source.text))
            if end >= 0:
                return


def around(name: str) -> tuple[str, str]:
    """The text before and after a call's arguments."""
    return f'{{"name": {json.dumps(name)}, "arguments": ', "}"
