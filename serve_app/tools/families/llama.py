"""Llama 3: the reply is a JSON object, with or without a tag before it.

    {"name": "get_weather", "parameters": {"city": "Paris"}}
    <|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}

Several calls, which these models were not made for but do write, come side by side or with semicolons in between.
After the tag there may also be Python code, for the built-in tools; no call of ours, so it stays text. Sources: the
chat templates of meta-llama/Llama-3.1-8B-Instruct and Llama-3.2-3B-Instruct, and Meta's page "Model Cards and Prompt
Formats: Llama 3.1" (user-defined and built-in tool calling).
"""

from __future__ import annotations

import json

from serve_app.tools.parser import Parser
from serve_app.tools.source import Steps

PYTHON_TAG = "<|python_tag|>"


class LlamaParser(Parser):
    """Reads calls after a tag, and untagged ones of offered functions at the reply's beginning."""

    _first = "{"

    def _reply(self) -> Steps[None]:
        if (yield from self._source.space()) == "{":
            yield from self._objects(marked=False)
        while not self._only_first and (yield from self._text((PYTHON_TAG,))):
            if (yield from self._source.space()) == "{":
                yield from self._objects(marked=True)
            else:
                self._calls.release()

    def _objects(self, marked: bool) -> Steps[None]:
        if (yield from self._calls.object(marked)):
            yield from self._more_objects(marked)
        else:
            self._calls.release()


def around(name: str) -> tuple[str, str]:
    """The text before and after a call's arguments."""
    return f'{{"name": {json.dumps(name)}, "parameters": ', "}"
