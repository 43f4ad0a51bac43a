"""What the service knows of one way to write tool calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from serve_app.model.tools.parser import ReplyParser


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write tool calls.

    A reply's calls are `opening`, the calls with `separator` between them, `closing`. Without a separator there can be
    one call only. In `call`, NAME stands for the function's name, "NAME" for its name as JSON.
    """

    name: str
    parser: type[ReplyParser]
    call: str  # one call with NAME and ARGUMENTS
    used_by: Callable[[str], bool]  # whether the Jinja text of a chat template writes calls this way
    separator: str | None
    opening: str = ""
    closing: str = ""
    markers: tuple[str, ...] = ()  # must reach the parser as text, even where they are special tokens
    begins: str = ""  # the marker that calls begin with; empty where they have none
    # What else the parser takes for a call: text after one of these, and maybe a reply that begins with one of these
    # characters.
    also_begins: tuple[str, ...] = ()
    bare: str = ""
    # What its chat templates read by themselves.
    reads_tools: bool = True  # definitions, as the variable `tools`
    reads_calls: bool = True  # messages with `tool_calls`
    reads_results: bool = True  # messages with the role `tool`
    nine_letter_ids: bool = False  # the template refuses other ids than nine letters and digits

    def around(self, name: str) -> tuple[str, str]:
        """The texts before and after the arguments of one call."""
        before, _, after = self.call.partition("ARGUMENTS")
        quoted = '"NAME"' in before
        return before.replace('"NAME"', json.dumps(name)) if quoted else before.replace("NAME", name), after

    def written(self, calls: Iterable[tuple[str, str]]) -> str:
        """(Name, arguments as JSON) of each call as text; on lines of their own where the format has one call only."""
        single = [arguments.join(self.around(name)) for name, arguments in calls]
        return self.opening + ("\n" if self.separator is None else self.separator).join(single) + self.closing
