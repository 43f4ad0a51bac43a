"""A backup is of one moment, and restores into a ledger that a service may start on; anything less is refused."""

from __future__ import annotations

import itertools
import json
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from serve_app.accounting import restore
from serve_app.accounting.accounting_service import AccountingService
from serve_app.accounting.database import Database, revisions
from serve_app.contracts.books import Audit, Settled, StoredReply
from serve_app.contracts.commands import HoldLease, PostHolds, ReleaseLease
from serve_app.contracts.errors import Conflict, LedgerError, SchemaMismatch
from serve_app.contracts.limiting import OpenHold
from serve_app.contracts.management import CreateManagementKey, ListManagementKeys

from .backups import back_up, change_manifest, restored
from .books import COST, Books, Ledger
from .test_migrations import schema

pytestmark = pytest.mark.usefixtures("postgres_programs")
NewUrl = Callable[..., str]
MOVED_ON = ("accounts", "api_keys", "ledger_head", "limiter_leases", "limiter_holds")


def rows(url: str, *without: str) -> dict[str, list[Any]]:
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        names = set(sa.inspect(connection).get_table_names()) - set(without)
        found = {name: connection.exec_driver_sql(f"SELECT * FROM {name}").all() for name in sorted(names)}
    engine.dispose()
    return {name: sorted(map(repr, table)) for name, table in found.items()}


def test_every_row_comes_back_and_the_books_go_on(books: Books, url: str, new_url: NewUrl, file: Path) -> None:
    ledger, account_id = books.ledger, books.account_id
    books.new_key(budget=10**9, budget_period="day")
    ledger.credit(account_id, 500, "grant", audit=Audit("me"))
    management = ledger.run(CreateManagementKey(account_id, "robot", "0" * 64, "mk-…"))
    reply = StoredReply("key", "fingerprint", b"\x00body")
    ledger.settle(
        [books.settlement("r1", reply=reply), books.settlement("r2"), books.settlement("r3", cached_tokens=9)]
    )
    manifest = back_up(url, file)
    done = restored(file, new := new_url())
    assert done == restore.Restored(manifest, ())
    assert (manifest.last_settled, manifest.charged) == ("r3", ledger.account_totals(account_id).charged)
    assert rows(new, "checkpoints", "checkpoint_balances", "checkpoint_daily", *MOVED_ON) == rows(
        url, "checkpoints", "checkpoint_balances", "checkpoint_daily", *MOVED_ON
    )
    assert schema(new) == schema(url)
    with Ledger(new) as again:
        assert again.run(ListManagementKeys(account_id)) == [management]
        assert again.get_account(account_id).balance == ledger.get_account(account_id).balance
        [repeated, fresh] = again.settle([books.settlement("r2"), books.settlement("r4")])
        assert isinstance(repeated, Settled)
        assert (repeated.duplicate, repeated.charged) == (True, COST)
        assert isinstance(fresh, Settled)
        assert not fresh.duplicate
        assert again.find_reply(account_id, "key") == reply
        assert again.check().ok
    with closing(Database(new)) as database, database.engine.connect() as connection:
        with pytest.raises(sa.exc.DBAPIError, match="append-only"):
            connection.exec_driver_sql("DELETE FROM usage")
        connection.rollback()


async def test_a_backup_among_settlements_has_all_before_it_and_no_half(
    books: Books, url: str, new_url: NewUrl, file: Path
) -> None:
    before: set[str] = set()
    have_begun, stop = threading.Barrier(3), threading.Event()

    def write(name: str) -> None:
        with Ledger(url) as ledger:
            for number in itertools.count():
                batch = [books.settlement(f"{name}-{number}-{n}") for n in range(5)]
                ledger.settle(batch)
                if not number:
                    before.update(one.request_id for one in batch)
                    have_begun.wait(60)
                if stop.is_set():
                    return

    with ThreadPoolExecutor(2) as threads:
        writers = [threads.submit(write, name) for name in ("first", "second")]
        try:
            have_begun.wait(60)
            manifest = back_up(url, file)
            while books.ledger.account_totals(books.account_id).requests == manifest.rows["usage"]:
                assert not any(writer.done() for writer in writers)
        finally:
            stop.set()
    for writer in writers:
        writer.result()
    lost = [row.request_id for row in books.ledger.export_usage(limit=1000).rows]
    done = restored(file, new := new_url())
    assert not done.differences
    with Ledger(new) as ledger:
        assert not ledger.find_unsettled(tuple(before))
        totals = ledger.account_totals(books.account_id)
        assert len(before) <= totals.requests == manifest.rows["usage"]
        assert totals.charged == COST * totals.requests
    service = AccountingService(Ledger(new))
    service.start()
    try:
        # As spools do that had not emptied: some of these are in the backup, some are not.
        answers = await service.settle([books.settlement(one) for one in {*before, *lost[-500:], "new"}])
        assert all(isinstance(one, Settled) for one in answers)
    finally:
        await service.close()
    with Ledger(new) as ledger:
        totals = ledger.account_totals(books.account_id)
        assert totals.requests > manifest.rows["usage"]
        assert totals.charged == COST * totals.requests
        assert not ledger.find_unsettled((*sorted(before), "new"))
        assert ledger.check().ok


