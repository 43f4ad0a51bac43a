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
from dataclasses import replace

from serve_app.model.tools.calls import LONGEST_NAME
from serve_app.model.tools.parser import ReplyParser
from serve_app.model.tools.source import Steps
from serve_app.model.tools.tool_format import ToolFormat

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
MARKERS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)
FENCE = "```"

_NAME_CHARACTERS = re.compile(r"[^\s<{`]+")
_WORD_CHARACTERS = re.compile(r"[a-z]+")


class DeepSeekParser(ReplyParser):
    """Reads calls of both forms, with or without the outer markers."""

    _first = CALLS_BEGIN[0]

    def _text_and_calls(self) -> Steps[None]:
        source = self._source
        while marker := (yield from self._text_until((CALLS_BEGIN, CALL_BEGIN), (CALL_END, CALLS_END))):
            if marker == CALLS_BEGIN:
                yield from source.skip_space()
                if not (yield from source.skip(CALL_BEGIN)):
                    self._calls.end_attempt()
                    continue
            if not (yield from self._read_call()):
                self._calls.end_attempt()

    def _read_call(self) -> Steps[bool]:
        source = self._source
        yield from source.skip_space()
        name = yield from source.skip_span(_NAME_CHARACTERS, LONGEST_NAME)
        if not (yield from source.skip(SEPARATOR)):
            return False
        c = yield from source.skip_space()
        fenced = bool(c) and c != "{"
        if fenced:
            name = yield from source.skip_span(_NAME_CHARACTERS, LONGEST_NAME)
            yield from source.skip_space()
            if not (yield from source.skip(FENCE)):
                return False
            yield from source.skip_span(_WORD_CHARACTERS, LONGEST_NAME)
            yield from source.skip_space()
        called = yield from self._calls.read_arguments(name)
        if called and fenced:
            yield from source.skip_space()
            if (yield from source.skip(FENCE)) or source.is_over:
                self._calls.drop_held()
        return called


V3 = ToolFormat(
    "deepseek_v3",
    DeepSeekParser,
    f"{CALL_BEGIN}function{SEPARATOR}NAME\n{FENCE}json\nARGUMENTS\n{FENCE}{CALL_END}",
    lambda template: CALL_BEGIN in template and FENCE in template,
    separator="\n",
    opening=CALLS_BEGIN,
    closing=CALLS_END,
    markers=MARKERS,
    begins=CALLS_BEGIN,
    also_begins=(CALL_BEGIN,),
    reads_tools=False,
    # The templates concatenate the arguments with text, which fails for an object. R1's template writes calls only if
    # the content is null. So calls of earlier messages are inserted as text, which gives the same prompt.
    reads_calls=False,
)
V31 = replace(
    V3,
    name="deepseek_v31",
    call=f"{CALL_BEGIN}NAME{SEPARATOR}ARGUMENTS{CALL_END}",
    used_by=lambda template: CALL_BEGIN in template and FENCE not in template,
    separator="",
)
