"""Pages for operators about all accounts together: the overview, and the revenue, also as a CSV file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final

from fastapi.responses import Response

from serve_app.console.error_pages import CODES, meaning
from serve_app.console.serving import serving
from serve_app.console.web import Refused, Visit
from serve_app.contracts import commands, operators
from serve_app.contracts.books import Outcome, UsageRow
from serve_app.contracts.calls import Unavailable
from serve_app.contracts.money import NANO_PER_UNIT, format_amount
from serve_app.contracts.periods import period_at
from serve_app.contracts.units import DAY_S
from serve_app.storage.exports import Csv

RANGES: Final = {"30": "30 days", "1": "Today", "7": "7 days", "90": "90 days", "365": "12 months"}
TODAY: Final = "1"
FAILURES: Final = 10  # rows
GROUPS: Final = {"day": "Day", "model": "Model", "account": "Account"}
MAX_DAYS: Final = 400
SERIES: Final = 7  # in a chart, in addition to the sum of all others
MAX_ROWS: Final = 100_000  # in a file
MAX_GROUPS: Final = 20_000
UNCHARGED: Final = 1000


@dataclass(frozen=True, slots=True)
class Days:
    """The days in UTC from `first` to `last`, both included.

    `preset` is one of RANGES, or empty for dates that the visitor chose.
    """

    first: date
    last: date
    preset: str = ""

    @property
    def names(self) -> list[str]:
        count = (self.last - self.first).days + 1
        return [(self.first + timedelta(number)).isoformat() for number in range(count)]

    @property
    def bounds(self) -> tuple[str, str]:
        return self.first.isoformat(), self.last.isoformat()

    @property
    def before(self) -> Days:
        """The range of the same length that ends before this one."""
        length = self.last - self.first + timedelta(1)
        return Days(self.first - length, self.last - length)

    def has_today(self, now: float) -> bool:
        """Returns whether the last day is today. `now` is in Unix seconds."""
        return self.last == datetime.fromtimestamp(now, UTC).date()

    @property
    def label(self) -> str:
        return RANGES.get(self.preset) or f"{self.first} to {self.last}"

    @property
    def query(self) -> str:
        return f"days={self.preset}" if self.preset else f"from={self.first}&to={self.last}"


async def currency_of(visit: Visit) -> str:
    """Returns the currency of the service. Empty before its first account."""
    nothing = operators.SumService("1971-01-01", "1971-01-01", 1)  # its reply names the currency
    return (await visit.console.books.run(nothing)).currency


def chosen_days(visit: Visit, default: str = "30") -> Days:
    """Returns the range in the query: `days`, or `from` and `to`. Raises Refused."""
    query, today = visit.request.query_params, datetime.fromtimestamp(visit.console.now(), UTC).date()
    if query.get("from") or query.get("to"):
        try:
            last = date.fromisoformat(query.get("to") or today.isoformat())
            first = date.fromisoformat(query.get("from") or last.isoformat())
        except ValueError:
            raise Refused(422, "Give days as YYYY-MM-DD.") from None
        if first.year < 1971 or not 0 <= (last - first).days < MAX_DAYS:
            raise Refused(422, f"Choose 1 to {MAX_DAYS} days; the first day comes first.")
        return Days(first, last)
    preset = query.get("days", "")
    preset = preset if preset in RANGES else default
    return Days(today - timedelta(int(preset) - 1), today, preset)


async def overview(visit: Visit) -> Response:
    run, days = visit.console.books.run, chosen_days(visit, TODAY)
    used = await run(operators.SumService(*days.bounds, 5))
    before = await run(operators.SumService(*days.before.bounds, 1))
    now = visit.console.now()
    today = datetime.fromtimestamp(now, UTC).date().isoformat()
    spending = await run(operators.SumService(today, today, 10))
    uncharged = await run(operators.ListUncharged(UNCHARGED))
    begins = datetime.combine(days.first, datetime.min.time(), UTC).timestamp()
    failed = [one for one in uncharged if one.outcome is Outcome.FAILED and one.finished_at >= begins]
    try:
        live = await visit.console.live()
    except Unavailable:
        live = None
    totals, totals_before = _total(used.days), _total(before.days)
    is_today = days.preset == TODAY  # a part of a day can't be compared with a whole day
    begins_today = period_at("day", now).begins
    recent = await visit.console.pressure.recent()
    refused = await _refused(visit, begins_today, now)
    unidentified = 0 if refused is None else refused.get("unidentified", 0)  # an older gateway does not count these
    failures = Counter((one.account_id, one.model) for one in failed).most_common(FAILURES)
    ids = [account_id for (account_id, _), _ in failures]
    most_refused = [] if refused is None else refused["accounts"][:FAILURES]
    ids += [one["account"] for one in most_refused]
    return visit.page(
        "operator_overview.html",
        days=days,
        ranges=RANGES,
        used=used,
        totals=totals,
        before=before,
        changes={
            name: None if is_today else _change(_figure(totals, name), _figure(totals_before, name))
            for name in ("charged", "tokens", "requests")
        },
        active_change=None if is_today else _change(used.active, before.active),
        series={name: _series(days, used.days, name) for name in ("charged", "tokens", "requests")},
        failed=failed,
        failures=failures,
        names=await run(operators.NameSubjects(tuple(dict.fromkeys(ids)))),
        refused=None if refused is None else [one | {"reasons": _reasons(one)} for one in most_refused],
        refused_by={} if refused is None else {one["account"]: one["refused"] for one in refused["accounts"]},
        refused_today=0 if refused is None else sum(one["refused"] for one in refused["accounts"]) + unidentified,
        unidentified=unidentified,
        refused_is_all=refused is None or refused["is_complete"],
        recent=recent,
        failures_are_all=len(uncharged) < UNCHARGED or uncharged[-1].finished_at < begins,
        error_rate=len(failed) / totals.requests if totals.requests else None,
        outcomes=_outcomes(days, used.days, failed) | {"so_far": days.has_today(now)},
        today=spending,
        today_total=_total(spending.days),
        serving=serving(live),
        currency=used.currency,
    )


async def _refused(visit: Visit, begins: float, ends: float) -> dict[str, Any] | None:
    """Returns the accounts whose requests were refused; None while no gateway answers."""
    try:
        return await visit.console.administer_or_refuse("refused", {"since": begins, "until": ends})
    except (Refused, Unavailable):
        return None


def _reasons(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns an account's most frequent reasons: status, number of requests, and what the code means.

    A gateway of the previous release does not report the model. The meaning then comes from the code alone.
    """
    found = []
    for code, number, status, *model in row["codes"]:
        why = meaning(code, model[0]) if model else CODES.get(code)
        found.append({"status": status, "number": number, "why": why or code})
    return found


