"""Tests that periodic queries, and queries for one account, use an index and never read a whole table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from serve_app.accounting import billing_details, statements
from serve_app.accounting.database import Database
from serve_app.accounting.registry import READS, WRITES
from serve_app.contracts.commands import (
    Command,
    ExpireGrants,
    FindRequest,
    KeyMakers,
    ListAudit,
    ListUsage,
    PruneReplies,
    SearchRequests,
    SumRequests,
    SumUsage,
)
from serve_app.contracts.notices import ListNotices
from serve_app.contracts.operators import ListNotes, ListUncharged, SearchAccounts, SumAccountDays, SumService
from serve_app.contracts.recharges import ListDueAttempts, WatchRecharges


class Explained:
    """A ledger that explains how it reads for each statement."""

    def __init__(self, url: str) -> None:
        self.database = Database(url)
        self.plans: list[str] = []
        sa.event.listen(self.database.engine, "before_cursor_execute", self._explain)

    def _explain(self, _connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if statement.startswith(("SELECT", "DELETE")):
            plan = cursor.execute(f"EXPLAIN QUERY PLAN {statement}", parameters).fetchall()
            self.plans.extend(row[3] for row in plan)


@pytest.fixture(scope="module")
def explained(sqlite_template: Any) -> Iterator[Explained]:
    made = Explained(f"sqlite:///{sqlite_template}")
    yield made
    made.database.close()


@pytest.mark.parametrize(
    ("command", "table"),
    [
        (ExpireGrants(), "grants"),
        (PruneReplies(), "replies"),
        (SumUsage(day_from="2026-11-01", group_by=("day", "model")), "usage_daily"),
        (SumUsage("acct_a", group_by=("day",)), "usage_daily"),
        (SumUsage("acct_a", group_by=("day", "tag"), tag="ci"), "usage_daily"),
        (SumUsage("acct_a", group_by=("tag",)), "api_keys"),
        (ListUsage("acct_a", time_from=1.0), "usage"),
        (FindRequest("chatcmpl-1"), "usage"),
        (SumRequests("acct_a", 1.0, 2.0), "usage"),
        (SumRequests("acct_a", 1.0, 2.0, "tag", "day"), "usage"),
        (SearchRequests("acct_a", 1.0, key_ids=("key_a",)), "usage"),
        (KeyMakers("acct_a"), "audit_log"),
        (ListNotices(), "notices"),
        (ListNotices("acct_a"), "notices"),
        (WatchRecharges("stripe"), "recharges"),
        (WatchRecharges("stripe"), "recharge_attempts"),
        (ListDueAttempts("stripe"), "recharge_attempts"),
        (SumService("2026-11-01", "2026-11-30"), "usage_daily"),
        (SumAccountDays(("acct_a", "acct_b"), "2026-11-01", "2026-11-30"), "usage_daily"),
        (SearchAccounts("", 20, spending=True, day_from="2026-11-01"), "usage_daily"),
        (ListUncharged(), "usage"),
        (ListNotes("acct_a"), "account_notes"),
        (ListAudit("acct_a"), "audit_log"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Command) else value,
)
def test_it_reads_through_an_index(explained: Explained, command: Command[Any], table: str) -> None:
    explained.plans.clear()
    with explained.database.transaction() as transaction:
        if (reading := READS.get(type(command))) is not None:
            reading.run(transaction.connection, command, 1e9)
        else:
            WRITES[type(command)](transaction, command, 1e9)
    steps = [plan for plan in explained.plans if f" {table}" in plan]
    assert steps
    assert all("SEARCH" in step and "INDEX" in step for step in steps), explained.plans


def test_an_accounts_payments_and_movements_are_found_without_reading_its_charges(explained: Explained) -> None:
    with explained.database.transaction() as transaction:
        for read in (
            lambda connection: connection.execute(billing_details._payments("acct_a")),
            lambda connection: statements._movements_since(connection, "acct_a", 1.0),
        ):
            explained.plans.clear()
            read(transaction.connection)
            steps = [plan for plan in explained.plans if " journal_entries" in plan]
            assert steps
            assert all("ix_journal_entries_movements" in step for step in steps), steps
