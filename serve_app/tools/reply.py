"""Reads a whole reply: its reasoning, then text and tool calls."""

from __future__ import annotations

from serve_app.tools.parser import Parser
from serve_app.tools.parts import Part, Text, merged
from serve_app.tools.reasoning import ReasoningSplitter


class ReplyReader:
    """Puts a splitter and a parser in a row; either may be missing. Calls within reasoning are reasoning."""

    def __init__(self, splitter: ReasoningSplitter | None = None, parser: Parser | None = None) -> None:
        self._splitter = splitter
        self._parser = parser

    def push(self, text: str) -> list[Part]:
        """What is certain now that `text` has come."""
        return merged(self._parsed(self._splitter.push(text) if self._splitter else [Text(text)]))

    def finish(self, reason: str) -> list[Part]:
        """What was held back, at the end of the reply; `reason` as `Parser.finish` takes it."""
        parts = self._parsed(self._splitter.finish() if self._splitter else [])
        return merged([*parts, *(self._parser.finish(reason) if self._parser else ())])

    def _parsed(self, parts: list[Part]) -> list[Part]:
        if self._parser is None:
            return parts
        return [p for part in parts for p in (self._parser.push(part.text) if isinstance(part, Text) else (part,))]