async def revenue(visit: Visit) -> Response:
    run, days = visit.console.books.run, chosen_days(visit)
    group = _group(visit)
    used = await run(operators.SumService(*days.bounds, SERIES))
    labels: dict[str, str] = {}
    if group == "model":
        rows = await run(_by(days, "model", MAX_GROUPS))
        parts = [(row.model or "", row.day or "", row.charged) for row in rows]
        table = _table([(row.model or "", row) for row in rows])
    elif group == "account":
        labels = {one.account_id: one.name for one in used.top}
        rows = await run(operators.SumAccountDays(tuple(labels), *days.bounds))
        parts = [(row.account_id or "", row.day or "", row.charged) for row in rows]
        top = await run(operators.SumService(*days.bounds, 50))
        labels |= {one.account_id: one.name for one in top.top}
        table = [(one.account_id, one.requests, one.tokens, one.charged) for one in top.top]
    else:
        parts = [("Revenue", row.day or "", row.charged) for row in used.days]
        table = [
            (row.day or "", row.requests, row.prompt_tokens + row.completion_tokens, row.charged)
            for row in reversed(used.days)
        ]
    before = await run(operators.SumService(*days.before.bounds, 1))
    totals, totals_before = _total(used.days), _total(before.days)
    changes = {name: _change(_figure(totals, name), _figure(totals_before, name)) for name in ("charged", "requests")}
    changes["active"] = _change(used.active, before.active)
    return visit.page(
        "operator_revenue.html",
        days=days,
        ranges=RANGES,
        group=group,
        groups=GROUPS,
        chart=_chart(days, parts, used.days, labels) | {"so_far": days.has_today(visit.console.now())},
        table=table,
        labels=labels,
        totals=totals,
        changes=dict.fromkeys(changes)
        if days.preset == TODAY
        else changes,  # a part of a day can't be compared with a whole day
        active=used.active,
        currency=used.currency,
    )


