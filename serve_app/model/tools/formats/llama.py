"""Llama 3: the reply is a JSON object, with or without a tag before it.

    {"name": "get_weather", "parameters": {"city": "Paris"}}
    <|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}

These models also write several calls, although they were not trained to. The calls are side by side or separated by
semicolons. After the tag there may also be Python code for the built-in tools, which stays text. Sources: the chat
templates of meta-llama/Llama-3.1-8B-Instruct and Llama-3.2-3B-Instruct, and Meta's page "Model Cards and Prompt
Formats: Llama 3.1" (user-defined and built-in tool calling).
"""

from __future__ import annotations

import re

from serve_app.model.tools.formats import hermes
from serve_app.model.tools.parser import ReplyParser
from serve_app.model.tools.source import Steps
from serve_app.model.tools.tool_format import ToolFormat

PYTHON_TAG = "<|python_tag|>"


class LlamaParser(ReplyParser):
    """Reads calls after a tag, and untagged calls of offered functions at the beginning of the reply."""

    _first = "{"

    def _text_and_calls(self) -> Steps[None]:
        if (yield from self._source.skip_space()) == "{":
            yield from self._read_objects(marked=False)
        while not self._only_first and (yield from self._text_until((PYTHON_TAG,))):
            if (yield from self._source.skip_space()) == "{":
                yield from self._read_objects(marked=True)
            else:
                self._calls.end_attempt()

    def _read_objects(self, marked: bool) -> Steps[None]:
        if (yield from self._calls.read_object(marked)):
            yield from self._calls.read_objects_after(marked)
        else:
            self._calls.end_attempt()


def _used_by(template: str) -> bool:
    is_llama = "<|start_header_id|>" in template and re.search(r'"parameters\\?":', template) is not None
    return is_llama and hermes.BEGIN not in template


LLAMA3 = ToolFormat(
    "llama3",
    LlamaParser,
    '{"name": "NAME", "parameters": ARGUMENTS}',
    _used_by,
    separator=None,
    markers=(PYTHON_TAG,),
    also_begins=(PYTHON_TAG,),
    bare="{",
)
