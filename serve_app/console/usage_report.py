"""Sums an account's usage for the usage page: by time and group, for its chart, its tables and its file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from serve_app.console.date_range import DateRange
from serve_app.console.key_names import KeyNames
from serve_app.contracts import commands, people
from serve_app.contracts.books import RequestSums, UsageRow
from serve_app.contracts.money import NANO_PER_UNIT, format_amount
from serve_app.contracts.ports import BooksPort
from serve_app.storage.exports import Row

MAX_SERIES: Final = 7  # with separate colours; the remaining series are combined
OTHERS: Final = "Others"
GROUPS: Final = {
    "model": "Model",
    "key": "API key",
    "tag": "Tag",
    "member": "Member",
    "status": "Status",
}
MEASURES: Final = {
    "cost": "Cost",
    "tokens": "Tokens",
    "input": "Input tokens",
    "cached": "Cached input tokens",
    "output": "Output tokens",
    "requests": "Requests",
    "latency": "Mean duration",
    "errors": "Failed requests",
}
STATUS_LABELS: Final = {"completed": "Completed", "cancelled": "Cancelled by the client", "failed": "Failed"}
_UNKNOWN: Final = "Unknown"
_OTHER_MAKERS: Final = "Former members"
#: Groups and measures that the ledger's daily sums do not have. For these, individual requests are read.
_OF_REQUESTS: Final = frozenset({"status", "latency", "errors"})


@dataclass(slots=True)
class Sums:
    """Usage of one group in one hour or day, or over the range."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    charged: int = 0
    failed: int = 0
    seconds: float = 0.0

    def add(self, row: UsageRow | Sums) -> None:
        self.requests += row.requests
        self.prompt_tokens += row.prompt_tokens
        self.cached_tokens += row.cached_tokens
        self.completion_tokens += row.completion_tokens
        self.charged += row.charged
        if isinstance(row, RequestSums | Sums):
            self.failed += row.failed
            self.seconds += row.seconds

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def mean_s(self) -> float:
        return self.seconds / self.requests if self.requests else 0.0


_VALUES: Final[Mapping[str, Callable[[Sums], float | None]]] = {
    "cost": lambda sums: sums.charged / NANO_PER_UNIT,
    "tokens": lambda sums: sums.tokens,
    "input": lambda sums: sums.prompt_tokens,
    "cached": lambda sums: sums.cached_tokens,
    "output": lambda sums: sums.completion_tokens,
    "requests": lambda sums: sums.requests,
    "latency": lambda sums: round(sums.mean_s, 3) if sums.requests else None,
    "errors": lambda sums: sums.failed,
}


