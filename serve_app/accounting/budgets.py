"""Stores how much each key with a budget was charged in each period. The sums always equal those of the usage rows.

A period is named by its UTC day or month: "2026-11-21" or "2026-11" (`contracts.periods`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sqlalchemy import Connection, delete, func, select

from serve_app.accounting.dialects import Upsert
from serve_app.accounting.schema import key_spend, usage_daily
from serve_app.contracts.periods import BudgetPeriod, period_at

_SET = Upsert(key_spend, lambda new: {"charged": new.charged})


def period_name(kind: BudgetPeriod, day: str) -> str:
    """Returns the name of the period that contains a day, YYYY-MM-DD."""
    return day if kind == "day" else day[: len("YYYY-MM")]


def read_spend(connection: Connection, wanted: Collection[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """Returns the stored charges of these (key, period) pairs, in nano-units. Missing pairs are omitted."""
    query = select(key_spend).where(
        key_spend.c.key_id.in_({key_id for key_id, _ in wanted}),
        key_spend.c.period.in_({period for _, period in wanted}),
    )
    rows = ((row.key_id, row.period, row.charged) for row in connection.execute(query))
    return {(key_id, period): charged for key_id, period, charged in rows if (key_id, period) in wanted}


def count_spend(connection: Connection, account_id: str, key_id: str, period: str) -> int:
    """Returns the nano-units that a key was charged in a period, from the daily aggregates."""
    query = select(func.coalesce(func.sum(usage_daily.c.charged), 0)).where(
        usage_daily.c.account_id == account_id,  # the first column of the index
        usage_daily.c.key_id == key_id,
        usage_daily.c.day.between(period, f"{period}-31"),  # for a day, this matches only that day
    )
    return int(connection.execute(query).scalar_one())


def write_spend(connection: Connection, spend: Mapping[tuple[str, str], int]) -> None:
    """Stores the sums of these (key, period) pairs. The mapping must not be empty."""
    _SET.run(
        connection,
        [{"key_id": key_id, "period": period, "charged": charged} for (key_id, period), charged in spend.items()],
    )


def count_anew(connection: Connection, account_id: str, key_id: str, kind: BudgetPeriod | None, now: float) -> None:
    """Replaces a key's stored sums with sums per day or month (`kind`), from the current period on.

    If `kind` is None, only removes the stored sums.
    """
    connection.execute(delete(key_spend).where(key_spend.c.key_id == key_id))
    if kind is None:
        return
    running = period_at(kind, now).name
    query = (
        select(usage_daily.c.day, func.sum(usage_daily.c.charged).label("charged"))
        .where(usage_daily.c.account_id == account_id, usage_daily.c.key_id == key_id, usage_daily.c.day >= running)
        .group_by(usage_daily.c.day)
    )
    sums = {(key_id, running): 0}
    for row in connection.execute(query):  # including later days, in case another machine's clock is ahead
        period = key_id, period_name(kind, row.day)
        sums[period] = sums.get(period, 0) + int(row.charged)
    write_spend(connection, sums)
