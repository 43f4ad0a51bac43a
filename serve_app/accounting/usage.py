"""Usage queries: sums from the daily aggregates, individual requests from the usage rows."""

from __future__ import annotations

import base64
import json
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Subquery, Table, case, func, select, true, tuple_

from serve_app.accounting.dialects import texts_in, whole
from serve_app.accounting.registry import LONG_S, reads
from serve_app.accounting.schema import api_keys, audit_log, price_versions, usage_daily
from serve_app.accounting.schema import usage as usage_rows
from serve_app.accounting.snapshots import read_account
from serve_app.accounting.validation import check_day, check_page, equals
from serve_app.contracts.books import AccountSnapshot, Outcome, RequestSums, UsagePage, UsageRecord, UsageRow
from serve_app.contracts.commands import (
    MAX_MAKERS,
    MAX_SEARCHED,
    MAX_SUMMED,
    FindRequest,
    KeyMakers,
    ListUsage,
    PricedModels,
    SearchRequests,
    ShowAccount,
    SumRequests,
    SumUsage,
)
from serve_app.contracts.errors import InvalidValue
from serve_app.contracts.money import Price
from serve_app.contracts.units import HOUR_S

_GROUPS = {
    "day": usage_daily.c.day,
    "model": usage_daily.c.model,
    "key": usage_daily.c.key_id,
    "account": usage_daily.c.account_id,
}
_SUMS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "charged")
_AS_STORED = [field.name for field in fields(UsageRecord) if field.name not in ("price", "outcome")]
_PLACE = (usage_rows.c.finished_at, usage_rows.c.request_id)
_ORDER = (usage_rows.c.account_id, *_PLACE)  # the order of an index
_RECORDS = select(
    usage_rows, price_versions.c.input, price_versions.c.cached_input, price_versions.c.output
).select_from(usage_rows.join(price_versions))


@reads(SumUsage, timeout_s=LONG_S)
def sum_usage(connection: Connection, wanted: SumUsage, _now: float) -> list[UsageRow]:
    known = (*_GROUPS, "tag")
    unknown = [name for name in wanted.group_by if name not in known]
    if unknown:
        raise InvalidValue(f"cannot group by {', '.join(map(repr, unknown))}: use any of {', '.join(known)}")
    matching = _matching(connection, usage_daily, wanted)
    if wanted.day_from is not None:
        matching.append(usage_daily.c.day >= check_day(wanted.day_from))
    if wanted.day_to is not None:
        matching.append(usage_daily.c.day <= check_day(wanted.day_to))
    if wanted.day_from is not None and wanted.day_to is not None and wanted.day_from > wanted.day_to:
        raise InvalidValue(f"the first day, {wanted.day_from}, is after the last day, {wanted.day_to}: swap them")
    tagged = _tagged(connection, wanted.account_id)
    columns = _GROUPS | {"tag": func.coalesce(tagged.c.tag, "").label("tag")}
    groups = [columns[name] for name in dict.fromkeys(wanted.group_by)]
    sums = [func.coalesce(func.sum(usage_daily.c[name]), 0).label(name) for name in _SUMS]
    query = select(*groups, *sums).where(*matching).group_by(*groups).order_by(*groups)
    if "tag" in wanted.group_by:
        query = query.select_from(usage_daily.outerjoin(tagged, usage_daily.c.key_id == tagged.c.key_id))
    if wanted.most is not None:
        query = query.limit(wanted.most + 1)
    found = connection.execute(query).all()
    if wanted.most is not None and len(found) > wanted.most:
        raise InvalidValue(f"more than {wanted.most} groups: request fewer days, a single key or fewer groupings")
    return [
        # PostgreSQL returns sums of 64-bit numbers as decimals.
        UsageRow(**dict(row._mapping) | {name: int(row._mapping[name]) for name in _SUMS})
        for row in found
        if row.requests
    ]


