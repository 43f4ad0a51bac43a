"""Formats amounts, counts and times for people. Tooltips have the exact values."""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Sequence
from datetime import date
from decimal import Decimal, localcontext
from typing import Final

from markupsafe import Markup, escape

from serve_app.contracts.money import MINUS, NANO_PER_UNIT, fixed_amount
from serve_app.contracts.units import DAY_S, HOUR_S

COST_DIGITS: Final = 6
COLUMN_DIGITS: Final = 3
SIGNS: Final = {"USD": "$", "EUR": "€", "GBP": "£"}
MINUTE_S: Final = 60.0
_UNITS: Final = ((HOUR_S, "hour"), (MINUTE_S, "minute"))
SPARK_WIDTH, SPARK_HEIGHT = 100, 28
_CELL: Final = re.compile(r"<(tr|td|th)\b([^>]*)>")
_AMOUNT: Final = re.compile(r"\([A-Z]{3}[^()]*\)$")  # the unit at the end of a column's name, if the column has amounts
_SPAN: Final = re.compile(r'colspan="(\d+)"')
MAX_LEAD: Final = 22  # maximum characters in the name of the column that a narrow screen shows beside the first


def balance(nano: int) -> str:
    """Returns an amount with two decimal places, e.g. "1,234.50"."""
    return fixed_amount(nano, 2)


