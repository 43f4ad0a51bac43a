"""What keys with a budget have been charged in a period: kept beside the usage rows, always their sum."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, delete, func, select
from sqlalchemy.dialects import postgresql, sqlite

from serve_app.ledger.messages import BudgetPeriod
from serve_app.ledger.schema import key_spend, usage_daily

_LENGTHS: dict[BudgetPeriod, int] = {"day": 10, "month": 7}  # of "2026-11-21" and "2026-11"


def _setting(added: Any) -> Any:
    return added.on_conflict_do_update(
        index_elements=list(key_spend.primary_key.columns), set_={"charged": added.excluded.charged}
    )


_SET = {"sqlite": _setting(sqlite.insert(key_spend)), "postgresql": _setting(postgresql.insert(key_spend))}


def period_at(kind: BudgetPeriod, at: float) -> str:
    """The UTC day or month that holds `at` (Unix seconds): "2026-11-21" or "2026-11"."""
    return period_of(kind, datetime.fromtimestamp(at, UTC).date().isoformat())


def period_of(kind: BudgetPeriod, day: str) -> str:
    """The period that holds a day."""
    return day[: _LENGTHS[kind]]


def days_of(period: str) -> tuple[str, str]:
    """The first and the last day of a period, or later than the last: only to be compared with."""
    return (period, period) if len(period) == _LENGTHS["day"] else (f"{period}-01", f"{period}-31")


def read_spend(connection: Connection, wanted: Collection[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """What is kept of these (key, period), in nano-units; what is not kept is left out."""
    if not wanted:
        return {}
    query = select(key_spend).where(
        key_spend.c.key_id.in_({key_id for key_id, _ in wanted}),
        key_spend.c.period.in_({period for _, period in wanted}),
    )
    rows = {(row.key_id, row.period): row.charged for row in connection.execute(query)}
    return {one: charged for one, charged in rows.items() if one in wanted}


def count_spend(connection: Connection, account_id: str, key_id: str, period: str) -> int:
    """What the aggregates say that a key was charged in a period, in nano-units."""
    query = select(func.coalesce(func.sum(usage_daily.c.charged), 0)).where(
        usage_daily.c.account_id == account_id,  # the index begins with it
        usage_daily.c.key_id == key_id,
        usage_daily.c.day.between(*days_of(period)),
    )
    return int(connection.execute(query).scalar_one())


def write_spend(connection: Connection, spend: Mapping[tuple[str, str], int]) -> None:
    """Keep the sums of these (key, period)."""
    if spend:
        connection.execute(
            _SET[connection.dialect.name],
            [{"key_id": key_id, "period": period, "charged": charged} for (key_id, period), charged in spend.items()],
        )


def restart(connection: Connection, account_id: str, key_id: str, kind: BudgetPeriod | None, now: float) -> None:
    """Begin to keep the sums of periods of this kind, from the running one on; none at all for None."""
    connection.execute(delete(key_spend).where(key_spend.c.key_id == key_id))
    if kind is None:
        return
    running = period_at(kind, now)
    query = (
        select(usage_daily.c.day, func.sum(usage_daily.c.charged).label("charged"))
        .where(usage_daily.c.account_id == account_id, usage_daily.c.key_id == key_id, usage_daily.c.day >= running)
        .group_by(usage_daily.c.day)
    )
    sums = {(key_id, running): 0}
    for row in connection.execute(query):  # days to come too: another machine's clock was ahead
        period = key_id, period_of(kind, row.day)
        sums[period] = sums.get(period, 0) + int(row.charged)
    write_spend(connection, sums)
