"""Output of the commands: one JSON document or a table on standard output, an error as one line on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

# Wider than any row: output into a file or pipe is never truncated or wrapped.
_PIPE_COLUMNS = 1000


class CommandError(Exception):
    """A command that failed: `message` says what to do, `code` is a fixed word for scripts.

    `status` and `request_id` come from the service's response, if there was one.
    """

    exit_code = 1

    def __init__(self, message: str, *, code: str, status: int | None = None, request_id: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = status
        self.request_id = request_id


class UsageError(CommandError):
    """A wrong command line. It has the same exit code as an unknown option."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(message, code="usage")


@dataclass(frozen=True)
class Output:
    """Prints results. With `as_json` set, standard output holds exactly one JSON document and nothing else."""

    as_json: bool

    def table(
        self, document: Any, columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str, footer: str = ""
    ) -> None:
        """Prints `document` as JSON, or `rows` under `columns`, or `empty` when there are no rows."""
        if self.as_json:
            self.json(document)
            return
        cells = [[_printable(value) for value in row] for row in rows]
        if not cells:
            self.line(empty)
            return
        from rich.table import Table

        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
        for index, name in enumerate(columns):
            numeric = all(_is_number(row[index]) for row in cells)
            table.add_column(name, justify="right" if numeric else "left", overflow="fold")
        for row in cells:
            table.add_row(*row)
        self._rich(table)
        if footer:
            self.line(footer)

    def record(self, document: Any, fields: Iterable[tuple[str, object]], *, note: str = "") -> None:
        """Prints `document` as JSON, or its `fields`, one per line, then a `note`."""
        if self.as_json:
            self.json(document)
            return
        pairs = [(name, _printable(value)) for name, value in fields]
        width = max(len(name) for name, _ in pairs)
        for name, value in pairs:
            self.line(f"{name.ljust(width)}   {value}")
        if note:
            self.line(note)

    def json(self, document: Any) -> None:
        sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")

    def line(self, text: str) -> None:
        sys.stdout.write(text + "\n")

    def failure(self, failure: CommandError) -> None:
        """Prints a failure on standard error: a JSON object, or one line."""
        if not self.as_json:
            sys.stderr.write(f"error: {_printable(failure.message)}\n")
            return
        fields = {name: getattr(failure, name) for name in ("message", "code", "status", "request_id")}
        error = {name: value for name, value in fields.items() if value is not None}
        sys.stderr.write(json.dumps({"error": error}, ensure_ascii=False) + "\n")

    def _rich(self, renderable: Any) -> None:
        from rich.console import Console

        on_terminal = sys.stdout.isatty()
        console = Console(width=None if on_terminal else _PIPE_COLUMNS, markup=False, highlight=False, emoji=False)
        with console.capture() as capture:
            console.print(renderable)
        # Rich pads every line to the table's width, which a pipe does not need.
        sys.stdout.write("".join(line.rstrip() + "\n" for line in capture.get().splitlines()))


def _printable(value: object) -> str:
    """Returns a value on one line. Control characters are escaped, because names come from people."""
    if value is None:
        return "–"
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _is_number(cell: str) -> bool:
    return cell == "–" or cell.replace(",", "").replace(".", "", 1).lstrip("-").isdigit()