@reads(SumRequests, timeout_s=LONG_S)
def sum_requests(connection: Connection, wanted: SumRequests, _now: float) -> list[RequestSums]:
    rows = usage_rows.c
    matching = [
        equals(rows.account_id, wanted.account_id),
        rows.finished_at >= wanted.time_from,
        rows.finished_at < wanted.time_to,
    ]
    counted = select(rows.request_id).where(*matching).limit(MAX_SUMMED + 1).subquery()
    if connection.execute(select(func.count()).select_from(counted)).scalar_one() > MAX_SUMMED:
        raise InvalidValue(f"more than {MAX_SUMMED:,} requests in this range: choose a shorter range")
    by_hour = wanted.unit == "hour"
    moment = (whole(connection, rows.finished_at / HOUR_S) if by_hour else rows.day).label("moment")
    tagged = _tagged(connection, wanted.account_id)
    by_tag: ColumnElement[str] = func.coalesce(tagged.c.tag, "").label("tag")
    group = {"model": rows.model, "key": rows.key_id, "tag": by_tag, "outcome": rows.outcome}[wanted.by]
    sums = [func.sum(rows[name]).label(name) for name in _SUMS if name != "requests"]
    failed = func.sum(case((rows.outcome == Outcome.FAILED.value, 1), else_=0)).label("failed")
    seconds = func.sum(rows.finished_at - rows.started_at).label("seconds")
    query = select(moment, group, func.count().label("requests"), failed, seconds, *sums).where(*matching)
    if wanted.by == "tag":
        query = query.select_from(usage_rows.outerjoin(tagged, rows.key_id == tagged.c.key_id))
    found = []
    for row in connection.execute(query.group_by(moment, group).order_by(moment, group)):
        values: dict[str, Any] = {name: int(row._mapping[name]) for name in (*_SUMS, "failed")}
        values |= {group.name: row._mapping[group.name], "seconds": float(row.seconds)}
        day = datetime.fromtimestamp(row.moment * HOUR_S, UTC).isoformat()[:13] if by_hour else row.moment
        found.append(RequestSums(**values, day=day))
    return found


@reads(SearchRequests)
def search_requests(connection: Connection, wanted: SearchRequests, _now: float) -> UsagePage:
    rows = usage_rows.c
    place, newest_first = tuple_(*_PLACE), [column.desc() for column in _PLACE]
    within = [equals(rows.account_id, wanted.account_id)]
    if wanted.time_from is not None:
        within.append(rows.finished_at >= wanted.time_from)
    if wanted.time_to is not None:
        within.append(rows.finished_at < wanted.time_to)
    if wanted.after is not None:
        within.append(place < tuple_(*_cursor_place(wanted.after)[1:]))
    # The search reads at most MAX_SEARCHED rows, whether or not the filters match them. `last` is the last of these.
    ends = select(*_ORDER).where(*within).order_by(*newest_first).offset(MAX_SEARCHED - 1).limit(1)
    last = connection.execute(ends).one_or_none()
    if last is not None:
        within.append(place >= tuple_(last.finished_at, last.request_id))
    if wanted.model is not None:
        within.append(equals(rows.model, wanted.model))
    if wanted.key_ids is not None:
        within.append(rows.key_id.in_(wanted.key_ids))
    if wanted.outcome is not None:
        within.append(rows.outcome == wanted.outcome.value)
    query = _RECORDS.where(*within).order_by(*newest_first).limit(check_page(wanted.limit) + 1)
    page = connection.execute(query).all()
    records = tuple(map(_record, page[: wanted.limit]))
    if len(page) > wanted.limit:
        return UsagePage(records, _cursor_after(records[-1]))
    return UsagePage(records, None if last is None else _cursor(*last))


@reads(KeyMakers)
def key_makers(connection: Connection, wanted: KeyMakers, _now: float) -> dict[str, str]:
    made = (equals(audit_log.c.account_id, wanted.account_id), audit_log.c.action == "create_key")
    query = select(audit_log.c.subject, audit_log.c.actor).where(*made).order_by(audit_log.c.id.desc())
    return {row.subject: row.actor for row in connection.execute(query.limit(MAX_MAKERS))}


