"""Keys are found under two secrets while one replaces the other, and it is known which have not been moved."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve_app.contracts.books import KeySnapshot
from serve_app.contracts.commands import CreateKey, FindKeys
from serve_app.contracts.errors import InvalidValue
from serve_app.contracts.key_format import MANAGEMENT, Hashed, KeySecrets, hint, mark_of, new_key
from serve_app.contracts.key_secrets import MAX_MOVES, KeyMove, ListSealed, ListUnmoved, MoveKeys, Reseal
from serve_app.contracts.management import CreateManagementKey, FindManagementKey, ManagementKey, RevokeManagementKey
from serve_app.contracts.notices import CreateAlert
from serve_app.contracts.people import AcceptInvitation, ChangePerson, FindPerson, InvitePerson, Person
from serve_app.contracts.sealed import is_current, of_totp, of_webhooks, seal, unseal

from .books import NOON, Books, Clock

FIRST, SECOND, THIRD = (f"the {name} secret".encode() for name in ("first", "second", "third"))


def under(secret: bytes, key: str) -> Hashed:
    return KeySecrets(secret).hashed(key)[0]


def create(books: Books, key: str, secrets: KeySecrets, name: str = "laptop") -> KeySnapshot:
    now, before = secrets.hashed(key)
    return books.ledger.run(CreateKey(books.account_id, name, now.digest, hint(key), mark=now.mark, before=before))


def create_management(books: Books, key: str, secrets: KeySecrets) -> ManagementKey:
    now, before = secrets.hashed(key)
    return books.ledger.run(
        CreateManagementKey(books.account_id, "robot", now.digest, hint(key), mark=now.mark, before=before)
    )


def move(books: Books, key: str, before: bytes, after: bytes) -> bool:
    [moved] = books.ledger.run(MoveKeys((KeyMove(under(before, key), under(after, key)),)))
    return moved


def is_found(books: Books, key: str, secret: bytes) -> bool:
    digest = under(secret, key).digest
    return books.ledger.find_key(digest) is not None or books.ledger.run(FindManagementKey(digest)) is not None


def version(books: Books) -> int:
    return books.ledger.changes(2**62).version


def test_a_key_that_is_moved_is_found_under_both_secrets_and_the_feed_brings_it(books: Books) -> None:
    key = new_key()
    made = create(books, key, KeySecrets(FIRST))
    before = version(books)
    assert not is_found(books, key, SECOND)
    assert move(books, key, FIRST, SECOND)
    assert is_found(books, key, FIRST)
    assert is_found(books, key, SECOND)
    [moved] = books.ledger.changes(before).keys
    assert moved == replace(made, version=moved.version, moved_digest=under(SECOND, key).digest)


def test_the_digest_that_a_release_without_rotation_looks_at_stays(books: Books) -> None:
    key = new_key()
    create(books, key, KeySecrets(FIRST))
    move(books, key, FIRST, SECOND)
    stored = books.ledger.list_keys(books.account_id)[-1]
    assert stored.digest == under(FIRST, key).digest


def test_to_move_a_key_again_changes_nothing(books: Books) -> None:
    key = new_key()
    create(books, key, KeySecrets(FIRST))
    move(books, key, FIRST, SECOND)
    before = version(books)
    assert move(books, key, FIRST, SECOND)
    assert version(books) == before


def test_a_second_rotation_keeps_the_secret_before_and_forgets_the_one_before_that(books: Books) -> None:
    key = new_key()
    create(books, key, KeySecrets(FIRST))
    move(books, key, FIRST, SECOND)
    assert move(books, key, SECOND, THIRD)
    assert [is_found(books, key, secret) for secret in (FIRST, SECOND, THIRD)] == [False, True, True]


def test_a_move_that_comes_late_takes_no_key_back(books: Books) -> None:
    key = new_key()
    create(books, key, KeySecrets(FIRST))
    move(books, key, FIRST, SECOND)
    move(books, key, SECOND, THIRD)
    before = version(books)
    assert not move(books, key, FIRST, SECOND) or version(books) == before
    assert [is_found(books, key, secret) for secret in (SECOND, THIRD)] == [True, True]


def test_what_no_key_has_moves_nothing_and_harms_no_other_move(books: Books) -> None:
    key, other = new_key(), new_key()
    create(books, key, KeySecrets(FIRST))
    moves = tuple(KeyMove(under(FIRST, one), under(SECOND, one)) for one in (other, key, key))
    assert books.ledger.run(MoveKeys(moves)) == [False, True, True]
    assert is_found(books, key, SECOND)
    assert not is_found(books, other, SECOND)


@pytest.mark.parametrize(
    "moves",
    [
        (KeyMove(Hashed(new_key(), mark_of(FIRST)), under(SECOND, "key")),),
        (KeyMove(under(FIRST, "key"), replace(under(SECOND, "key"), mark="a secret")),),
        (KeyMove(under(FIRST, "key"), under(SECOND, "key")),) * (MAX_MOVES + 1),
    ],
)
def test_a_key_or_a_secret_can_not_be_stored_by_mistake(books: Books, moves: tuple[KeyMove, ...]) -> None:
    with pytest.raises(InvalidValue):
        books.ledger.run(MoveKeys(moves))


def test_a_key_that_is_made_while_both_are_valid_is_found_under_both(books: Books) -> None:
    key, both = new_key(), KeySecrets(SECOND, FIRST)
    made = create(books, key, both)
    assert is_found(books, key, FIRST)
    assert is_found(books, key, SECOND)
    assert create(books, key, both) == made
    assert create(books, key, KeySecrets(FIRST)) == made
    assert create(books, key, KeySecrets(SECOND)) == made


def test_each_asked_for_digest_of_a_key_is_answered(books: Books) -> None:
    key = new_key()
    made = create(books, key, KeySecrets(SECOND, FIRST))
    digests = tuple(under(secret, key).digest for secret in (FIRST, SECOND, THIRD))
    assert books.ledger.run(FindKeys(digests)) == dict.fromkeys(digests[:2], (made, books.account))


def test_a_revoked_key_stays_revoked_when_it_is_moved(books: Books) -> None:
    key = new_key()
    made = create(books, key, KeySecrets(FIRST))
    books.ledger.revoke_key(made.key_id)
    move(books, key, FIRST, SECOND)
    found = books.ledger.find_key(under(SECOND, key).digest)
    assert found is not None
    assert not found[0].active


def test_management_keys_are_moved_likewise(books: Books) -> None:
    key = new_key(MANAGEMENT)
    made = create_management(books, key, KeySecrets(FIRST))
    assert move(books, key, FIRST, SECOND)
    digests = [under(secret, key).digest for secret in (FIRST, SECOND)]
    found = [books.ledger.run(FindManagementKey(digest)) for digest in digests]
    assert found[0] == found[1]
    assert found[0] is not None
    assert found[0][0] == replace(made, digests=tuple(digests))
    asked = FindManagementKey(under(THIRD, key).digest, digests[1])
    assert books.ledger.run(asked) == found[0]
    other = new_key(MANAGEMENT)
    made = create_management(books, other, KeySecrets(SECOND, FIRST))
    assert is_found(books, other, FIRST)
    assert is_found(books, other, SECOND)
    assert create_management(books, other, KeySecrets(FIRST)) == made


def test_keys_that_are_not_moved_are_counted_and_listed_page_by_page(timed: Books, clock: Clock) -> None:
    run, current = timed.ledger.run, mark_of(SECOND)
    start = run(ListUnmoved(current)).unmoved  # the key of these books has no mark
    old, new, robot = [new_key() for _ in range(4)], new_key(), new_key(MANAGEMENT)
    made = [create(timed, key, KeySecrets(FIRST), f"old {number}") for number, key in enumerate(old)]
    create(timed, new, KeySecrets(SECOND, FIRST))
    create(timed, new_key(), KeySecrets(SECOND))
    managed = create_management(timed, robot, KeySecrets(FIRST))
    move(timed, old[0], FIRST, SECOND)
    timed.ledger.revoke_key(made[1].key_id)
    timed.ledger.update_key(made[2].key_id, expires_at=NOON + 60)
    clock.now = NOON + 61
    found = run(ListUnmoved(current))
    assert (found.moved, found.unmoved - start) == (3, 2)
    rows = {row.key_id: row for row in found.rows}
    assert {made[3].key_id, managed.key_id} <= set(rows)
    row = rows[managed.key_id]
    assert (row.kind, row.name, row.mark, row.last_day) == ("management", "robot", mark_of(FIRST), None)
    assert (row.account_id, row.account_name) == (timed.account_id, timed.account.name)
    pages, after = [], ""
    while after is not None:
        page = run(ListUnmoved(current, after, 1))
        assert (page.moved, page.unmoved) == (found.moved, found.unmoved)
        pages += page.rows
        after = page.next
    assert tuple(pages) == found.rows
    run(RevokeManagementKey(timed.account_id, managed.key_id))
    assert run(ListUnmoved(current)).unmoved == found.unmoved - 1
    assert run(ListUnmoved(mark_of(FIRST))).moved == 3  # what is under both is under the one before, too


def test_a_listed_key_shows_the_last_day_on_which_it_was_used(books: Books) -> None:
    unused = create(books, new_key(), KeySecrets(FIRST))
    for finished_at in (NOON - 86400, NOON):
        books.ledger.settle([books.settlement(f"r{finished_at}", started_at=finished_at, finished_at=finished_at)])
    rows = {row.key_id: row for row in books.ledger.run(ListUnmoved(mark_of(SECOND))).rows}
    days = [day.day for day in books.ledger.usage(group_by=("day",))]
    assert (rows[books.key_id].last_day, rows[books.key_id].mark) == (days[-1], None)
    assert rows[unused.key_id].last_day is None


# Sealed secrets


def person(books: Books) -> Person:
    books.ledger.run(InvitePerson(books.account_id, "ada@example.org", "owner", "0" * 64, 2**33))
    return books.ledger.run(AcceptInvitation("0" * 64, "Ada", "a hash"))


def test_all_sealed_secrets_are_listed_with_their_purpose(books: Books) -> None:
    run, ada = books.ledger.run, person(books)
    assert run(ListSealed()) == ([], None)
    totp = seal("JBSWY3DPEHPK3PXP", KeySecrets(FIRST), of_totp(ada.user_id))
    run(ChangePerson(ada.user_id, {"totp_secret": totp}, ""))
    for number in range(3):
        webhook = seal("whsec", KeySecrets(FIRST), of_webhooks(books.account_id))
        run(CreateAlert(books.account_id, "day", 1 + number, "https://example.org", webhook))
    run(CreateAlert(books.account_id, "day", 1, "ada@example.org", ""))
    listed, after = run(ListSealed())
    assert after is None
    assert [one.table for one in listed] == ["users", "alerts", "alerts", "alerts"]
    assert [unseal(one.stored, KeySecrets(FIRST), one.purpose) for one in listed] == ["JBSWY3DPEHPK3PXP"] + 3 * [
        "whsec"
    ]


def test_what_is_sealed_anew_opens_under_the_current_secret(books: Books) -> None:
    run, ada, both = books.ledger.run, person(books), KeySecrets(SECOND, FIRST)
    run(ChangePerson(ada.user_id, {"totp_secret": seal("first", KeySecrets(FIRST), of_totp(ada.user_id))}, ""))
    [listed], _ = run(ListSealed())
    assert run(Reseal((listed,), (seal("first", both, listed.purpose),))) == 1
    found = run(FindPerson(ada.email))
    assert found is not None
    assert found.totp_secret is not None
    assert is_current(found.totp_secret, both, listed.purpose)
    assert unseal(found.totp_secret, KeySecrets(FIRST), listed.purpose) == "first"


def test_a_secret_that_was_changed_meanwhile_is_not_replaced_by_the_one_before(books: Books) -> None:
    run, ada = books.ledger.run, person(books)
    run(ChangePerson(ada.user_id, {"totp_secret": seal("first", KeySecrets(FIRST), "")}, ""))
    [listed], _ = run(ListSealed())
    changed = seal("second", KeySecrets(FIRST), "")
    run(ChangePerson(ada.user_id, {"totp_secret": changed}, ""))
    assert run(Reseal((listed,), (seal("first", KeySecrets(SECOND, FIRST), ""),))) == 0
    found = run(FindPerson(ada.email))
    assert found is not None
    assert found.totp_secret == changed
