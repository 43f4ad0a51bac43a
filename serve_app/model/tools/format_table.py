"""The tool-call formats that the service supports. To add a format, add a file in `formats` and a line here."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from serve_app.model.tools.formats import deepseek, hermes, llama, mistral, plain
from serve_app.model.tools.tool_format import ToolFormat

TOOL_FORMATS: Final = MappingProxyType(
    {
        tool_format.name: tool_format
        for tool_format in (
            deepseek.V3,
            deepseek.V31,
            mistral.ARRAY,
            mistral.NAMED,
            hermes.HERMES,
            llama.LLAMA3,
            plain.PLAIN,
        )
    }
)


def format_of(chat_template: str | None) -> ToolFormat:
    """Returns the tool-call format that the Jinja text of a chat template uses, or the plain format.

    A template that writes calls in an unsupported form counts as plain. The prompt must then tell the model to write
    calls in the form that the parser reads.
    """
    return next(tool_format for tool_format in TOOL_FORMATS.values() if tool_format.used_by(chat_template or ""))
