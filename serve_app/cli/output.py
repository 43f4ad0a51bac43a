"""Output of the commands: a table, fields or one document on standard output, an error as one line on standard error.

Tables fit the terminal. Identifiers are never wrapped or cut. Other columns wrap; if that is not enough, the last
columns are left out.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from serve_app.cli.progress import Progress

if TYPE_CHECKING:
    from rich.text import Text

Form = Literal["wide", "json", "yaml", "name"]
FORMS: tuple[str, ...] = get_args(Form)

GAP = 2  # spaces between columns
MIN_WRAPPED = 12  # minimum width of a column that wraps
MAX_WORD = 36  # a column that wraps is at least as wide as its longest word, up to this width
STATE_COLUMNS = ("status", "health", "outcome", "books")
STATE_STYLES = {
    "green": "active ready ok running healthy completed valid succeeded",
    "yellow": "pending invited cancelled expired deploying unhealthy warn stale spent",
    "red": "suspended revoked failed ejected fail deploy_failed problems not",
}
_STYLES = {word: style for style, words in STATE_STYLES.items() for word in words.split()}


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
    """Prints results in one form. The form None is a table that fits the terminal.

    With JSON or YAML, standard output has exactly one document and nothing else.
    """

    form: Form | None = None
    progress: Progress = field(default_factory=Progress)

    @property
    def is_document(self) -> bool:
        return self.form in ("json", "yaml")

    def document(self, document: Any, names: Iterable[object] = ()) -> bool:
        """Prints `document` as JSON or YAML, or its `names` line by line. Returns False for other forms."""
        if self.form == "json":
            self._write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
        elif self.form == "yaml":
            import yaml

            self._write(yaml.safe_dump(document, allow_unicode=True, sort_keys=False))
        elif self.form == "name":
            self._write("".join(f"{_printable(name)}\n" for name in names))
        else:
            return False
        return True

    def table(
        self,
        document: Any,
        columns: Sequence[str],
        rows: Iterable[Sequence[object]],
        *,
        ids: Sequence[str] = (),
        wide: Sequence[str] = (),
        empty: str,
        footer: str = "",
    ) -> None:
        """Prints the document, or `rows` under `columns`, or `empty` when there are no rows.

        The first column has the names that `-o name` prints. The columns `ids` also have identifiers, which
        are never wrapped. The columns `wide` are shown only with `-o wide`.
        """
        given = [list(row) for row in rows]
        if self.document(document, (row[0] for row in given)):
            return
        if not given:
            self.line(empty)
            return
        shown = [index for index, name in enumerate(columns) if self.form == "wide" or name not in wide]
        head = [columns[index] for index in shown]
        cells = [[_printable(row[index]) for index in shown] for row in given]
        self._table(head, cells, {0, *(index for index, name in enumerate(head) if name in ids)})
        if footer:
            self.line(footer)

    def record(self, document: Any, fields: Iterable[tuple[str, object]], *, note: str = "") -> None:
        """Prints the document, or its `fields`, one per line, then a `note`."""
        pairs = [(name, _printable(value)) for name, value in fields]
        named = document.get("id") if isinstance(document, dict) else None
        if self.document(document, [named or pairs[0][1]]):
            return
        self._fields(pairs)
        if note:
            self.line(note)

    def line(self, text: str) -> None:
        """Prints a text. On a terminal, long lines are wrapped between words."""
        self._write("".join(f"{line}\n" for line in _broken(text, _columns(sys.stdout))))

    def failure(self, failure: CommandError) -> None:
        """Prints a failure on standard error: a JSON object, or one line."""
        self.progress.end()
        if self.form != "json":
            text = f"error: {_printable(failure.message)}"
            sys.stderr.write("".join(f"{line}\n" for line in _broken(text, _columns(sys.stderr))))
            return
        fields = {name: getattr(failure, name) for name in ("message", "code", "status", "request_id")}
        error = {name: value for name, value in fields.items() if value is not None}
        sys.stderr.write(json.dumps({"error": error}, ensure_ascii=False) + "\n")

    def _table(self, head: list[str], cells: list[list[str]], identifiers: set[int]) -> None:
        width = _columns(sys.stdout)
        fixed = {
            index for index in range(len(head)) if index in identifiers or all(_is_solid(row[index]) for row in cells)
        }
        measured = [_measure([name, *(row[index] for row in cells)]) for index, name in enumerate(head)]
        if width is None:
            kept, widths = list(range(len(head))), measured
        else:
            min_widths = [
                size if index in fixed else min(size, _longest_word([row[index] for row in cells]))
                for index, size in enumerate(measured)
            ]
            kept, widths = _fitted(measured, min_widths, width, drop=self.form != "wide")
        if not kept:  # not all columns fit: print a block of fields for each row
            for row in cells:
                self._fields(list(zip(head, row, strict=True)))
                self._write("\n")
            return
        from rich.table import Table

        table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
        for index in kept:
            justify: Literal["left", "right"] = "right" if all(_is_number(row[index]) for row in cells) else "left"
            table.add_column(head[index], justify=justify, overflow="fold", width=widths[index], no_wrap=index in fixed)
        for row in cells:
            table.add_row(*(_styled(head[index], row[index]) for index in kept))
        self._rich(table, sum(widths[index] + GAP for index in kept))
        if left_out := [name for index, name in enumerate(head) if index not in kept]:
            self.line(f"Not shown at this width: {', '.join(left_out)}. Use -o wide.")

    def _fields(self, pairs: Sequence[tuple[str, str]]) -> None:
        width = _columns(sys.stdout)
        indent = max(len(name) for name, _ in pairs) + 3
        for name, value in pairs:
            lines = _broken(value, None if width is None else max(width - indent, MIN_WRAPPED))
            for number, line in enumerate(lines):
                label = name.ljust(indent) if number == 0 else " " * indent
                self._styled_line(label, name, line)

    def _styled_line(self, label: str, name: str, text: str) -> None:
        if sys.stdout.isatty() and _style(name.strip(), text):
            from rich.text import Text

            self._rich(Text.assemble(label, _styled(name.strip(), text)), len(label) + _measure([text]))
        else:
            self._write(f"{label}{text}\n")

    def _rich(self, renderable: Any, width: int) -> None:
        from rich.console import Console

        self.progress.end()
        console = Console(width=width, markup=False, highlight=False, emoji=False)
        with console.capture() as capture:
            console.print(renderable)
        # Rich pads every line to the table's width.
        self._write("".join(line.rstrip() + "\n" for line in capture.get().splitlines()))

    def _write(self, text: str) -> None:
        self.progress.end()
        sys.stdout.write(text)


def _columns(stream: Any) -> int | None:
    """Returns the width of the stream's terminal in characters. None: a pipe or a file, where nothing is wrapped."""
    if not stream.isatty():
        return None
    given = os.environ.get("COLUMNS", "")
    if given.isdigit() and int(given):
        return int(given)
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80


