"""Tags and allowed addresses of keys are kept as they were checked, and usage is summed by today's tags."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from serve_app.contracts.books import Audit, UsageRow
from serve_app.contracts.commands import SumRequests
from serve_app.contracts.errors import InvalidValue

from .books import COST, NOON, Books, Ledger

DAY = 86_400.0


# Terms


def test_a_key_keeps_its_tags_and_addresses_in_their_canonical_form(books: Books) -> None:
    tags = ["büro", "ci", "büro", "a b"]
    addresses = ["10.0.0.0/8", "203.0.113.7", "2001:DB8:0::/48", "::ffff:192.0.2.1", "10.0.0.0/255.0.0.0"]
    key = books.new_key(tags=tags, addresses=addresses)
    assert key.tags == ("büro", "ci", "a b")
    assert key.addresses == ("10.0.0.0/8", "203.0.113.7/32", "2001:db8::/48", "192.0.2.1/32")
    assert books.key(key.key_id) == key
    assert key in books.ledger.changes(0).keys
    assert books.key().tags is None
    assert books.key().addresses is None


def test_an_update_changes_them_shows_that_in_the_audit_log_and_none_takes_them_away(books: Books) -> None:
    key = books.new_key(tags=["ci"], rpm=3)
    changed = books.ledger.update_key(key.key_id, addresses=["10.0.0.0/8"], tags=["ci", "lab"], audit=Audit("ada"))
    assert (changed.tags, changed.addresses, dict(changed.limits)) == (("ci", "lab"), ("10.0.0.0/8",), {"rpm": 3})
    assert books.ledger.audit_log()[0].detail == {
        "tags": {"was": ["ci"], "is": ["ci", "lab"]},
        "addresses": {"was": None, "is": ["10.0.0.0/8"]},
    }
    assert books.ledger.update_key(key.key_id, tags=["ci", "lab"]) == changed, "no change, no version"
    freed = books.ledger.update_key(key.key_id, tags=None, addresses=None)
    assert (freed.tags, freed.addresses) == (None, None)


def test_a_bad_tag_is_refused(books: Books) -> None:
    wrong: list[Any] = ["ci", [], ["a"] * 11, [""], ["x" * 41], ["a,b"], [" a"], ["a "], ["a\n"], ["a\0"], [7], [None]]
    for tags in wrong:
        with pytest.raises(InvalidValue, match="tags"):
            books.ledger.update_key(books.key_id, tags=tags)


def test_a_bad_address_is_refused_with_what_to_write(books: Books) -> None:
    wrong: list[tuple[Any, str]] = [
        ("10.0.0.1", "give 1 to 50"),
        ([], "give 1 to 50"),
        ([f"10.0.0.{number}" for number in range(51)], "give 1 to 50"),
        (["10.0.0.5/8"], "write 10.0.0.0/8 to allow all of it, or 10.0.0.5"),
        (["2001:db8::1/48"], "write 2001:db8::/48 to allow all of it, or 2001:db8::1"),
        (["10.0.0.0/33"], "is not a valid address or network"),
        (["010.0.0.1"], "is not a valid address or network"),
        (["fe80::1%eth0"], "is not a valid address or network"),
        (["example.com"], "is not a valid address or network"),
        ([""], "is not a valid address or network"),
        ([167772160], "is not a valid address or network"),
    ]
    for addresses, says in wrong:
        with pytest.raises(InvalidValue, match="addresses") as refused:
            books.ledger.update_key(books.key_id, addresses=addresses)
        assert says in str(refused.value)


# Usage


@pytest.fixture
def used(books: Books) -> Books:
    """Two requests of a key without a tag, three of `a`, four of `a` and `b`, and those of another account with `b`."""
    ledger, count = books.ledger, 0
    other = Books(ledger, name="B")
    keys = [
        (books, books.key_id, 2),
        (books, books.new_key(tags=["a"]).key_id, 3),
        (books, books.new_key(tags=["a", "b"]).key_id, 4),
        (other, other.new_key(tags=["b"]).key_id, 5),
    ]
    for owner, key_id, requests in keys:
        for _ in range(requests):
            count += 1
            at = NOON - DAY * (count % 2)
            ledger.settle([owner.settlement(f"r{count}", key_id=key_id, started_at=at - 1, finished_at=at)])
    return books


def by_tag(rows: list[UsageRow]) -> dict[str | None, int]:
    assert all(row.charged == row.requests * COST for row in rows)
    return {row.tag: row.requests for row in rows}


def test_a_key_with_several_tags_counts_in_each_and_one_without_in_the_empty_one(used: Books) -> None:
    sums = used.ledger.usage
    assert by_tag(sums(used.account_id, group_by=("tag",))) == {"": 2, "a": 7, "b": 4}
    assert by_tag(sums(group_by=("tag",))) == {"": 2, "a": 7, "b": 9}
    [total] = sums(used.account_id)
    assert total.requests == 9, "the whole counts each request once"
    days = sums(used.account_id, group_by=("day", "tag"))
    assert [row.tag for row in days] == ["", "a", "b"] * 2
    assert sum(row.requests for row in days) == 13


def test_usage_and_single_requests_are_filtered_by_tag(used: Books) -> None:
    sums, listed = used.ledger.usage, used.ledger.export_usage
    for tag, requests in {"a": 7, "b": 4, "": 2}.items():
        [row] = sums(used.account_id, tag=tag)
        assert (row.requests, row.tag) == (requests, None)
        assert len(listed(used.account_id, tag=tag).rows) == requests
    assert len(listed(tag="b").rows) == 9
    assert by_tag(sums(used.account_id, tag="b", group_by=("tag",))) == {"a": 4, "b": 4}, "of keys with this tag"
    for tag in ("c", "A", "%", "a,b", '"', "\0"):
        assert sums(used.account_id, tag=tag) == []
        assert listed(used.account_id, tag=tag).rows == ()


def test_the_tags_that_keys_have_now_decide(used: Books) -> None:
    for key in used.ledger.list_keys(used.account_id):
        used.ledger.update_key(key.key_id, tags=None if key.tags else ["late"])
    assert by_tag(used.ledger.usage(used.account_id, group_by=("tag",))) == {"": 7, "late": 2}


def test_hours_are_summed_by_tag(used: Books) -> None:
    wanted = SumRequests(used.account_id, NOON - 3600, NOON + 3600, "tag")
    rows = used.ledger.run(wanted)
    assert {(row.day, row.tag) for row in rows} == {("2026-06-01T12", tag) for tag in ("", "a", "b")}
    assert sum(row.requests for row in used.ledger.run(replace(wanted, by="model"))) < sum(row.requests for row in rows)


def test_a_tag_is_no_part_of_a_query(ledger: Ledger) -> None:
    """Whatever a tag looks like, it is text."""
    books = Books(ledger)
    strange = ["'; DROP TABLE usage; --", '{"a": [1]}', "\\", "%", "null"]
    key = books.new_key(tags=strange)
    ledger.settle([books.settlement("r1", key_id=key.key_id)])
    assert by_tag(ledger.usage(group_by=("tag",))) == dict.fromkeys(strange, 1)
    for tag in strange:
        assert len(ledger.export_usage(tag=tag).rows) == 1
