"""An account's requests: search, file, and one request with its timeline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final
from urllib.parse import quote, urlencode

from fastapi.responses import Response, StreamingResponse

from serve_app.api.doors import DOORS, door_of
from serve_app.console.date_range import CUSTOM, PRESETS, DateRange
from serve_app.console.key_names import KeyNames
from serve_app.console.usage_pages import chosen_range_of, range_of
from serve_app.console.usage_report import STATUS_LABELS
from serve_app.console.web import Refused, Visit
from serve_app.contracts import commands
from serve_app.contracts.books import Outcome, UsageRecord
from serve_app.storage.exports import REQUEST_COLUMNS, Csv, Row, request_row
from serve_app.storage.request_log import Line

PAGE: Final = 50
FILE_PAGE: Final = 1000
FILTERS: Final = ("model", "key", "status", "tag")
NO_TAG: Final = "-"  # a filter's value for keys without a tag
SEARCH_S: Final = 2.0  # maximum duration of a search for a request's line in the log
SEARCHES_PER_MINUTE: Final = 6  # per person
SEARCH_BYTES: Final = 256 * 1024 * 1024
#: Phases of a request in order, with their names on the page.
PHASES: Final = {
    "admit": ("Admission", "Check of the key, its limits and the balance"),
    "queue": ("Queue", "Waiting for a free place at the model"),
    "prefill": ("Prompt", "Reading the prompt, up to the first token"),
    "decode": ("Generation", "Generating the tokens after the first"),
    "settle": ("Settlement", "Recording tokens and cost, after the last token"),
}
AFTER: Final = "settle"  # the phase after the last token; not part of the duration
REST: Final = ("Other", "Between these phases, such as sending the reply")
TENTH: Final = 10  # durations are shown in tenths of a millisecond
#: Fields of a log line that the page shows besides the phases.
_SHOWN: Final = ("finish_reason", "status", "code", "stream", "reruns", "client_request_id")
# One search at a time: the files are large.
_SEARCHING: Final = ThreadPoolExecutor(max_workers=1, thread_name_prefix="search")


async def requests(visit: Visit) -> Response:
    account_id, query = visit.request.path_params["account_id"], visit.request.query_params
    run = visit.console.books.run
    if (asked := query.get("id", "").strip()) and (found := await _find(visit, asked)) is not None:
        return visit.go(f"/accounts/{account_id}/requests/{quote(found.request_id)}")
    when, error = range_of(visit, "7d")
    names = KeyNames.among(await run(commands.ListKeys(account_id)))
    page = await run(_search(visit, names, when.begins, when.ends, PAGE))
    used = await run(commands.SumUsage(account_id, group_by=("model",)))
    chosen = {name: query.get(name, "") for name in FILTERS}
    kept = when.query | {name: value for name, value in chosen.items() if value}
    doors = {row.request_id: door.path for row in page.rows if (door := door_of(row.request_id)) is not None}
    earlier = int(query["earlier"]) if query.get("earlier", "").isdecimal() and len(query["earlier"]) < 10 else 0
    base = f"/accounts/{account_id}/requests"
    return visit.page(
        "requests.html",
        range_error=error,
        asked=asked,  # an id that was not found
        account=await run(commands.GetAccount(account_id)),
        rows=page.rows,
        names=names,
        doors=doors,
        has_doors=not {DOORS[0].path}.issuperset(doors.values()),
        earlier=earlier,
        number=await _number(visit, when, chosen),
        statuses=STATUS_LABELS,
        when=when,
        chosen=chosen_range_of(visit, when) | chosen,
        is_filtered=any(chosen.values()),
        is_first="after" not in query,
        next_href=page.next
        and f"{base}?{urlencode(kept | {'after': page.next, 'earlier': str(earlier + len(page.rows))})}",
        first_href=f"{base}?{urlencode(kept)}",
        file=f"{base}.csv?{urlencode(kept)}",
        presets=[*PRESETS.items(), (CUSTOM, "Custom")],
        choices={
            "model": [("", "All models"), *((str(row.model), str(row.model)) for row in used)],
            "key": [("", "All keys"), *sorted(names.labels.items(), key=lambda one: one[1].lower())],
            "status": [("", "All statuses"), *STATUS_LABELS.items()],
            "tag": [("", "All tags"), *((tag, tag) for tag in names.tags), (NO_TAG, "No tag")],
        },
    )


async def csv(visit: Visit) -> Response:
    """Returns all requests of a search as a CSV file, newest first."""
    when, error = range_of(visit, "7d")
    if error:
        raise Refused(422, error)
    names = KeyNames.among(await visit.console.books.run(commands.ListKeys(visit.request.path_params["account_id"])))
    pages = _pages(visit, replace(_search(visit, names, when.begins, when.ends, FILE_PAGE), after=None))
    first = await anext(pages)  # read before the response begins: a failure then still sets the HTTP status

    async def file() -> AsyncIterator[str]:
        made = Csv(REQUEST_COLUMNS)
        yield made.head() + made.rows(first)
        async for page in pages:
            yield made.rows(page)

    name = f"requests-{when.first_day}-{when.last_day}.csv"
    return StreamingResponse(
        file(), media_type=Csv.media_type, headers={"content-disposition": f'attachment; filename="{name}"'}
    )


async def request(visit: Visit) -> Response:
    """Shows one request: what it was, how long each phase took, and what it cost line by line."""
    account_id, run = visit.request.path_params["account_id"], visit.console.books.run
    record = await _find(visit, visit.request.path_params["request_id"])
    if record is None:
        raise Refused(404, "This account has no such request. Rejected requests (4xx) are listed under “Errors”.")
    names = KeyNames.among(await run(commands.ListKeys(account_id)))
    door = door_of(record.request_id)
    line = await _line(visit, record)
    trace_id = str((line or {}).get("trace_id") or "") or _own_trace_id(record.request_id)
    is_linked = bool(visit.console.trace_url and trace_id and visit.me.operator_role)
    return visit.page(
        "request.html",
        here=f"/accounts/{account_id}/requests",
        account=await run(commands.GetAccount(account_id)),
        record=record,
        key_name=names.labels.get(names.of.get(record.key_id, ""), record.key_id),
        door=None if door is None else door.path,
        status_label=STATUS_LABELS[record.outcome.value],
        lines=price_lines(record),
        timeline=None if line is None else timeline(line, record.finished_at - record.started_at),
        output_speed=None if line is None else output_speed(line, record.completion_tokens),
        log=dict.fromkeys(_SHOWN) | (line or {}),
        trace_id=trace_id,
        trace_href=visit.console.trace_url.replace("{trace_id}", trace_id) if is_linked else None,
    )


@dataclass(frozen=True, slots=True)
class PriceLine:
    """A part of a request's cost."""

    label: str
    tokens: int
    per_token: int  # nano-units
    amount: int  # nano-units


