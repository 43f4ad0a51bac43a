"""Writes rows as files: CSV that spreadsheets do not interpret as formulas, and JSON.

The service and the command line both use it, so their files have the same format. Rows are not kept in memory.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from serve_app.contracts.books import UsageRecord
from serve_app.contracts.money import format_amount, format_price
from serve_app.contracts.units import utc_text

Row = Mapping[str, Any]


#: The fields of `/admin/usage/requests`, as columns.
REQUEST_COLUMNS: Final = (
    "request_id", "account_id", "key_id", "model", "backend", "outcome", "started_at", "finished_at", "settled_at",
    "prompt_tokens", "cached_tokens", "completion_tokens", "total_tokens",
    "price_input", "price_cached_input", "price_output", "charged", "uncollected",
)  # fmt: skip


def request_row(record: UsageRecord) -> Row:
    """Returns a row with REQUEST_COLUMNS: exact decimals, and times in UTC to the millisecond."""
    return {name: getattr(record, name, None) for name in REQUEST_COLUMNS} | {
        "outcome": str(record.outcome),
        "total_tokens": record.prompt_tokens + record.completion_tokens,
        "price_input": format_price(record.price.input),
        "price_cached_input": format_price(record.price.cached_input),
        "price_output": format_price(record.price.output),
        "charged": format_amount(record.charged),
        "uncollected": format_amount(record.uncollected),
        **{
            name: utc_text(getattr(record, name), "milliseconds")
            for name in ("started_at", "finished_at", "settled_at")
        },
    }


# Characters that make spreadsheets compute, or call other programs, instead of showing text (OWASP, "CSV injection").
# Full-width forms are included, because some spreadsheets convert them. Plain numbers, with or without a minus, are
# safe. The characters match at the beginning of a cell, and after a semicolon, tab or line break, which some programs
# read as the end of a cell.
_COMPUTES = re.compile(r"(?:^|(?<=[;\t\r\n]))(?=[=+\-@\t\r\n＝＋－＠])")
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?", re.ASCII)


class Csv:
    """RFC 4180 in UTF-8, with a header line; null is an empty cell. A file is `head`, any number of `rows`, `tail`."""

    media_type = "text/csv; charset=utf-8; header=present"

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = columns

    def head(self) -> str:
        return _csv([self._columns])

    def rows(self, rows: Sequence[Row]) -> str:
        return _csv([[_cell(row.get(name)) for name in self._columns] for row in rows])

    def tail(self) -> str:
        return ""


class JsonArray:
    """One JSON array with one object per line, which line-based tools can also process.

    As with Csv, a file is `head`, any number of `rows`, `tail`. If the file is truncated, it is not valid JSON. A
    truncated file of separate JSON lines would look complete.
    """

    media_type = "application/json"

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = columns
        self._empty = True

    def head(self) -> str:
        return "["

    def rows(self, rows: Sequence[Row]) -> str:
        text = "".join(
            ("\n" if self._empty and number == 0 else ",\n")
            + json.dumps({name: row.get(name) for name in self._columns}, ensure_ascii=False)
            for number, row in enumerate(rows)
        )
        self._empty = self._empty and not rows
        return text

    def tail(self) -> str:
        return "]\n" if self._empty else "\n]\n"


FORMATS: Final[Mapping[str, type[Csv] | type[JsonArray]]] = {"csv": Csv, "json": JsonArray}


def _csv(rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerows(rows)
    return text.getvalue()


def _cell(value: object) -> object:
    """Returns the value, with apostrophes before parts that a spreadsheet would compute."""
    if isinstance(value, str) and not _NUMBER.fullmatch(value):
        return _COMPUTES.sub("'", value)
    return "" if value is None else value