def _broken(text: str, width: int | None) -> Iterator[str]:
    """Yields a text's lines, wrapped to `width`. A word longer than a line is not broken."""
    for line in text.splitlines() or [""]:
        if width is None or len(line) <= width:
            yield line
        else:
            rest = line.lstrip()
            indent = line[: len(line) - len(rest)]
            again = indent + ("  " if rest.startswith(("- ", "→ ")) else "")
            yield from textwrap.wrap(
                rest, width, initial_indent=indent, subsequent_indent=again,
                break_long_words=False, break_on_hyphens=False,
            )  # fmt: skip


def _fitted(
    measured: Sequence[int], min_widths: Sequence[int], width: int, *, drop: bool
) -> tuple[list[int], list[int]]:
    """Returns the indices of the columns that fit, and the widths of all columns.

    Narrows columns that can wrap, then drops columns from the end. Without `drop`, returns no indices if not all fit.
    """
    kept = list(range(len(measured)))
    while True:
        widths = list(measured)
        room = width - GAP * (len(kept) - 1)
        while sum(widths[index] for index in kept) > room:
            can_wrap = [index for index in kept if widths[index] > min_widths[index]]
            if not can_wrap:
                break
            widths[max(can_wrap, key=lambda index: widths[index])] -= 1
        else:
            return kept, widths
        if not drop:
            return [], widths
        if len(kept) == 1:
            return kept, widths
        kept.pop()


def _measure(texts: Iterable[str]) -> int:
    from rich.cells import cell_len

    return max(map(cell_len, texts))


def _longest_word(cells: Iterable[str]) -> int:
    return max(MIN_WRAPPED, min(MAX_WORD, max(_measure(cell.split() or [""]) for cell in cells)))


def _style(column: str, text: str) -> str:
    return _STYLES.get(text.split(" ")[0].split(",")[0].lower(), "") if column in STATE_COLUMNS else ""


def _styled(column: str, text: str) -> Text:
    from rich.text import Text

    return Text(text, _style(column, text))


def short_time(text: str) -> str:
    """Returns an ISO time in UTC without fractions and zone, such as 2026-11-30 08:00:00."""
    return text[:19].replace("T", " ")


def _printable(value: object) -> str:
    """Returns a value on one line. Control characters are escaped, because names come from people."""
    if value is None:
        return "–"
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _is_number(cell: str) -> bool:
    return cell == "–" or cell.replace(",", "").replace(".", "", 1).lstrip("-").rstrip("%").isdigit()


def _is_solid(cell: str) -> bool:
    """Returns whether a value is short and can't be wrapped: a number, a word, a time."""
    return " " not in cell and len(cell) <= 2 * MIN_WRAPPED