@dataclass(frozen=True, slots=True)
class Report:
    """Usage in a range, by moment and group.

    `moments` counts each request once, even if it is in several groups. `is_detailed`: failed requests and durations
    are known.
    """

    when: DateRange
    group: str
    measure: str
    cells: Mapping[tuple[str, str], Sums]  # by moment and group
    moments: Mapping[str, Sums]
    labels: Mapping[str, str]
    is_detailed: bool
    groups: Mapping[str, Sums] = field(init=False)  # over the range; the group with the largest `measure` first
    total: Sums = field(init=False)

    def __post_init__(self) -> None:
        groups: dict[str, Sums] = {}
        for (_, name), sums in self.cells.items():
            groups.setdefault(name, Sums()).add(sums)
        value, total = _VALUES[self.measure], Sums()
        ordered = sorted(groups, key=lambda name: (-(value(groups[name]) or 0), self.label(name)))
        for sums in self.moments.values():
            total.add(sums)
        object.__setattr__(self, "groups", {name: groups[name] for name in ordered})
        object.__setattr__(self, "total", total)

    def label(self, name: str) -> str:
        return self.labels.get(name, name)

    @property
    def series(self) -> list[tuple[str, list[float | None]]]:
        """The series of the largest groups, and one series of all others: values by moment."""
        named = list(self.groups)
        if len(named) > MAX_SERIES + 1:
            named = named[:MAX_SERIES]
        series = {name: [Sums() for _ in self.when.moments] for name in named}
        others = [Sums() for _ in self.when.moments]
        places = {moment: number for number, moment in enumerate(self.when.moments)}
        for (moment, name), sums in self.cells.items():
            series.get(name, others)[places[moment]].add(sums)
        value = _VALUES[self.measure]
        found = [(self.label(name), [value(sums) for sums in values]) for name, values in series.items()]
        if len(self.groups) > len(named):
            found.append((OTHERS, [value(sums) for sums in others]))
        return found

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the file."""
        known = ("requests", *(("failed", "mean_seconds") if self.is_detailed else ()))
        return (self.when.unit, self.group, *known, "prompt_tokens", "cached_tokens", "completion_tokens", "charged")

    @property
    def rows(self) -> Sequence[Row]:
        """The rows of the file: one per moment and group, as in the chart."""
        return [
            {
                self.when.unit: f"{moment}:00" if self.when.unit == "hour" else moment,
                self.group: self.label(name),
                "requests": sums.requests,
                "failed": sums.failed,
                "mean_seconds": f"{sums.mean_s:.3f}",
                "prompt_tokens": sums.prompt_tokens,
                "cached_tokens": sums.cached_tokens,
                "completion_tokens": sums.completion_tokens,
                "charged": format_amount(sums.charged),
            }
            for (moment, name), sums in sorted(self.cells.items(), key=lambda one: (one[0][0], self.label(one[0][1])))
        ]


async def report(books: BooksPort, account_id: str, when: DateRange, group: str, measure: str) -> Report:
    """Sums the usage. Raises InvalidValue if the range has too many requests."""
    keys = KeyNames.among(await books.run(commands.ListKeys(account_id)))
    is_detailed = when.unit == "hour" or not _OF_REQUESTS.isdisjoint((group, measure))
    rows: list[UsageRow]
    each: list[UsageRow]  # counts each request once; in `rows`, a key with several tags is in several rows
    if is_detailed:
        by: Any = {"member": "key", "status": "outcome"}.get(group, group)
        of_requests = commands.SumRequests(account_id, when.begins, when.ends, by, when.unit)
        single = await books.run(of_requests)
        rows = each = [*single]
        if group == "tag":
            counted = await books.run(replace(of_requests, by="model"))
            each = [*counted]
    else:
        stored: Literal["model", "key", "tag"] = "tag" if group == "tag" else "model" if group == "model" else "key"
        first, last = when.first_day, when.last_day
        by_day = commands.SumUsage(account_id, day_from=first, day_to=last, group_by=("day", stored))
        rows = each = await books.run(by_day)
        if group == "tag":
            each = await books.run(replace(by_day, group_by=("day",)))
    name_of, labels = await _naming(books, account_id, group, keys)
    cells: dict[tuple[str, str], Sums] = {}
    for row in rows:
        cells.setdefault((row.day or "", name_of(row)), Sums()).add(row)
    moments: dict[str, Sums] = {}
    for row in each:
        moments.setdefault(row.day or "", Sums()).add(row)
    return Report(when, group, measure, cells, moments, labels, is_detailed)


async def _naming(
    books: BooksPort, account_id: str, group: str, keys: KeyNames
) -> tuple[Callable[[UsageRow], str], Mapping[str, str]]:
    """Returns a function that names the group of a row, and the labels of the groups."""
    match group:
        case "key":
            return lambda row: keys.of.get(row.key_id or "", row.key_id or ""), keys.labels
        case "tag":
            return lambda row: row.tag or "", {"": "No tag"}
        case "status":
            return lambda row: getattr(row, "outcome", None) or "", STATUS_LABELS
        case "member":
            makers = await books.run(commands.KeyMakers(account_id))
            members, _ = await books.run(people.ListPeople(account_id))
            emails = {person.email for person in members}
            # An operator may have created a key. The account does not see who that is.
            known = {key_id: maker if maker in emails else _OTHER_MAKERS for key_id, maker in makers.items()}
            return lambda row: known.get(row.key_id or "", _UNKNOWN), {}
    return lambda row: row.model or "", {}
