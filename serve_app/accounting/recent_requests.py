"""Lists requests of all accounts, newest first.

Reads day by day: the daily sums name the accounts of a day, and the index of each account finds its rows. So no index
over all accounts is necessary.
"""

from __future__ import annotations

from sqlalchemy import ColumnElement, Connection, select, tuple_

from serve_app.accounting.registry import LONG_S, reads
from serve_app.accounting.schema import usage, usage_daily
from serve_app.accounting.usage import _RECORDS, _matching, _record
from serve_app.accounting.validation import check_page
from serve_app.contracts.books import UsagePage, UsageRecord
from serve_app.contracts.commands import ListRecent, ListUsage
from serve_app.contracts.errors import InvalidValue
from serve_app.contracts.periods import day_named, period_at

MAX_DAYS = 100  # maximum days with usage that are read for one page
MAX_TIME = 253_000_000_000.0  # Unix time in the year 9987; Python's dates end with the year 9999


@reads(ListRecent, timeout_s=LONG_S)
def list_recent(connection: Connection, wanted: ListRecent, _now: float) -> UsagePage:
    limit, rows, daily = check_page(wanted.limit), usage.c, usage_daily.c
    filters = ListUsage(wanted.account_id, wanted.key_id, wanted.model, tag=wanted.tag)
    matching: list[ColumnElement[bool]] = _matching(connection, usage, filters)
    if wanted.outcome is not None:
        matching.append(rows.outcome == wanted.outcome.value)
    days = _matching(connection, usage_daily, filters)
    if wanted.time_from is not None:
        matching.append(rows.finished_at >= wanted.time_from)
        days.append(daily.day >= period_at("day", _checked(wanted.time_from)).name)
    if wanted.time_to is not None:
        matching.append(rows.finished_at < wanted.time_to)
        days.append(daily.day <= period_at("day", _checked(wanted.time_to)).name)
    if wanted.after is not None:
        finished_at, request_id = _place(wanted.after)
        matching.append(tuple_(rows.finished_at, rows.request_id) < tuple_(finished_at, request_id))
        day = period_at("day", finished_at).name
        # A cursor without an id: the previous page has read all of that day.
        days.append(daily.day <= day if request_id else daily.day < day)
    named = select(daily.day).where(*days).distinct().order_by(daily.day.desc()).limit(MAX_DAYS)
    read = [day_named(name) for name in connection.execute(named).scalars()]
    found: list[UsageRecord] = []
    for one in read:
        accounts = select(daily.account_id).where(*days, daily.day == one.name).distinct()
        of_day = (rows.account_id.in_(accounts), rows.finished_at >= one.begins, rows.finished_at < one.ends)
        query = _RECORDS.where(*matching, *of_day).order_by(rows.finished_at.desc(), rows.request_id.desc())
        found += map(_record, connection.execute(query.limit(limit + 1 - len(found))))
        if len(found) > limit:
            last = found[limit - 1]
            return UsagePage(tuple(found[:limit]), f"{last.finished_at!r}~{last.request_id}")
    return UsagePage(tuple(found), f"{read[-1].begins!r}~" if len(read) == MAX_DAYS else None)


def _place(cursor: str) -> tuple[float, str]:
    time, separator, request_id = cursor.partition("~")
    try:
        if separator and request_id.isprintable():
            return _checked(float(time)), request_id
    except (ValueError, InvalidValue):
        pass
    raise InvalidValue(f"invalid `after` {cursor!r}: pass the `next` of the previous page")


def _checked(at: float) -> float:
    if not 0 <= at <= MAX_TIME:
        raise InvalidValue(f"{at} is not a time")
    return at