def test_nothing_of_the_lost_service_holds_the_new_one_up(books: Books, url: str, new_url: NewUrl, file: Path) -> None:
    ledger = books.ledger
    assert ledger.run(HoldLease(0, 1, "lost", 20.0)).epoch == 1
    assert ledger.run(ReleaseLease(1, {}))  # and taken again after the backup, by whom this ledger does not know
    ledger.run(PostHolds("gateway", (OpenHold("r9", books.account_id, books.key_id, 46, 14, 3, 5, 4),)))
    assert back_up(url, file).rows["limiter_holds"] == 1
    ledger.settle([books.settlement("r1")])  # and is lost
    seen = ledger.changes(0).version
    restored(file, new := new_url())
    with Ledger(new) as again:
        # A limiter that has followed the lost ledger hears of every account and key.
        changes = again.changes(seen)
        assert {one.account_id for one in changes.accounts} == {books.account_id}
        assert {one.key_id for one in changes.keys} == {books.key_id}
        refused = again.run(HoldLease(0, 1, "new", 20.0))
        assert refused.epoch is None  # the lost one may still admit
        taken = again.run(HoldLease(0, 1, "new", 20.0, ended=tuple(one.epoch for one in refused.blockers)))
        assert taken.epoch is not None
        assert taken.epoch > 1
        assert taken.holds == ()


def test_a_backup_of_the_previous_release_is_migrated(
    books: Books, url: str, new_url: NewUrl, file: Path, next_release: Callable[[], None]
) -> None:
    books.ledger.settle([books.settlement("r1")])
    assert back_up(url, file).revision == revisions()[-1]
    new = new_url()
    next_release()
    assert restored(file, new).differences == ()
    with closing(Database(new)) as database:
        database.expect_head()
    with Ledger(new) as ledger:
        assert [row.request_id for row in ledger.export_usage().rows] == ["r1"]


@pytest.mark.parametrize("where", ["count_rows", "check_books"])
def test_a_restore_that_is_cut_off_leaves_no_ledger(
    books: Books, url: str, new_url: NewUrl, file: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    back_up(url, file)
    new = new_url()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(restore, where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            restored(file, new)
    if new.startswith("sqlite"):
        assert not list(file.parent.parent.glob(f"{Path(new).name}*"))
        assert not list(file.parent.parent.glob(".restore-*"))
        return
    for migrate in (True, False):
        with pytest.raises(SchemaMismatch, match="interrupted"):
            Ledger(new, migrate=migrate)
    with pytest.raises(Conflict, match="not empty"):
        restored(file, new)


def test_only_an_empty_database_is_filled(books: Books, url: str, file: Path) -> None:
    back_up(url, file)
    kept = rows(url)
    with pytest.raises(Conflict, match=r"exists: move|not empty"):
        restored(file, url)
    assert rows(url) == kept


def test_a_backup_needs_a_ledger(new_url: NewUrl, file: Path) -> None:
    with pytest.raises(LedgerError):
        back_up(new_url(), file)


def test_fewer_rows_than_the_backup_had_are_refused(books: Books, url: str, new_url: NewUrl, file: Path) -> None:
    back_up(url, file)
    change_manifest(file, rows=json.loads(zipfile.ZipFile(file).read("manifest.json"))["rows"] | {"usage": 1})
    with pytest.raises(LedgerError, match="does not have the same rows as the backup, in usage"):
        restored(file, new_url())