def price_lines(record: UsageRecord) -> list[PriceLine]:
    """Returns the parts of the cost. A failed request is not charged, but its parts are listed."""
    price, uncached = record.price, record.prompt_tokens - record.cached_tokens
    parts = [
        ("Input tokens, not cached" if record.cached_tokens else "Input tokens", uncached, price.input),
        ("Cached input tokens", record.cached_tokens, price.cached_input),
        ("Output tokens", record.completion_tokens, price.output),
    ]
    return [PriceLine(label, tokens, each, tokens * each) for label, tokens, each in parts]


@dataclass(frozen=True, slots=True)
class PhaseBar:
    """A phase of a request, with the place of its bar in a picture that is 100 wide."""

    name: str
    what: str
    ms: float
    begins: float
    width: float
    is_rest: bool = False


@dataclass(frozen=True, slots=True)
class Timeline:
    """A request's phases up to its reply's end. Their durations, as they are shown, add up to `total_ms`."""

    bars: list[PhaseBar]
    total_ms: float
    ends: float  # the reply's end, in a picture that is 100 wide
    after: PhaseBar | None  # the settlement
    first_token_ms: float | None  # since the start
    first_token: float | None  # its place in the picture


def timeline(line: Line, seconds: float) -> Timeline | None:
    """Returns the phases that a log line has, one after the other, and the rest of the duration.

    If the client hung up, the reply ended then: a phase that the gateway measured beyond this end is cut off there.
    """
    known = {name: float(line[f"{name}_ms"]) for name in PHASES if isinstance(line.get(f"{name}_ms"), int | float)}
    if not known:
        return None
    after, left = known.pop(AFTER, None), round(seconds * 1000 * TENTH)
    total, tenths = left, dict[str, int]()
    for name, ms in known.items():
        tenths[name] = min(round(ms * TENTH), left)
        left -= tenths[name]
    if left > 0:
        tenths["rest"] = left
    bars: list[PhaseBar] = []
    first: int | None = None
    whole, at = (total + (after or 0.0) * TENTH) or 1.0, 0
    for name, length in tenths.items():
        bars.append(_bar(name, length / TENTH, at / whole, length / whole))
        at += length
        if name == "prefill" and "decode" in tenths and not line.get("reruns"):
            first = at
    return Timeline(
        bars,
        total / TENTH,
        100 * total / whole,
        None if after is None else _bar(AFTER, after, total / whole, after * TENTH / whole),
        None if first is None else first / TENTH,
        None if first is None else 100 * first / whole,
    )


