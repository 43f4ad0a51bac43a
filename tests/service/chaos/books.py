"""Checks after a run: the ledger against the usages that the clients received."""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import create_engine, select

from serve_app.accounting.schema import usage as usage_table
from tests.service.chaos.load import Usage
from tests.service.chaos.stand import Customer, Stand, as_nano

MAX_LINES = 10  # differences of one kind in a report


@dataclass(frozen=True, slots=True)
class Row:
    """One settled request, as the database has it."""

    request_id: str
    account_id: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    charged: int  # nano-units
    uncollected: int
    outcome: str


@dataclass(frozen=True, slots=True)
class Account:
    """One account at the end."""

    id: str
    credited: int  # nano-units, all that was ever put in
    balance: int
    held: int
    open_requests: int
    sent: int  # requests that its clients made


@dataclass(frozen=True, slots=True)
class Books:
    """The ledger and the clients' side of it."""

    received: Sequence[Usage]
    rows: Sequence[Row]
    accounts: Sequence[Account]
    check: Sequence[str]  # what `ledger check` found
    #: A gateway's spool was lost with its machine, or came back late. Then a replica may have settled its replies, as
    #: for any gateway that dies: the same counts, as cancelled.
    late_spools: bool = False


#: Behind the id of a request whose replica was lost (gateway/reruns.py).
FURTHER_RUN = re.compile(r"(?<=[0-9a-z])-[23]$")


def problems(books: Books) -> list[str]:
    """The differences, one line each; empty when the books are exact."""
    found: list[str] = []
    rows: dict[str, Row] = {}
    for row in books.rows:
        if rows.setdefault(row.request_id, row) is not row:
            found.append(f"request {row.request_id} is in the ledger more than once")
    missing, different = [], []
    settled_as = {"completed", "cancelled"} if books.late_spools else {"completed"}
    for usage in books.received:
        there = _completed(rows, usage.request_id)
        if there is None:
            missing.append(f"a client received the usage of {usage.request_id}, the ledger does not have it")
        elif replace(as_usage(there), request_id=usage.request_id) != usage or there.outcome not in settled_as:
            different.append(f"a client received {usage}, the ledger has {there}")
    found += _some(missing) + _some(different)
    twice = [one for one, count in Counter(usage.request_id for usage in books.received).items() if count > 1]
    found += _some([f"request {one} was answered twice" for one in twice])
    charged, settled = Counter[str](), defaultdict[str, set[str]](set)
    for row in books.rows:
        charged[row.account_id] += row.charged
        settled[row.account_id].add(FURTHER_RUN.sub("", row.request_id))
    paid = Counter(FURTHER_RUN.sub("", row.request_id) for row in rows.values() if row.charged)
    found += _some([f"{count} runs of request {one} are charged" for one, count in paid.items() if count > 1])
    for account in books.accounts:
        if len(settled[account.id]) > account.sent:
            found.append(f"{account.id} has {len(settled[account.id])} settled requests and made {account.sent}")
        if account.balance != account.credited - charged[account.id]:
            found.append(
                f"{account.id} has {account.balance}: {account.credited} credited, {charged[account.id]} charged"
            )
        if account.balance < 0:
            found.append(f"{account.id} has a negative balance: {account.balance}")
        if account.held or account.open_requests:
            found.append(f"{account.id} still holds {account.held} for {account.open_requests} open requests")
    return found + _some(list(books.check))


def _completed(rows: Mapping[str, Row], request_id: str) -> Row | None:
    """The run of a request that made its reply: a stream that goes on keeps the id of its first run."""
    runs = [rows[one] for one in (request_id, f"{request_id}-2", f"{request_id}-3") if one in rows]
    return next((row for row in runs if row.outcome == "completed"), runs[0] if runs else None)


def as_usage(row: Row) -> Usage:
    """The row as a client sees it."""
    return Usage(row.request_id, row.account_id, row.prompt_tokens, row.cached_tokens, row.completion_tokens)


def read_rows(url: str, account_ids: Sequence[str]) -> list[Row]:
    """The usage rows of some accounts, from the database itself."""
    engine = create_engine(url)
    columns = [usage_table.c[name] for name in Row.__dataclass_fields__ if name != "request_id"]
    try:
        with engine.connect() as connection:
            query = select(usage_table.c.request_id, *columns).where(usage_table.c.account_id.in_(account_ids))
            return [Row(*row) for row in connection.execute(query)]
    finally:
        engine.dispose()


def close(
    stand: Stand,
    customers: Sequence[Customer],
    received: Sequence[Usage],
    sent: Counter[str],
    *,
    late_spools: bool = False,
) -> Books:
    """Reads everything, through the service and from the database."""
    accounts = []
    for customer in customers:
        view = customer.show()
        money = as_nano(view["balance"]), as_nano(view["held"])
        accounts.append(Account(customer.id, customer.credited, *money, view["open_requests"], sent[customer.id]))
    check: dict[str, Any] = stand.admin("GET", "/admin/ledger/check")
    rows = read_rows(stand.database_url, [customer.id for customer in customers])
    found = [f"ledger check: {one['message']}" for one in check["problems"]]
    return Books(received, rows, accounts, found, late_spools)


def close_when_settled(
    stand: Stand,
    customers: Sequence[Customer],
    received: Sequence[Usage],
    sent: Counter[str],
    patience_s: float,
    *,
    late_spools: bool = False,
) -> tuple[Books, list[str]]:
    """The books as soon as nothing is wrong with them, else as they are after `patience_s`; and what is wrong.

    Replaying spools, settling orphans and expiring leases take their time in the background.
    """
    deadline = time.monotonic() + patience_s
    while True:
        books = close(stand, customers, received, sent, late_spools=late_spools)
        wrong = problems(books)
        if not wrong or time.monotonic() > deadline:
            return books, wrong
        time.sleep(1)


def _some(lines: list[str]) -> list[str]:
    rest = len(lines) - MAX_LINES
    return lines[:MAX_LINES] + ([f"… and {rest} more of this kind"] if rest > 0 else [])
