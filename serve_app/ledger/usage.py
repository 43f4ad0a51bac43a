"""Questions about usage: sums from the daily aggregates, single requests from the usage rows."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from datetime import date
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, Row, func, select, tuple_

from serve_app.ledger.errors import InvalidValue
from serve_app.ledger.messages import Outcome, Price, UsagePage, UsageRecord, UsageRow
from serve_app.ledger.schema import price_versions, usage_daily
from serve_app.ledger.schema import usage as usage_rows
from serve_app.ledger.snapshots import check_page, get_account

Group = Literal["day", "model", "key", "account"]

_GROUPS = {
    "day": usage_daily.c.day,
    "model": usage_daily.c.model,
    "key": usage_daily.c.key_id,
    "account": usage_daily.c.account_id,
}
_SUMS = tuple(
    func.coalesce(func.sum(usage_daily.c[name]), 0).label(name)
    for name in ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "charged")
)
_ORDER = (usage_rows.c.account_id, usage_rows.c.finished_at, usage_rows.c.request_id)  # as an index has it


def usage(
    connection: Connection,
    *,
    account_id: str | None,
    key_id: str | None,
    model: str | None,
    day_from: str | None,
    day_to: str | None,
    group_by: Sequence[Group],
) -> list[UsageRow]:
    """See `Ledger.usage`."""
    unknown = [name for name in group_by if name not in _GROUPS]
    if unknown:
        raise InvalidValue(f"cannot group by {', '.join(map(repr, unknown))}: use any of {', '.join(_GROUPS)}")
    wanted: list[ColumnElement[bool]] = []
    if account_id is not None:
        wanted.append(usage_daily.c.account_id == account_id)
    if key_id is not None:
        wanted.append(usage_daily.c.key_id == key_id)
    if model is not None:
        wanted.append(usage_daily.c.model == model)
    if day_from is not None:
        wanted.append(usage_daily.c.day >= check_day(day_from))
    if day_to is not None:
        wanted.append(usage_daily.c.day <= check_day(day_to))
    groups = [_GROUPS[name] for name in dict.fromkeys(group_by)]
    query = select(*groups, *_SUMS).where(*wanted).group_by(*groups).order_by(*groups)
    return [_usage_row(row) for row in connection.execute(query) if row.requests]


def account_totals(connection: Connection, account_id: str) -> UsageRow:
    """See `Ledger.account_totals`."""
    get_account(connection, account_id)
    row = connection.execute(select(*_SUMS).where(usage_daily.c.account_id == account_id)).one()
    return _usage_row(row, account_id=account_id)


def export_usage(
    connection: Connection,
    *,
    account_id: str | None,
    key_id: str | None,
    model: str | None,
    time_from: float | None,
    time_to: float | None,
    after: str | None,
    limit: int,
) -> UsagePage:
    """See `Ledger.export_usage`."""
    rows = usage_rows.c
    wanted: list[ColumnElement[bool]] = []
    if account_id is not None:
        wanted.append(rows.account_id == account_id)
    if key_id is not None:
        wanted.append(rows.key_id == key_id)
    if model is not None:
        wanted.append(rows.model == model)
    if time_from is not None:
        wanted.append(rows.finished_at >= time_from)
    if time_to is not None:
        wanted.append(rows.finished_at < time_to)
    if after is not None:
        wanted.append(tuple_(*_ORDER) > tuple_(*_place(after)))
    prices = price_versions.c
    query = (
        select(usage_rows, prices.input, prices.cached_input, prices.output)
        .select_from(usage_rows.join(price_versions))
        .where(*wanted)
        .order_by(*_ORDER)
        .limit(check_page(limit) + 1)
    )
    found = connection.execute(query).all()
    records = tuple(_usage_record(row) for row in found[:limit])
    return UsagePage(records, _cursor(records[-1]) if len(found) > limit else None)


def check_day(day: str) -> str:
    """Raise InvalidValue unless this is a day as YYYY-MM-DD."""
    try:
        if date.fromisoformat(day).isoformat() == day:
            return day
    except ValueError:
        pass
    raise InvalidValue(f"{day!r} is no day: give YYYY-MM-DD, in UTC")


def _usage_row(row: Row[Any], **group: str) -> UsageRow:
    named = row._mapping
    return UsageRow(
        # PostgreSQL sums 64-bit numbers to decimals.
        requests=int(row.requests),
        prompt_tokens=int(row.prompt_tokens),
        cached_tokens=int(row.cached_tokens),
        completion_tokens=int(row.completion_tokens),
        charged=int(row.charged),
        account_id=group.get("account_id", named.get("account_id")),
        key_id=named.get("key_id"),
        model=named.get("model"),
        day=named.get("day"),
    )


def _usage_record(row: Row[Any]) -> UsageRecord:
    return UsageRecord(
        request_id=row.request_id,
        account_id=row.account_id,
        key_id=row.key_id,
        model=row.model,
        backend=row.backend,
        price=Price(row.input, row.cached_input, row.output),
        prompt_tokens=row.prompt_tokens,
        cached_tokens=row.cached_tokens,
        completion_tokens=row.completion_tokens,
        charged=row.charged,
        uncollected=row.uncollected,
        outcome=Outcome(row.outcome),
        started_at=row.started_at,
        finished_at=row.finished_at,
        settled_at=row.settled_at,
    )


def _cursor(last: UsageRecord) -> str:
    place = json.dumps([last.account_id, last.finished_at, last.request_id])
    return base64.urlsafe_b64encode(place.encode()).decode()


def _place(cursor: str) -> tuple[str, float, str]:
    try:
        account_id, finished_at, request_id = json.loads(base64.b64decode(cursor, altchars=b"-_", validate=True))
        if isinstance(account_id, str) and isinstance(finished_at, float | int) and isinstance(request_id, str):
            return account_id, float(finished_at), request_id
    except (ValueError, TypeError):
        pass
    raise InvalidValue(f"{cursor!r} is no place in an export: give the `next` of the page before")
