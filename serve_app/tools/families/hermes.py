"""Qwen and Hermes: JSON objects in <tool_call> tags.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

One pair of tags per call, any number of them after the text. Sources: the chat templates of Qwen/Qwen2.5-7B-Instruct
and Qwen/Qwen3-8B, and of NousResearch/Hermes-2-Pro-Llama-3-8B and Hermes-3-Llama-3.1-8B (`tool_use`), whose own calls
have the arguments before the name.
"""

from __future__ import annotations

import json

from serve_app.tools.parser import Parser
from serve_app.tools.source import Steps

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(Parser):
    """Reads calls in tags."""

    _first = BEGIN[0]

    def _reply(self) -> Steps[None]:
        while (yield from self._text((BEGIN,), (END,))):
            if (yield from self._source.space()) != "{" or not (yield from self._calls.object()):
                self._calls.release()


def around(name: str) -> tuple[str, str]:
    """The text before and after a call's arguments."""
    return f'{BEGIN}\n{{"name": {json.dumps(name)}, "arguments": ', f"}}\n{END}"
