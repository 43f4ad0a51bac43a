"""An account's overview: its balance, its usage in a chosen range, its current limits, and its first steps."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final
from urllib.parse import quote, unquote

from fastapi.responses import Response

from serve_app.console import error_pages
from serve_app.console.attempts import MAX_KEPT
from serve_app.console.billing_pages import forecast_of
from serve_app.console.date_range import preset
from serve_app.console.web import Visit
from serve_app.contracts import commands
from serve_app.contracts.books import Outcome, UsageRecord, UsageRow
from serve_app.contracts.calls import Unavailable
from serve_app.contracts.limiting import AccountStatus
from serve_app.contracts.money import NANO_PER_UNIT
from serve_app.contracts.notices import ListAlerts
from serve_app.contracts.people import ListPeople
from serve_app.contracts.periods import period_at
from serve_app.contracts.units import DAY_S, HOUR_S

STATUS_S: Final = 2.0
MINUTE_S: Final = 60.0
REJECTED_S: Final = 60.0
HOURS: Final = "24 hours"
RANGES: Final = {"7 days": 7, HOURS: 1, "30 days": 30, "90 days": 90}  # the first is the default
LIMIT_NAMES: Final = {"rpm": "Requests per minute", "tpm": "Tokens per minute", "concurrency": "Concurrent requests"}
SAMPLE: Final = 1000
LATEST: Final = 8
DISMISSED: Final = "console_started"  # cookie with the accounts whose first steps are hidden
DISMISSED_S: Final = 365 * 24 * 3600
MAX_DISMISSED: Final = 20


@dataclass(frozen=True, slots=True)
class Figures:
    """A range's total, and the relative change from the previous range's total; None if the previous total was 0."""

    total: int
    change: float | None


@dataclass(frozen=True, slots=True)
class Window:
    """The time range of the reliability figures. It ends now."""

    begins: float
    name: str
    is_day: bool


async def overview(visit: Visit) -> Response:
    run, now = visit.console.books.run, visit.console.now()
    account_id = visit.request.path_params["account_id"]
    chosen = visit.request.query_params.get("range", "")
    chosen = chosen if chosen in RANGES else next(iter(RANGES))
    account = await run(commands.GetAccount(account_id))
    rows, names = await _rows(visit, account_id, chosen)
    pace = await forecast_of(visit, account)
    burn = pace.a_day if pace else 0
    status = await _status(visit, account_id)
    latest, since = await _latest(visit, account_id)
    window = _window(latest, now, since)
    keys = {key.key_id: key.name for key in await run(commands.ListKeys(account_id))}
    balance, own = account.available(now), rows[len(rows) // 2 :]
    return visit.page(
        "overview.html",
        account=account,
        balance=balance,
        burn=burn,
        days_left=balance // burn if burn else None,
        pace=pace,
        chosen=chosen,
        ranges=RANGES,
        spend=_figures([row.charged for row in rows]),
        requests=_figures([row.requests for row in rows]),
        tokens=_figures([row.prompt_tokens + row.completion_tokens for row in rows]),
        input_tokens=sum(row.prompt_tokens for row in own),
        output_tokens=sum(row.completion_tokens for row in own),
        labels=names,
        spend_values=[row.charged / NANO_PER_UNIT for row in own],
        held=None if status is None else status.held,
        limits=_limits(account.limits, status, latest, now, since),
        pressed=() if status is None else status.pressed,
        latest=latest[:LATEST],
        sample=len(latest),
        window=window,
        quality=_quality(latest, window),
        rejected=await _rejected(visit, account_id, window) if latest else None,
        key_names=keys,
        steps=await _steps(visit, account_id, bool(keys), bool(latest)),
    )


async def dismiss(visit: Visit) -> Response:
    """Hides an account's first steps in this browser."""
    account_id = visit.request.path_params["account_id"]
    hidden = [one for one in _dismissed(visit) if one != account_id]
    response = visit.go(f"/accounts/{account_id}")
    visit.set_cookie(response, DISMISSED, quote(" ".join([*hidden, account_id][-MAX_DISMISSED:])), DISMISSED_S)
    return response


