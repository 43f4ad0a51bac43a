"""Mistral: calls after [TOOL_CALLS], in two forms.

    to 2025:  [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "a1b2c3d4e"}]
    newer:    [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}

The newer one has a marker for each call, and with some models `[CALL_ID]` and an id before `[ARGS]`; the ids are not
used. Sources: the chat templates of mistralai/Mistral-7B-Instruct-v0.3, Mistral-Nemo-Instruct-2407,
Mistral-Small-3.1-24B-Instruct-2503 and Devstral-Small-2, and mistral-common's tokenizers v3 to v13.
"""

from __future__ import annotations

import json
import re

from serve_app.tools.calls import LONGEST_NAME
from serve_app.tools.parser import Parser
from serve_app.tools.source import Steps

TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MARKERS = (TOOL_CALLS, CALL_ID, ARGS)

_OF_NAMES = re.compile(r"[A-Za-z0-9_.:/-]+")


class MistralParser(Parser):
    """Reads calls of both forms, and an array without its marker at the reply's beginning."""

    _first = "["

    def _reply(self) -> Steps[None]:
        if (yield from self._source.space()) == "[":
            self._source.at += 1
            if (yield from self._source.peek()) == TOOL_CALLS[1]:  # an array can't go on like this
                if (yield from self._source.constant(TOOL_CALLS[1:])):
                    yield from self._call()
                else:
                    self._calls.release()
            elif not (yield from self._calls.array(marked=False)):
                self._calls.release()
        while (yield from self._text((TOOL_CALLS,))):
            yield from self._call()

    def _call(self) -> Steps[None]:
        c = yield from self._source.space()
        if c == "[":
            self._source.at += 1
            called = yield from self._calls.array()
        elif c == "{":
            called = yield from self._calls.object()
        else:
            called = yield from self._named()
        if not called:
            self._calls.release()

    def _named(self) -> Steps[bool]:
        source = self._source
        name = yield from source.run(_OF_NAMES, LONGEST_NAME)
        if (yield from source.peek()) == "[":
            marker = yield from source.any_of((CALL_ID, ARGS))
            if marker == CALL_ID:
                yield from source.run(_OF_NAMES, LONGEST_NAME)
                marker = ARGS if (yield from source.constant(ARGS)) else ""
            if not marker:
                return False
            yield from source.space()
        elif source.over:
            return False
        return (yield from self._calls.arguments(name))


def around(name: str) -> tuple[str, str]:
    """The text before and after a call's arguments, within the array."""
    return f'{{"name": {json.dumps(name)}, "arguments": ', "}"


def around_named(name: str) -> tuple[str, str]:
    """The text before and after a call's arguments, in the newer form."""
    return f"{TOOL_CALLS}{name}{ARGS}", ""
