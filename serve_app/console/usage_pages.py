"""An account's usage: by day, by request, and as a file."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Collection, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final, Literal

from fastapi.responses import Response, StreamingResponse

from serve_app.api.doors import door_of
from serve_app.console.chart import stacked
from serve_app.console.web import Refused, Visit
from serve_app.contracts import commands
from serve_app.contracts.books import UsageRow
from serve_app.contracts.periods import Period, month_named, period_at
from serve_app.contracts.units import DAY_S, HOUR_S
from serve_app.storage.exports import REQUEST_COLUMNS, Csv, Row, request_row

HOURS: Final = "24 hours"
SPANS: Final = {"30 days": 30, HOURS: 1, "7 days": 7, "90 days": 90}  # here and below, the first entry is the default
GROUPS: Final = {"model": "model", "key": "key_id", "tag": "tag"}
MEASURES: Final = {"cost": "charged", "requests": "requests", "tokens": "tokens"}
COUNTS: Final = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "charged")
PAGE: Final = 100
FILE_PAGE: Final = 1000
_DAY: Final = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)


async def usage(visit: Visit) -> Response:
    run, account_id = visit.console.books.run, visit.request.path_params["account_id"]
    span, group, measure = _choice(visit, "span", SPANS), _choice(visit, "by", GROUPS), _choice(visit, "of", MEASURES)
    now = visit.console.now()
    account = await run(commands.GetAccount(account_id))
    if span == HOURS:
        first = now // HOUR_S * HOUR_S - 23 * HOUR_S
        days = [datetime.fromtimestamp(first + number * HOUR_S, UTC).isoformat()[:13] for number in range(24)]
        by_day = await run(commands.SumHours(account_id, first, now + HOUR_S, _group(group)))
        whole = await run(commands.SumHours(account_id, first, now + HOUR_S)) if group == "tag" else by_day
    else:
        days = [period_at("day", now - back * DAY_S).name for back in range(SPANS[span] - 1, -1, -1)]
        wanted = commands.SumUsage(account_id, day_from=days[0], group_by=("day", _group(group)))
        by_day = await run(wanted)
        # A key with several tags is in several rows; sums by day count each request once.
        whole = await run(replace(wanted, group_by=("day",))) if group == "tag" else by_day
    names = {"": "no tag"}
    if group == "key":
        names = {key.key_id: key.name for key in await run(commands.ListKeys(account_id))}
    values: dict[tuple[str, str], int] = {}
    for row in by_day:
        name = str(getattr(row, GROUPS[group]))
        tokens = row.prompt_tokens + row.completion_tokens
        values[row.day or "", name] = tokens if measure == "tokens" else getattr(row, MEASURES[measure])
    chart = stacked(days, values, names)
    totals = _by_name(by_day, GROUPS[group])
    return visit.page(
        "usage.html",
        account=account,
        days=days,
        chart=chart,
        labels=[names.get(name, name) for name in chart.names],
        totals=[(names.get(name, name), row) for name, row in totals.items()],
        by_day={day: [row for row in whole if row.day == day] for day in reversed(days)},
        chosen={"span": span, "by": group, "of": measure},
        choices={"span": SPANS, "by": GROUPS, "of": MEASURES},
        unit="hour" if span == HOURS else "day",
        month=period_at("month", now).name,
    )


async def requests(visit: Visit) -> Response:
    account_id, query = visit.request.path_params["account_id"], visit.request.query_params
    day = _day(query.get("day") or period_at("day", visit.console.now()).name)
    wanted = commands.ListUsage(
        account_id, time_from=day.begins, time_to=day.ends, after=query.get("after"), limit=PAGE
    )
    page = await visit.console.books.run(wanted)
    names = {key.key_id: key.name for key in await visit.console.books.run(commands.ListKeys(account_id))}
    doors = {row.request_id: door.path for row in page.rows if (door := door_of(row.request_id)) is not None}
    return visit.page("requests.html", day=day.name, page=page, names=names, doors=doors)


async def csv(visit: Visit) -> Response:
    """Returns the requests of a month as a CSV file."""
    month = named_month(visit, visit.request.path_params["month"])
    account_id = visit.request.path_params["account_id"]
    wanted = commands.ListUsage(account_id, time_from=month.begins, time_to=month.ends, limit=FILE_PAGE)
    pages = _pages(visit, wanted)
    first = await anext(pages)  # a failure on the first page still sets the status

    async def file() -> AsyncIterator[str]:
        made = Csv(REQUEST_COLUMNS)
        yield made.head() + made.rows(first)
        async for page in pages:
            yield made.rows(page)

    name = f"usage-{month.name}.csv"
    return StreamingResponse(
        file(), media_type=Csv.media_type, headers={"content-disposition": f'attachment; filename="{name}"'}
    )


def named_month(visit: Visit, name: str) -> Period:
    """Returns the named month. Raises Refused."""
    try:
        return month_named(name)
    except ValueError:
        raise Refused(404, "There is no such month.") from None


def _by_name(rows: Iterable[UsageRow], field: str) -> dict[str, UsageRow]:
    """Sums the rows by the name of a model, key or tag."""
    sums: dict[str, UsageRow] = {}
    for row in rows:
        name = str(getattr(row, field))
        before = sums.get(name, UsageRow(0, 0, 0, 0, 0))
        sums[name] = UsageRow(*(getattr(before, one) + getattr(row, one) for one in COUNTS))
    return dict(sorted(sums.items()))


def _group(name: str) -> Literal["model", "key", "tag"]:
    return "key" if name == "key" else "tag" if name == "tag" else "model"


def _choice(visit: Visit, name: str, known: Collection[str]) -> str:
    """Returns the choice in the query, or else the first."""
    asked = visit.request.query_params.get(name, "")
    return asked if asked in known else next(iter(known))


def _day(name: str) -> Period:
    try:
        if not _DAY.fullmatch(name):
            raise ValueError(name)
        month = month_named(name[:7])
        day = period_at("day", month.begins + (int(name[8:]) - 1) * DAY_S)
    except ValueError:
        raise Refused(404, "There is no such day.") from None
    if day.name != name:
        raise Refused(404, "There is no such day.")
    return day


async def _pages(visit: Visit, wanted: commands.ListUsage) -> AsyncIterator[list[Row]]:
    while True:
        page = await visit.console.books.run(wanted)
        yield [request_row(row) for row in page.rows]
        if page.next is None:
            return
        wanted = replace(wanted, after=page.next)