async def revenue_csv(visit: Visit) -> Response:
    """Returns the page's revenue as a CSV file, by day and group. It has all groups."""
    days, group = chosen_days(visit), _group(visit)
    rows = await visit.console.books.run(_by(days, group, MAX_ROWS))
    used = await visit.console.books.run(operators.SumService(*days.bounds, 1))
    columns = ["day", "requests", "prompt_tokens", "cached_tokens", "completion_tokens", "charged", "currency"]
    if group != "day":
        columns.insert(1, "account_id" if group == "account" else group)
    made = Csv(columns)
    lines = [
        {name: getattr(row, name, None) for name in columns}
        | {"charged": format_amount(row.charged), "currency": used.currency}
        for row in rows
    ]
    name = f"revenue-by-{group}-{days.first}-{days.last}.csv"
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return Response(made.head() + made.rows(lines) + made.tail(), media_type=Csv.media_type, headers=headers)


def _by(days: Days, group: str, most: int) -> commands.SumUsage:
    first, last = days.bounds
    more: tuple[commands.Group, ...] = () if group == "day" else ("model",) if group == "model" else ("account",)
    return commands.SumUsage(day_from=first, day_to=last, group_by=("day", *more), most=most)


def _group(visit: Visit) -> str:
    asked = visit.request.query_params.get("by", "")
    return asked if asked in GROUPS else next(iter(GROUPS))


def _total(rows: Sequence[UsageRow]) -> UsageRow:
    names = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "charged")
    return UsageRow(*(sum(getattr(row, name) for row in rows) for name in names))


def _table(rows: Sequence[tuple[str, UsageRow]]) -> list[tuple[str, int, int, int]]:
    """Sums rows by their name, largest revenue first: name, requests, tokens, revenue."""
    by_name: dict[str, list[UsageRow]] = {}
    for name, row in rows:
        by_name.setdefault(name, []).append(row)
    sums = {name: _total(some) for name, some in by_name.items()}
    ordered = sorted(sums.items(), key=lambda one: (-one[1].charged, one[0]))
    return [(name, one.requests, one.prompt_tokens + one.completion_tokens, one.charged) for name, one in ordered]


def _chart(
    days: Days, parts: Sequence[tuple[str, str, int]], totals: Sequence[UsageRow], labels: Mapping[str, str]
) -> dict[str, Any]:
    """Returns stacked series of revenue by day, the largest first. All but the SERIES largest are summed."""
    sums: dict[str, int] = {}
    for name, _, charged in parts:
        sums[name] = sums.get(name, 0) + charged
    largest = sorted(sums, key=lambda name: (-sums[name], name))[:SERIES]
    names = days.names
    rest = {row.day or "": row.charged for row in totals}
    values = {name: dict.fromkeys(names, 0) for name in largest}
    for name, day, charged in parts:
        if name in values and day in values[name]:
            values[name][day] += charged
            rest[day] = rest.get(day, 0) - charged
    series = [
        {"name": labels.get(name, name), "values": [_units(values[name][day]) for day in names]} for name in largest
    ]
    if any(rest.get(day, 0) > 0 for day in names):
        series.append({"name": "Others", "values": [_units(max(0, rest.get(day, 0))) for day in names]})
    return {"labels": names, "series": series, "type": "bar", "stacked": True}


def _units(nano: int) -> float:
    return round(nano / NANO_PER_UNIT, 6)


def _figure(row: UsageRow, name: str) -> int:
    return row.prompt_tokens + row.completion_tokens if name == "tokens" else int(getattr(row, name))


def _series(days: Days, rows: Sequence[UsageRow], name: str) -> list[int]:
    by_day = {row.day: _figure(row, name) for row in rows}
    return [by_day.get(day, 0) for day in days.names]


def _failed_by_day(days: Days, failed: Sequence[operators.Uncharged]) -> list[int]:
    begins = datetime.combine(days.first, datetime.min.time(), UTC).timestamp()
    counts = [0] * len(days.names)
    for one in failed:
        place = int((one.finished_at - begins) // DAY_S)
        if place < len(counts):
            counts[place] += 1
    return counts


def _outcomes(days: Days, rows: Sequence[UsageRow], failed: Sequence[operators.Uncharged]) -> dict[str, Any]:
    """Returns a chart of the requests of each day, with the failed ones as a separate series."""
    requests, failures = _series(days, rows, "requests"), _failed_by_day(days, failed)
    served = [max(0, number - lost) for number, lost in zip(requests, failures, strict=True)]
    series = [{"name": "Served", "values": served}, {"name": "Failed (5xx)", "values": failures}]
    return {"labels": days.names, "series": series, "type": "bar", "stacked": True}


def _change(now: float, before: float) -> float | None:
    """Returns the relative change; None without an earlier value."""
    return (now - before) / before if before else None
