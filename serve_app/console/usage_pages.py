"""An account's usage: chart, tables and file."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any, Final
from urllib.parse import urlencode

from fastapi.responses import Response

from serve_app.console.date_range import CUSTOM, DEFAULT, PRESETS, DateRange, chosen_range, preset
from serve_app.console.usage_report import GROUPS, MEASURES, Report, report
from serve_app.console.web import Refused, Visit
from serve_app.contracts import commands
from serve_app.contracts.errors import InvalidValue
from serve_app.contracts.money import listing_places, summing_places
from serve_app.contracts.periods import Period, month_named
from serve_app.contracts.units import DAY_S, HOUR_S
from serve_app.storage.exports import Csv

_UNITS: Final = {"requests": "requests", "errors": "requests", "latency": "seconds"}


async def usage(visit: Visit) -> Response:
    account_id = visit.request.path_params["account_id"]
    account = await visit.console.books.run(commands.GetAccount(account_id))
    when, error = range_of(visit)
    group, measure = choice(visit, "by", GROUPS), choice(visit, "of", MEASURES)
    found: Report | None = None
    try:
        found = None if error else await report(visit.console.books, account_id, when, group, measure)
    except InvalidValue as problem:
        error = f"{str(problem).capitalize()}."
    chosen = {"by": group, "of": measure}
    return visit.page(
        "usage.html",
        range_error=error,
        account=account,
        report=found,
        chart=None if found is None else _chart(found, account.currency, visit.console.now()),
        group_places=2 if found is None else _places(found),
        moment_places=2 if found is None else listing_places([one.charged for one in found.moments.values()]),
        when=when,
        chosen=chosen_range_of(visit, when) | chosen,
        group_label=GROUPS[group],
        measure_label=MEASURES[measure],
        file=f"/accounts/{account_id}/usage.csv?{urlencode(when.query | chosen)}",
        presets=[*PRESETS.items(), (CUSTOM, "Custom")],
        groups=list(GROUPS.items()),
        measures=list(MEASURES.items()),
    )


async def csv(visit: Visit) -> Response:
    """Returns the figures of the page's chart and tables as a file."""
    when, error = range_of(visit)
    if error:
        raise Refused(422, error)
    group, measure = choice(visit, "by", GROUPS), choice(visit, "of", MEASURES)
    found = await report(visit.console.books, visit.request.path_params["account_id"], when, group, measure)
    made = Csv(found.columns)
    name = f"usage-{when.first_day}-{when.last_day}-by-{group}.csv"
    return Response(
        made.head() + made.rows(found.rows),
        media_type=Csv.media_type,
        headers={"content-disposition": f'attachment; filename="{name}"'},
    )


def range_of(visit: Visit, default: str = DEFAULT) -> tuple[DateRange, str]:
    """Returns the range in the query and "", or the default range and what is wrong."""
    now = visit.console.now()
    try:
        return chosen_range(visit.request.query_params, now, default), ""
    except ValueError as error:
        return preset(default, now), str(error)


def chosen_range_of(visit: Visit, when: DateRange) -> dict[str, str]:
    """Returns the values of the form's range fields; wrong dates stay as they were sent."""
    query = visit.request.query_params
    sent = {name: query[name] for name in ("from", "to") if query.get(name)}
    if query.get("range") == CUSTOM or (sent and query.get("range") not in PRESETS):
        return {"range": CUSTOM, "from": when.first_day, "to": when.last_day} | sent
    return when.query


def choice(visit: Visit, name: str, known: Collection[str]) -> str:
    """Returns the choice in the query if it is in `known`, else the first of `known`."""
    asked = visit.request.query_params.get(name, "")
    return asked if asked in known else next(iter(known))


def named_month(visit: Visit, name: str) -> Period:
    """Returns the named month. Raises Refused."""
    try:
        return month_named(name)
    except ValueError:
        raise Refused(404, "There is no such month.") from None


def _places(found: Report) -> int:
    """Returns the decimal places of the groups' costs. Tags overlap, so their costs need not add up to the total."""
    costs = [one.charged for one in found.groups.values()]
    return summing_places(costs) if sum(costs) == found.total.charged else listing_places(costs)


def _chart(found: Report, currency: str, now: float) -> dict[str, Any]:
    moments, by_hour = found.when.moments, found.when.unit == "hour"
    last_begins = found.when.ends - (HOUR_S if by_hour else DAY_S)
    return {
        "labels": [_hour(one) for one in moments] if by_hour else moments,
        "series": [{"name": name, "values": values} for name, values in found.series],
        "type": "line" if found.measure == "latency" else "bar",
        "stacked": found.measure != "latency",
        "failed": found.measure == "errors",
        "so_far": found.measure != "latency" and last_begins <= now < found.when.ends,
        "unit": currency if found.measure == "cost" else _UNITS.get(found.measure, "tokens"),
    }


def _hour(name: str) -> str:
    """Returns the hour of a name such as "2026-11-26T05": "26 Nov, 05:00"."""
    moment = datetime.fromisoformat(name)
    return f"{moment.day} {moment:%b, %H:%M}"
