"""DeepSeek: calls between special tokens, in two forms.

    V3, R1:  <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
             ```json
             {"city": "Paris"}
             ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
    V3.1:    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>
             <｜tool▁calls▁end｜>  (all in one line)

Further calls follow within the outer pair, in V3 after a line break. Sources: the chat templates of
deepseek-ai/DeepSeek-V3-0324, DeepSeek-R1 and DeepSeek-V3.1, and the section on tool calls of DeepSeek-V3.1's model
card.
"""

from __future__ import annotations

import re

from serve_app.tools.calls import LONGEST_NAME
from serve_app.tools.parser import Parser
from serve_app.tools.source import Steps

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
MARKERS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)
FENCE = "```"

_OF_NAMES = re.compile(r"[^\s<{`]+")
_OF_WORDS = re.compile(r"[a-z]+")


class DeepSeekParser(Parser):
    """Reads calls of both forms, with the outer markers or without."""

    _first = CALLS_BEGIN[0]

    def _reply(self) -> Steps[None]:
        source = self._source
        while marker := (yield from self._text((CALLS_BEGIN, CALL_BEGIN), (CALL_END, CALLS_END))):
            if marker == CALLS_BEGIN:
                yield from source.space()
                if not (yield from source.constant(CALL_BEGIN)):
                    self._calls.release()
                    continue
            if not (yield from self._call()):
                self._calls.release()

    def _call(self) -> Steps[bool]:
        source = self._source
        yield from source.space()
        name = yield from source.run(_OF_NAMES, LONGEST_NAME)
        if not (yield from source.constant(SEPARATOR)):
            return False
        c = yield from source.space()
        fenced = bool(c) and c != "{"
        if fenced:
            name = yield from source.run(_OF_NAMES, LONGEST_NAME)
            yield from source.space()
            if not (yield from source.constant(FENCE)):
                return False
            yield from source.run(_OF_WORDS, LONGEST_NAME)
            yield from source.space()
        called = yield from self._calls.arguments(name)
        if called and fenced:
            yield from source.space()
            if (yield from source.constant(FENCE)) or source.over:
                self._calls.drop()
        return called


def around(name: str) -> tuple[str, str]:
    """The text before and after a call's arguments, as V3 and R1 write it."""
    return f"{CALL_BEGIN}function{SEPARATOR}{name}\n{FENCE}json\n", f"\n{FENCE}{CALL_END}"


def around_v31(name: str) -> tuple[str, str]:
    """The text before and after a call's arguments, as V3.1 writes it."""
    return f"{CALL_BEGIN}{name}{SEPARATOR}", CALL_END
