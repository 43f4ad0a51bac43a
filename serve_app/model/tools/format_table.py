"""The tool-call formats that the service knows. A new one is a file in `formats` and a line here."""

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
    """The first format that the Jinja text of a chat template writes calls in; the plain one takes all others.

    A template with tools in a form that is not known here counts as plain: the model must be told to write what its
    replies are searched for.
    """
    return next(tool_format for tool_format in TOOL_FORMATS.values() if tool_format.used_by(chat_template or ""))
