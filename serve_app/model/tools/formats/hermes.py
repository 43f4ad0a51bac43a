"""Qwen and Hermes: JSON objects in <tool_call> tags.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Each call has a pair of tags. Any number of calls follow the text. Sources: the chat templates of
Qwen/Qwen2.5-7B-Instruct and Qwen/Qwen3-8B, and of NousResearch/Hermes-2-Pro-Llama-3-8B and Hermes-3-Llama-3.1-8B
(`tool_use`), whose calls have the arguments before the name.
"""

from __future__ import annotations

import re

from serve_app.model.tools.parser import ReplyParser
from serve_app.model.tools.source import Steps
from serve_app.model.tools.tool_format import ToolFormat

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(ReplyParser):
    _first = BEGIN[0]

    def _text_and_calls(self) -> Steps[None]:
        while (yield from self._text_until((BEGIN,), (END,))):
            if (yield from self._source.skip_space()) != "{" or not (yield from self._calls.read_object()):
                self._calls.end_attempt()


def _used_by(template: str) -> bool:
    # The templates of Qwen3-Coder and GLM use the same tags, but write XML-like calls, not JSON, into them.
    return BEGIN in template and not re.search(r"<function=|<arg_key>|<parameter=", template)


HERMES = ToolFormat(
    "hermes",
    HermesParser,
    BEGIN + '\n{"name": "NAME", "arguments": ARGUMENTS}\n' + END,
    _used_by,
    separator="\n",
    markers=(BEGIN, END),
    begins=BEGIN,
)
