"""Questions about usage, answered from the daily aggregates."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, Row, func, select

from serve_app.ledger.errors import InvalidValue
from serve_app.ledger.messages import UsageRow
from serve_app.ledger.schema import usage_daily
from serve_app.ledger.snapshots import get_account

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
