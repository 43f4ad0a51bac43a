"""Mistral: calls after [TOOL_CALLS], in two forms.

    until 2025:  [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "a1b2c3d4e"}]
    newer:       [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}

The newer form has a marker for each call. With some models it also has `[CALL_ID]` and an id before `[ARGS]`; the ids
are not used. Sources: the chat templates of mistralai/Mistral-7B-Instruct-v0.3, Mistral-Nemo-Instruct-2407,
Mistral-Small-3.1-24B-Instruct-2503 and Devstral-Small-2, and mistral-common's tokenizers v3 to v13.
"""

from __future__ import annotations

import re
from dataclasses import replace

from serve_app.model.tools.calls import LONGEST_NAME
from serve_app.model.tools.parser import ReplyParser
from serve_app.model.tools.source import Steps
from serve_app.model.tools.tool_format import ToolFormat

TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MARKERS = (TOOL_CALLS, CALL_ID, ARGS)

_NAME_CHARACTERS = re.compile(r"[A-Za-z0-9_.:/-]+")


class MistralParser(ReplyParser):
    """Reads calls of both forms, and an array without its marker at the beginning of the reply."""

    _first = "["

    def _text_and_calls(self) -> Steps[None]:
        if (yield from self._source.skip_space()) == "[":
            self._source.at += 1
            if (yield from self._source.next_char()) == TOOL_CALLS[1]:  # the marker: no array begins like this
                if (yield from self._source.skip(TOOL_CALLS[1:])):
                    yield from self._read_call()
                else:
                    self._calls.end_attempt()
            elif not (yield from self._calls.read_array(marked=False)):
                self._calls.end_attempt()
        while (yield from self._text_until((TOOL_CALLS,))):
            yield from self._read_call()

    def _read_call(self) -> Steps[None]:
        c = yield from self._source.skip_space()
        if c == "[":
            self._source.at += 1
            called = yield from self._calls.read_array()
        elif c == "{":
            called = yield from self._calls.read_object()
        else:
            called = yield from self._read_named_call()
        if not called:
            self._calls.end_attempt()

    def _read_named_call(self) -> Steps[bool]:
        source = self._source
        name = yield from source.skip_span(_NAME_CHARACTERS, LONGEST_NAME)
        if (yield from source.next_char()) == "[":
            marker = yield from source.skip_any((CALL_ID, ARGS))
            if marker == CALL_ID:
                yield from source.skip_span(_NAME_CHARACTERS, LONGEST_NAME)
                marker = ARGS if (yield from source.skip(ARGS)) else ""
            if not marker:
                return False
            yield from source.skip_space()
        elif source.is_over:
            return False
        return (yield from self._calls.read_arguments(name))


ARRAY = ToolFormat(
    "mistral",
    MistralParser,
    '{"name": "NAME", "arguments": ARGUMENTS}',
    lambda template: TOOL_CALLS in template and ARGS not in template,
    separator=", ",
    opening=TOOL_CALLS + "[",
    closing="]",
    markers=MARKERS,
    begins=TOOL_CALLS,
    bare="[",
    nine_letter_ids=True,
)
NAMED = replace(
    ARRAY,
    name="mistral_named",
    call=TOOL_CALLS + "NAME" + ARGS + "ARGUMENTS",
    used_by=lambda template: TOOL_CALLS in template and ARGS in template,
    separator="",
    opening="",
    closing="",
)
