"""What an account has used: by day, request by request, and as a file."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Collection
from dataclasses import replace
from typing import Final

from fastapi.responses import Response, StreamingResponse

from serve_app.console.chart import stacked
from serve_app.console.web import Refused, Visit
from serve_app.contracts import commands
from serve_app.contracts.exports import REQUEST_COLUMNS, Csv, Row, request_row
from serve_app.contracts.periods import Period, month_named, period_at

_DAY_S: Final = 86400.0
SPANS: Final = ("30", "7", "90")  # days; of each of these the first is the default
GROUPS: Final = {"model": "model", "key": "key_id"}
MEASURES: Final = {"cost": "charged", "requests": "requests", "tokens": "tokens"}
PAGE: Final = 100
FILE_PAGE: Final = 1000
_DAY: Final = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)


async def usage(visit: Visit) -> Response:
    run, account_id = visit.console.books.run, visit.request.path_params["account_id"]
    span, group, measure = _choice(visit, "days", SPANS), _choice(visit, "by", GROUPS), _choice(visit, "of", MEASURES)
    now = visit.console.now()
    days = [period_at("day", now - back * _DAY_S).name for back in range(int(span) - 1, -1, -1)]
    account = await run(commands.GetAccount(account_id))
    by_day = await run(commands.SumUsage(account_id, day_from=days[0], group_by=("day", _group(group))))
    totals = await run(commands.SumUsage(account_id, day_from=days[0], group_by=(_group(group),)))
    names = {key.key_id: key.name for key in await run(commands.ListKeys(account_id))} if group == "key" else {}
    values: dict[tuple[str, str], int] = {}
    for row in by_day:
        name = str(getattr(row, GROUPS[group]))
        tokens = row.prompt_tokens + row.completion_tokens
        values[row.day or "", name] = tokens if measure == "tokens" else getattr(row, MEASURES[measure])
    chart = stacked(days, values)
    return visit.page(
        "usage.html",
        account=account,
        days=days,
        chart=chart,
        labels=[names.get(name, name) for name in chart.names],
        totals=[(names.get(name := str(getattr(row, GROUPS[group])), name), row) for row in totals],
        by_day={day: [row for row in by_day if row.day == day] for day in reversed(days)},
        chosen={"days": span, "by": group, "of": measure},
        choices={"days": SPANS, "by": GROUPS, "of": MEASURES},
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
    return visit.page("requests.html", day=day.name, page=page, names=names)


async def csv(visit: Visit) -> Response:
    """The requests of a month."""
    month = named_month(visit, visit.request.path_params["month"])
    account_id = visit.request.path_params["account_id"]
    pages = _pages(visit, commands.ListUsage(account_id, time_from=month.begins, time_to=month.ends, limit=FILE_PAGE))
    first = await anext(pages)  # a failure of the first page still has its status

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
    """Raises Refused."""
    try:
        return month_named(name)
    except ValueError:
        raise Refused(404, "There is no such month.") from None


def _group(name: str) -> commands.Group:
    return "key" if name == "key" else "model"


def _choice(visit: Visit, name: str, known: Collection[str]) -> str:
    """What the address asks for, or else the first."""
    asked = visit.request.query_params.get(name, "")
    return asked if asked in known else next(iter(known))


def _day(name: str) -> Period:
    try:
        if not _DAY.fullmatch(name):
            raise ValueError(name)
        month = month_named(name[:7])
        day = period_at("day", month.begins + (int(name[8:]) - 1) * _DAY_S)
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