def output_speed(line: Line, tokens: int) -> float | None:
    """Returns the tokens per second after the first token, as the playground shows it."""
    ms = line.get("decode_ms")
    if line.get("reruns") or tokens < 2 or not isinstance(ms, int | float) or ms <= 0:
        return None
    return (tokens - 1) * 1000 / ms


def _bar(name: str, ms: float, begins: float, width: float) -> PhaseBar:
    label, what = PHASES.get(name, REST)
    return PhaseBar(label, what, ms, 100 * begins, max(100 * width, 0.3), name not in PHASES)


def _search(visit: Visit, names: KeyNames, begins: float, ends: float, limit: int) -> commands.SearchRequests:
    query = visit.request.query_params
    tag, status = query.get("tag", ""), query.get("status", "")
    return commands.SearchRequests(
        visit.request.path_params["account_id"],
        time_from=begins,
        time_to=ends,
        model=query.get("model") or None,
        key_ids=names.ids(query.get("key", ""), ("" if tag == NO_TAG else tag) if tag else None),
        outcome=Outcome(status) if status in STATUS_LABELS else None,
        after=query.get("after"),
        limit=limit,
    )


async def _number(visit: Visit, when: DateRange, chosen: Mapping[str, str]) -> int | None:
    """Returns the number of requests from the daily sums; None for a range in hours, or a filter besides the model."""
    if when.unit != "day" or any(value for name, value in chosen.items() if name != "model"):
        return None
    account_id = visit.request.path_params["account_id"]
    query = commands.SumUsage(account_id, day_from=when.first_day, day_to=when.last_day, group_by=("model",))
    rows = await visit.console.books.run(query)
    return sum(row.requests for row in rows if chosen["model"] in ("", row.model))


async def _pages(visit: Visit, wanted: commands.SearchRequests) -> AsyncIterator[list[Row]]:
    while True:
        page = await visit.console.books.run(wanted)
        yield [request_row(row) for row in page.rows]
        if page.next is None:
            return
        wanted = replace(wanted, after=page.next)


async def _find(visit: Visit, asked: str) -> UsageRecord | None:
    """Returns the account's request with this id, or with this trace id."""
    ids = [asked, *(door.id_prefix + asked for door in DOORS if "-" not in asked and "_" not in asked)]
    for one in ids:
        found = await visit.console.books.run(commands.FindRequest(one))
        if found is not None and found.account_id == visit.request.path_params["account_id"]:
            return found
    return None


async def _line(visit: Visit, record: UsageRecord) -> Line | None:
    """Returns the request's line in the log of this machine.

    None if it is not found, if the search takes too long, or if the person has searched too often.
    """
    if visit.console.rates.count((f"search {visit.me.user_id}", SEARCHES_PER_MINUTE)):
        return None
    search = partial(
        visit.console.find_lines,
        record.request_id,
        ended_at=record.finished_at,
        most_s=SEARCH_S,
        most_bytes=SEARCH_BYTES,
    )
    try:
        async with asyncio.timeout(SEARCH_S + 1):
            found = await asyncio.get_running_loop().run_in_executor(_SEARCHING, search)
    except TimeoutError:
        return None
    own: list[dict[str, Any]] = [
        line
        for line in found.lines
        if line.get("request_id") == record.request_id and line.get("account") == record.account_id
    ]
    ended = [line for line in own if line.get("event") == "request"] or own
    return ended[-1] if ended else None


def _own_trace_id(request_id: str) -> str:
    """Returns the trace id of a request whose client sent none: the digits of its id."""
    door = door_of(request_id)
    digits = "" if door is None else request_id.removeprefix(door.id_prefix)
    return digits if len(digits) == 32 and all(one in "0123456789abcdef" for one in digits) else ""