def places(amounts: Sequence[int]) -> int:
    """Returns the decimal places of a column of costs: enough for COLUMN_DIGITS significant digits of the median."""
    known = sorted(abs(nano) for nano in amounts if nano)
    if not known:
        return 2
    return min(9, max(2, COLUMN_DIGITS - 1 - (Decimal(known[len(known) // 2]) / NANO_PER_UNIT).adjusted()))


def fixed(nano: int, decimals: int) -> str:
    """Returns an amount with `decimals` places. Instead of rounding to 0, returns "<" and the smallest amount shown."""
    least = Decimal(NANO_PER_UNIT).scaleb(-decimals)
    return fixed_amount(nano, decimals) if not 0 < nano < least / 2 else f"<{fixed_amount(int(least), decimals)}"


def cost(nano: int) -> str:
    """Returns an amount with at most six significant digits and at least two decimal places."""
    with localcontext() as context:
        context.prec = COST_DIGITS
        rounded = +(Decimal(nano) / NANO_PER_UNIT)
    whole, _, fraction = f"{rounded:,f}".partition(".")
    return f"{whole.replace('-', MINUS)}.{fraction.rstrip('0').ljust(2, '0')}"


def in_currency(amount: str, currency: str | None) -> str:
    """Returns a formatted amount with its currency, e.g. "−$12.50" or "12.50 CHF"; without one, the amount alone."""
    if not currency:
        return amount
    if currency not in SIGNS:
        return f"{amount} {currency}"
    number = amount.lstrip(MINUS)
    return f"{MINUS if number != amount else ''}{SIGNS[currency]}{number}"


def signed(amount: str) -> str:
    """Returns an exact amount with a minus sign instead of a hyphen."""
    return amount.replace("-", MINUS)


def count(number: float) -> str:
    """Returns a number with thousands separators."""
    return f"{number:,}"


def exact_time(unix: float) -> str:
    return f"{short_day(unix)}, {time.strftime('%H:%M:%S UTC', time.gmtime(unix))}"


def minute(unix: float) -> str:
    """Returns a time without seconds: "22 Jan 2027, 21:09 UTC"."""
    return f"{short_day(unix)}, {time.strftime('%H:%M UTC', time.gmtime(unix))}"


def log_time(unix: float) -> str:
    """Returns a time in a list: "22 Jan 21:09:05", in UTC."""
    moment = time.gmtime(unix)
    return f"{moment.tm_mday} {time.strftime('%b %H:%M:%S', moment)}"


def short_id(request_id: str) -> str:
    """Returns a shortened request id, with the prefix and both ends of the rest: "chatcmpl-01a2…c9e0"."""
    prefix, dash, rest = request_id.rpartition("-")
    return request_id if len(rest) <= 12 else f"{prefix}{dash}{rest[:4]}…{rest[-4:]}"


def short_day(unix: float) -> str:
    moment = time.gmtime(unix)
    return f"{moment.tm_mday} {time.strftime('%b %Y', moment)}"


def named_day(name: str) -> str:
    """Returns a day such as "2026-11-26" in the form "26 Nov 2026"."""
    moment = date.fromisoformat(name)
    return f"{moment.day} {moment:%b %Y}"


def month(name: str) -> str:
    """Returns a month such as "2026-11" in the form "November 2026"."""
    return f"{date.fromisoformat(name + '-01'):%B %Y}"


def day(unix: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(unix))


def iso_time(unix: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix))


def relative(unix: float, now: float) -> str:
    """Returns a time relative to `now`, e.g. "5 minutes ago"; its date if that is a day or more away."""
    apart = abs(now - unix)
    if apart >= DAY_S:
        return short_day(unix)
    for seconds, unit in _UNITS:
        if apart >= seconds:
            number = int(apart // seconds)
            text = f"{number} {unit}{'' if number == 1 else 's'}"
            return f"in {text}" if unix > now else f"{text} ago"
    return "in a moment" if unix > now else "just now"


def sparkline(values: Sequence[float]) -> str:
    """Returns the points of a line through the values, for a picture of SPARK_WIDTH × SPARK_HEIGHT."""
    least, most = min(values), max(values)
    step, rise = SPARK_WIDTH / max(1, len(values) - 1), (most - least) or 1
    points = [
        f"{number * step:.1f},{SPARK_HEIGHT - 2 - (value - least) / rise * (SPARK_HEIGHT - 4):.1f}"
        for number, value in enumerate(values)
    ]
    return " ".join(points if len(points) > 1 else [f"0,{SPARK_HEIGHT / 2}", f"{SPARK_WIDTH},{SPARK_HEIGHT / 2}"])


def anchor(*parts: str) -> str:
    """Returns an element's id that depends only on the texts."""
    return f"d{zlib.crc32(' '.join(parts).encode()):08x}"


def labelled(rows: Markup, columns: Sequence[str | tuple[str, str]], lead: str = "") -> Markup:
    """Adds to a table's cells what a narrow screen needs: column names, and a mark on the leading column.

    `lead` is the name of the leading column, which the screen then shows. By default, `_lead` chooses the column.
    """
    names = [column if isinstance(column, str) else column[0] for column in columns]
    leading, place = names.index(lead) if lead else _lead(columns), 0

    def label(found: re.Match[str]) -> str:
        nonlocal place
        if found[1] == "tr":
            place = 0
            return found[0]
        span = _SPAN.search(found[0])
        name = names[place] if span is None and 0 < place < len(names) else ""  # the first cell is the row's title
        unit = None if lead else _AMOUNT.search(name)
        more = (f' data-lead="{escape(unit[0][1:-1])}"' if unit else " data-lead") if name and place == leading else ""
        place += 1 if span is None else int(span[1])
        return f'<{found[1]} data-label="{escape(name)}"{more}{found[2]}>' if name else found[0]

    return Markup(_CELL.sub(label, rows))


def _lead(columns: Sequence[str | tuple[str, str]]) -> int:
    """Returns the index of the column to show beside the first: amounts, else the status, else numbers, else -1."""
    rest = [(one, "") if isinstance(one, str) else one for one in columns]
    amounts = [bool(_AMOUNT.search(name)) and side == "end" for name, side in rest]
    for chosen in (amounts, [name == "Status" for name, _ in rest], [side == "end" for _, side in rest]):
        for place, (name, _) in enumerate(rest):
            if place and chosen[place] and len(name) <= MAX_LEAD:
                return place
    return -1


FILTERS: Final = {
    "balance": balance,
    "fixed": fixed,
    "signed": signed,
    "in_currency": in_currency,
    "places": places,
    "cost": cost,
    "count": count,
    "exact_time": exact_time,
    "time": minute,
    "log_time": log_time,
    "short_id": short_id,
    "short_day": short_day,
    "named_day": named_day,
    "month": month,
    "day": day,
    "iso_time": iso_time,
    "relative": relative,
    "sparkline": sparkline,
    "anchor": anchor,
    "labelled": labelled,
}