def _dismissed(visit: Visit) -> list[str]:
    return unquote(visit.cookie(DISMISSED)).split()


async def _rows(visit: Visit, account_id: str, chosen: str) -> tuple[list[UsageRow], list[str]]:
    """Returns the usage by hour or day of the previous and the chosen range, and the chosen range's hours or days."""
    run, now = visit.console.books.run, visit.console.now()
    if chosen == HOURS:
        first = now // HOUR_S * HOUR_S - 47 * HOUR_S
        names = [datetime.fromtimestamp(first + number * HOUR_S, UTC).isoformat()[:13] for number in range(48)]
        by_hour = await run(commands.SumRequests(account_id, first, now + HOUR_S))
        found: list[UsageRow] = [*by_hour]
    else:
        names = [period_at("day", now - back * DAY_S).name for back in range(2 * RANGES[chosen] - 1, -1, -1)]
        found = await run(commands.SumUsage(account_id, day_from=names[0], group_by=("day",)))
    sums = dict.fromkeys(names, UsageRow(0, 0, 0, 0, 0))
    for row in found:
        if row.day in sums:
            one = sums[row.day]
            sums[row.day] = UsageRow(
                one.requests + row.requests,
                one.prompt_tokens + row.prompt_tokens,
                one.cached_tokens + row.cached_tokens,
                one.completion_tokens + row.completion_tokens,
                one.charged + row.charged,
            )
    return [sums[name] for name in names], names[len(names) // 2 :]


def _figures(values: Sequence[int]) -> Figures:
    half = len(values) // 2
    before, total = sum(values[:half]), sum(values[half:])
    return Figures(total, (total - before) / before if before else None)


async def _latest(visit: Visit, account_id: str) -> tuple[list[UsageRecord], float]:
    """Returns up to SAMPLE of the latest requests, newest first, and the Unix time since which they are complete."""
    page = await visit.console.books.run(commands.SearchRequests(account_id, limit=SAMPLE))
    return list(page.rows), page.rows[-1].finished_at if page.next is not None and page.rows else 0.0


def _window(latest: Sequence[UsageRecord], now: float, since: float) -> Window:
    """Returns the longest window until now, at most a day, of which `latest` has all requests.

    Its length is in whole hours. If this would leave out more than half of `latest`, it is in whole minutes, or else in
    seconds.
    """
    begins = preset("24h", now).begins  # the same 24 hours as in the list of requests and in the chart
    if since < begins:
        return Window(begins, "last 24 hours", is_day=True)
    for seconds, unit in ((HOUR_S, "hour"), (MINUTE_S, "minute"), (1.0, "second")):
        number = max(1, math.ceil((now - since) / seconds) - 1)
        window = Window(now - number * seconds, f"last {f'{number} {unit}s' if number > 1 else unit}", is_day=False)
        if window.begins > since and 2 * sum(row.finished_at >= window.begins for row in latest) >= len(latest):
            break
    return window


def _quality(latest: Sequence[UsageRecord], window: Window) -> dict[str, float]:
    """Returns how many requests ended in a window, how many failed, and the others' median and p95 in seconds."""
    rows = [row for row in latest if row.finished_at >= window.begins]
    seconds = sorted(row.finished_at - row.started_at for row in rows if row.outcome is not Outcome.FAILED)
    found: dict[str, float] = {"of": len(rows), "failed": len(rows) - len(seconds)}
    if seconds:
        found |= {"median": seconds[len(seconds) // 2], "p95": seconds[min(len(seconds) - 1, len(seconds) * 95 // 100)]}
    return found


async def _rejected(visit: Visit, account_id: str, window: Window) -> str | None:
    """Returns the number of rejected requests in a window, from a bounded search of the gateways' logs.

    None if no gateway answers in time, if the search covered only a part of the window and found none there, or if the
    visitor has caused too many searches.
    """
    now, kept, name = visit.console.now(), visit.console.rejected, f"{account_id} {window.name}"
    if kept.get(name, ("", 0.0))[1] > now:
        return kept[name][0]
    if visit.console.rates.count((f"rejected {visit.me.user_id}", error_pages.SEARCHES_PER_MINUTE)):
        return None
    begins = now - DAY_S if window.is_day else window.begins  # a day begins as on the page that lists these requests
    try:
        async with asyncio.timeout(STATUS_S):
            found = await error_pages.search(visit, account_id, begins, now)
    except TimeoutError:
        return None
    if found is None:
        return None
    errors, is_complete = found
    number = sum(one["is_refused"] for one in errors)
    if not is_complete and not number:
        return None
    if len(kept) >= MAX_KEPT:
        kept.clear()
    kept[name] = f"{number:,}" if is_complete else f"at least {number:,}", now + REJECTED_S
    return kept[name][0]


def _limits(
    own: Mapping[str, int], status: AccountStatus | None, latest: Sequence[UsageRecord], now: float, since: float
) -> list[tuple[str, int | None, int | None, str]]:
    """Returns each limit's name, its value, its use, and the time of that use.

    The use per minute is the peak of the last hour if all requests of that hour are known, else the use in the last
    minute. The hour begins with a whole minute of the clock: part of a minute would lower its count, and so the peak.
    A value or use that only the limiter knows is None if the limiter does not answer.
    """
    hour_begins = (now - HOUR_S) // MINUTE_S * MINUTE_S
    is_hour = since < hour_begins
    begins = hour_begins if is_hour else now - MINUTE_S
    minutes: dict[int, list[UsageRecord]] = defaultdict(list)
    for row in latest:
        if row.finished_at >= begins:
            minutes[int(row.finished_at // MINUTE_S) if is_hour else 0].append(row)
    tokens = (sum(row.prompt_tokens + row.completion_tokens for row in rows) for rows in minutes.values())
    per_minute = "peak in the last hour" if is_hour else "in the last minute"
    used: dict[str, tuple[int | None, str]] = {
        "rpm": (max(map(len, minutes.values()), default=0), per_minute),
        "tpm": (max(tokens, default=0), per_minute),
        "concurrency": (None if status is None else status.open_requests, "now"),
    }
    return [
        (label, own.get(name, None if status is None else getattr(status.contract, name)), *used[name])
        for name, label in LIMIT_NAMES.items()
    ]


async def _status(visit: Visit, account_id: str) -> AccountStatus | None:
    """Returns the account's state; None if the limiter does not answer, so the page shows the rest."""
    try:
        async with asyncio.timeout(STATUS_S):
            return await visit.console.status_of(account_id)
    except (Unavailable, TimeoutError):
        return None


async def _steps(visit: Visit, account_id: str, has_keys: bool, has_called: bool) -> list[tuple[str, str, str, bool]]:
    """Returns an owner's first steps: name, explanation, path and whether it is done. Empty: nothing to show."""
    if visit.me.roles.get(account_id) != "owner" or account_id in _dismissed(visit):
        return []
    run, here = visit.console.books.run, f"/accounts/{account_id}"
    members, invited = await run(ListPeople(account_id))
    alerts = await run(ListAlerts(account_id))
    steps = [
        ("Create an API key", "Programs send it with each request.", f"{here}/keys", has_keys),
        ("Send a first request", "Copy a snippet for curl, Python or Node.", f"{here}/docs", has_called),
        ("Invite a colleague", "Share the account by role.", f"{here}/members", len(members) > 1 or invited != []),
        ("Set an alert", "Know before the balance runs out.", f"{here}/alerts", alerts != []),
    ]
    return [] if all(done for *_, done in steps) else steps