@reads(ShowAccount, timeout_s=LONG_S)
def show_account(connection: Connection, wanted: ShowAccount, now: float) -> tuple[AccountSnapshot, UsageRow]:
    account = read_account(connection, wanted.account_id)
    rows = sum_usage(connection, SumUsage(wanted.account_id), now)
    return account, rows[0] if rows else UsageRow(0, 0, 0, 0, 0)


@reads(ListUsage, timeout_s=LONG_S)
def list_usage(connection: Connection, wanted: ListUsage, _now: float) -> UsagePage:
    rows = usage_rows.c
    matching = _matching(connection, usage_rows, wanted)
    if wanted.time_from is not None:
        matching.append(rows.finished_at >= wanted.time_from)
    if wanted.time_to is not None:
        matching.append(rows.finished_at < wanted.time_to)
    if wanted.after is not None:
        matching.append(tuple_(*_ORDER) > tuple_(*_cursor_place(wanted.after)))
    query = _RECORDS.where(*matching).order_by(*_ORDER).limit(check_page(wanted.limit) + 1)
    page = connection.execute(query).all()
    records = tuple(map(_record, page[: wanted.limit]))
    return UsagePage(records, _cursor_after(records[-1]) if len(page) > wanted.limit else None)


@reads(FindRequest)
def find_request(connection: Connection, wanted: FindRequest, _now: float) -> UsageRecord | None:
    row = connection.execute(_RECORDS.where(equals(usage_rows.c.request_id, wanted.request_id))).one_or_none()
    return None if row is None else _record(row)


def _record(row: Any) -> UsageRecord:
    return UsageRecord(
        **{name: row._mapping[name] for name in _AS_STORED},
        price=Price(row.input, row.cached_input, row.output),
        outcome=Outcome(row.outcome),
    )


@reads(PricedModels)
def priced_models(connection: Connection, _wanted: PricedModels, _now: float) -> list[str]:
    return [row.model for row in connection.execute(select(price_versions.c.model).distinct())]


def _matching(connection: Connection, table: Table, wanted: SumUsage | ListUsage) -> list[ColumnElement[bool]]:
    texts = {"account_id": wanted.account_id, "key_id": wanted.key_id, "model": wanted.model}
    matching = [equals(table.c[name], text) for name, text in texts.items() if text is not None]
    if wanted.tag == "":
        matching.append(table.c.key_id.in_(select(api_keys.c.id).where(api_keys.c.tags.is_(None))))
    elif wanted.tag is not None:
        tagged = _tagged(connection, wanted.account_id)
        matching.append(table.c.key_id.in_(select(tagged.c.key_id).where(equals(tagged.c.tag, wanted.tag))))
    return matching


def _tagged(connection: Connection, account_id: str | None) -> Subquery:
    """Returns a query for (`key_id`, `tag`), with a row for each tag of each key of one account, or of all accounts."""
    tags = texts_in(connection, api_keys.c.tags)
    query = select(api_keys.c.id.label("key_id"), tags.c.value.label("tag"))
    query = query.select_from(api_keys.join(tags, true())).where(api_keys.c.tags.is_not(None))
    if account_id is not None:
        query = query.where(equals(api_keys.c.account_id, account_id))
    return query.subquery("tagged")


def _cursor_after(last: UsageRecord) -> str:
    return _cursor(last.account_id, last.finished_at, last.request_id)


def _cursor(account_id: str, finished_at: float, request_id: str) -> str:
    place = json.dumps([account_id, finished_at, request_id])
    return base64.urlsafe_b64encode(place.encode()).decode()


def _cursor_place(cursor: str) -> tuple[str, float, str]:
    try:
        account_id, finished_at, request_id = json.loads(base64.b64decode(cursor, altchars=b"-_", validate=True))
        if (account_id + request_id).isprintable() and isinstance(finished_at, float | int):
            return account_id, float(finished_at), request_id
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        pass
    raise InvalidValue(f"invalid `after` {cursor!r}: pass the `next` of the previous page")
