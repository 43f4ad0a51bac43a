"""Describes one way to write tool calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from serve_app.model.tools.parser import ReplyParser


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write tool calls.

    The calls of a reply are written as `opening`, the calls joined by `separator`, then `closing`. Without a separator,
    only one call is possible. In `call`, NAME stands for the function's name, and "NAME" for its name as JSON.
    """

    name: str
    parser: type[ReplyParser]
    call: str  # the text of one call, with the placeholders NAME and ARGUMENTS
    used_by: Callable[[str], bool]  # whether the Jinja text of a chat template writes calls this way
    separator: str | None
    opening: str = ""
    closing: str = ""
    markers: tuple[str, ...] = ()  # texts that must reach the parser even if they are special tokens
    begins: str = ""  # the marker that begins calls; empty if there is none
    # The parser also reads calls after one of `also_begins`, and at the beginning of a reply whose first character is
    # in `bare`.
    also_begins: tuple[str, ...] = ()
    bare: str = ""
    # Inputs that the format's chat templates read directly.
    reads_tools: bool = True  # definitions, as the variable `tools`
    reads_calls: bool = True  # messages with `tool_calls`
    reads_results: bool = True  # messages with the role `tool`
    nine_letter_ids: bool = False  # the template only accepts ids of nine letters and digits

    def around(self, name: str) -> tuple[str, str]:
        """Returns the texts before and after the arguments of one call."""
        before, _, after = self.call.partition("ARGUMENTS")
        quoted = '"NAME"' in before
        return before.replace('"NAME"', json.dumps(name)) if quoted else before.replace("NAME", name), after

    def written(self, calls: Iterable[tuple[str, str]]) -> str:
        """Returns calls, each (name, arguments as JSON), as text; on separate lines if there is no separator."""
        single = [arguments.join(self.around(name)) for name, arguments in calls]
        return self.opening + ("\n" if self.separator is None else self.separator).join(single) + self.closing
