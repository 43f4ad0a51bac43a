"""A reader of the changes feed misses no change."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from serve_app.contracts.errors import InvalidValue

from .books import Books, Ledger


def test_every_change_takes_the_next_version(ledger: Ledger) -> None:
    assert ledger.changes(0).version == 0
    account = ledger.create_account("Ada")
    assert account.version == 1
    books = Books(ledger, top_up=100)  # account 2, credit 3, key 4
    assert ledger.set_limits(account.account_id, rpm=5).version == 5
    assert ledger.set_active(account.account_id, False).version == 6
    assert ledger.revoke_key(books.key_id).version == 7
    assert ledger.settle([books.settlement("r1"), books.settlement("r2")])[0].version == 8
    assert ledger.correct(books.account_id, 3, memo="ticket 1").version == 9
    changes = ledger.changes(0)
    assert changes.version == 9
    assert [one.version for one in changes.accounts] == [6, 9]
    assert [one.version for one in changes.keys] == [7]
    assert ledger.changes(9) == type(changes)(version=9, accounts=(), keys=())
    assert [one.version for one in ledger.changes(7).accounts] == [9]


def test_a_long_feed_comes_in_pages_in_the_order_of_versions(ledger: Ledger) -> None:
    for number in range(7):
        Books(ledger, top_up=0, name=f"account {number}")
    seen: list[int] = []
    since = 0
    while True:
        page = ledger.changes(since, limit=3)
        versions = sorted(one.version for one in (*page.accounts, *page.keys))
        assert len(versions) <= 3
        assert all(since < version <= page.version for version in versions)
        seen += versions
        since = page.version
        if not page.more:
            break
    assert seen == list(range(1, 15))
    with pytest.raises(InvalidValue):
        ledger.changes(0, limit=0)


def test_a_follower_misses_nothing_under_concurrent_writers(ledger: Ledger, url: str) -> None:
    writers = [Books(ledger, name=f"account {number}") for number in range(4)]
    finished = threading.Event()
    mirror: dict[str, object] = {}
    versions: list[int] = []

    def follow() -> None:
        since = 0
        last_round = False
        with Ledger(url) as mine:
            while True:
                last_round = finished.is_set()
                page = mine.changes(since, limit=5)
                assert page.version >= since
                for one in page.accounts:
                    assert one.version > since
                    mirror[one.account_id] = one
                for key in page.keys:
                    mirror[key.key_id] = key
                since = page.version
                versions.append(since)
                if last_round and not page.more:
                    return

    def write(books: Books) -> None:
        with Ledger(url) as mine:
            for number in range(5):
                mine.settle([books.settlement(f"{books.account_id}-{number}")])
                mine.set_limits(books.account_id, rpm=number + 1)
                mine.revoke_key(books.new_key().key_id)

    with ThreadPoolExecutor(6) as pool:
        following = pool.submit(follow)
        list(pool.map(write, writers))
        finished.set()
        following.result(timeout=120)
    for books in writers:
        assert mirror[books.account_id] == books.account
        for key in ledger.list_keys(books.account_id):
            assert mirror[key.key_id] == key
    assert versions == sorted(versions)
    assert versions[-1] == ledger.changes(0).version
