"""Closed months go to files and their rows leave the ledger; money, idempotency and the proof of the books stay."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from serve_app.accounting import dialects
from serve_app.accounting.archive import archive_months, verify_archive
from serve_app.contracts.books import Outcome, Settled, Settlement, SettlementRejected, StoredReply
from serve_app.contracts.commands import CheckBooks
from serve_app.contracts.errors import Conflict, InvalidValue

from .books import COST, Books, Clock, patient_database

DAY = 86400.0


def at(year: int, month: int, day: int) -> float:
    return datetime(year, month, day, tzinfo=UTC).timestamp()


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialects, "_ROWS_AT_ONCE", {"sqlite": 7, "postgresql": 7})


@pytest.fixture
def year(timed: Books, clock: Clock) -> Books:
    """Twenty requests in each of April to June, settled four at a time, one of them free; today is the 10th of June."""
    clock.now = at(2026, 3, 1)
    timed.ledger.credit(timed.account_id, 10**6, idempotency_key="payment-1")
    timed.ledger.credit(timed.account_id, 1000, "grant", expires_at=at(2026, 4, 20))
    timed.ledger.update_key(timed.key_id, budget=10**9, budget_period="month")
    for month in (4, 5, 6):
        for first in range(0, 20, 4):
            clock.now = at(2026, month, 1) + first * DAY * (1 if month < 6 else 0.4)
            four = range(first, first + 4)
            timed.ledger.settle([made(timed, f"{month}-{n}", clock.now, n % 4 == 0) for n in four])
        timed.ledger.expire_grants()
    clock.now = at(2026, 6, 10)
    return timed


def made(books: Books, name: str, now: float, free: bool = False) -> Settlement:
    outcome = Outcome.FAILED if free else Outcome.COMPLETED
    reply = StoredReply(name, "f", b"{}")
    return books.settlement(name, outcome=outcome, started_at=now - 1, finished_at=now, reply=reply)


def settle(books: Books, name: str, now: float) -> Any:
    return books.ledger.settle([made(books, name, now)])[0]


def run(url: str, before: str, folder: Path, now: float, progress: Callable[[str], None] = lambda _: None) -> Any:
    database = patient_database(url)
    try:
        return archive_months(database, before, folder, now, progress)
    finally:
        database.close()


def count(url: str, table: str) -> int:
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        found = connection.execute(sa.text(f"SELECT count(*) FROM {table}")).scalar_one()
    engine.dispose()
    return int(found)


def rows_of(folder: Path, table: str) -> list[dict[str, str]]:
    with gzip.open(folder / f"{table}.csv.gz", "rt", newline="") as file:
        return list(csv.DictReader(file))


def test_a_closed_month_leaves_and_the_books_stay_provable(year: Books, url: str, tmp_path: Path, clock: Clock) -> None:
    before = year.account, year.ledger.usage(group_by=("day", "model")), year.ledger.grants(year.account_id)
    assert year.ledger.check(full=False).ok
    said = run(url, "2026-05", tmp_path / "april", clock.now)
    assert (said["usage_rows"], said["entries"]) == (20, 17)  # with the top-up and the grant
    assert {row["request_id"] for row in rows_of(tmp_path / "april", "usage")} == {f"4-{n}" for n in range(20)}
    assert len(rows_of(tmp_path / "april", "journal_entries")) == 17
    assert len(rows_of(tmp_path / "april", "postings")) >= 34
    assert (count(url, "usage"), count(url, "journal_entries")) == (40, 33)
    assert (year.account, year.ledger.usage(group_by=("day", "model")), year.ledger.grants(year.account_id)) == before
    for full in (False, True, False):
        report = year.ledger.check(full=full)
        assert (report.differences, report.entries, report.usage_rows) == ((), 48, 60)

    # The same again changes nothing; the next month builds on this one.
    assert run(url, "2026-05", tmp_path / "april", clock.now) == said
    said = run(url, "2026-06", tmp_path / "may", clock.now)
    assert (said["usage_rows"], said["entries"]) == (20, 16)  # with the expiry
    assert (count(url, "usage"), count(url, "journal_entries")) == (20, 18)
    settle(year, "later", clock.now)
    for full in (True, False):
        report = year.ledger.check(full=full)
        assert (report.differences, report.entries, report.usage_rows) == ((), 49, 61)
    with pytest.raises(InvalidValue, match="before 2026-06 is archived"):
        run(url, "2026-05", tmp_path / "again", clock.now)


def test_what_was_settled_before_the_archive_is_never_billed_again(
    year: Books, url: str, tmp_path: Path, clock: Clock
) -> None:
    run(url, "2026-06", tmp_path / "archive", clock.now)
    balance = year.account.balance
    for name, then in (("4-1", at(2026, 4, 2)), ("5-19", at(2026, 5, 20)), ("unknown", at(2026, 5, 31))):
        answer = settle(year, name, then)
        assert isinstance(answer, SettlementRejected)
        assert "archived" in answer.message
    late = settle(year, "6-19", at(2026, 6, 1) + 16 * DAY * 0.4)
    assert isinstance(late, Settled)
    assert late.duplicate
    assert isinstance(settle(year, "from a spool", at(2026, 6, 3)), Settled)
    assert year.account.balance == balance - COST
    before = year.account
    assert year.ledger.credit(year.account_id, 10**6, idempotency_key="payment-1") == before


def test_an_archive_that_is_cut_off_anywhere_can_be_repeated(
    year: Books, url: str, tmp_path: Path, clock: Clock
) -> None:
    told: list[str] = []
    run_to = [0]

    class Cut(Exception):
        pass

    def progress(text: str) -> None:
        told.append(text)
        if len(told) == run_to[0]:
            raise Cut

    cuts = 0
    while True:
        told.clear()
        run_to[0] += 2
        try:
            said = run(url, "2026-06", tmp_path / "archive", clock.now, progress)
            break
        except Cut:
            cuts += 1
            assert year.ledger.check(full=cuts % 2 == 0).ok
            settle(year, f"meanwhile {cuts}", clock.now)
    assert cuts > 2
    assert said["usage_rows"] == 40
    assert len(rows_of(tmp_path / "archive", "usage")) == 40
    assert year.ledger.check().ok
    assert [path.name for path in tmp_path.iterdir() if "archive" in path.name] == ["archive"]


def test_a_check_that_needs_the_rows_is_told_to_begin_again(
    year: Books, url: str, tmp_path: Path, clock: Clock
) -> None:
    wanted = CheckBooks(full=True, seconds=0.0)
    cut = year.ledger.run(wanted)
    run(url, "2026-06", tmp_path / "archive", clock.now)
    with pytest.raises(Conflict, match="begin again"):
        year.ledger.run(CheckBooks(after=cut.next))
    assert year.ledger.check().ok


def test_an_archive_is_compared_with_the_ledger(year: Books, url: str, tmp_path: Path, clock: Clock) -> None:
    folder = tmp_path / "archive"
    run(url, "2026-06", folder, clock.now)
    database = patient_database(url)
    assert verify_archive(database, folder)["before"] == "2026-06"
    for name in ("usage.csv.gz", "postings.csv.gz", "manifest.json"):
        kept = (folder / name).read_bytes()
        (folder / name).write_bytes(kept[:-1] + (b" \n" if name.endswith("json") else b"x"))
        with pytest.raises((Conflict, InvalidValue), match=name.split(".")[0]):
            verify_archive(database, folder)
        (folder / name).write_bytes(kept)
    with pytest.raises(InvalidValue, match="is not an archive"):
        verify_archive(database, tmp_path)
    database.close()


def test_only_what_an_archive_holds_can_be_removed(year: Books, url: str, tmp_path: Path, clock: Clock) -> None:
    run(url, "2026-05", tmp_path / "archive", clock.now)
    engine = sa.create_engine(url)
    for statement in (
        "DELETE FROM usage WHERE request_id = '5-1'",
        "DELETE FROM usage WHERE request_id = '5-0'",
        "DELETE FROM postings WHERE entry_id = 40",
        "DELETE FROM journal_entries WHERE id = 1",
        "UPDATE usage SET number = 7 WHERE request_id = '5-0'",
        "UPDATE usage SET number = 7 WHERE request_id = '5-1'",
        "UPDATE journal_entries SET memo = 'x'",
    ):
        with pytest.raises(sa.exc.DBAPIError, match="append-only"), engine.begin() as connection:
            connection.execute(sa.text(statement))
    engine.dispose()


def test_what_can_not_be_archived(year: Books, url: str, tmp_path: Path, clock: Clock) -> None:
    for before in ("2026-07", "2026", "x", "2026-13"):
        with pytest.raises(InvalidValue):
            run(url, before, tmp_path / "archive", clock.now)
    with pytest.raises(InvalidValue, match="two days after the start of"):
        run(url, "2026-06", tmp_path / "archive", at(2026, 6, 2))
    with pytest.raises(InvalidValue, match="exists"):
        run(url, "2026-06", tmp_path, clock.now)
