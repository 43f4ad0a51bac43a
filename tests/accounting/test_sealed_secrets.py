"""Sealed secrets are listed with their purpose, and replaced only where they are still what was listed."""

from __future__ import annotations

from serve_app.contracts.notices import CreateAlert
from serve_app.contracts.people import AcceptInvitation, ChangePerson, FindPerson, InvitePerson, Person
from serve_app.contracts.sealed_secrets import ListSealed, Reseal
from serve_app.storage.sealing import SecretKeys, is_current, of_totp, of_webhooks, seal, unseal

from .books import Books

FIRST, SECOND = b"the first secret key", b"the second secret key"


def person(books: Books) -> Person:
    books.ledger.run(InvitePerson(books.account_id, "ada@example.org", "owner", "0" * 64, 2**33))
    return books.ledger.run(AcceptInvitation("0" * 64, "Ada", "a hash"))


def test_all_sealed_secrets_are_listed_with_their_purpose(books: Books) -> None:
    run, ada = books.ledger.run, person(books)
    assert run(ListSealed()) == ([], None)
    totp = seal("JBSWY3DPEHPK3PXP", SecretKeys(FIRST), of_totp(ada.user_id))
    run(ChangePerson(ada.user_id, {"totp_secret": totp}, ""))
    for number in range(3):
        webhook = seal("whsec", SecretKeys(FIRST), of_webhooks(books.account_id))
        run(CreateAlert(books.account_id, "day", 1 + number, "https://example.org", webhook))
    run(CreateAlert(books.account_id, "day", 1, "ada@example.org", ""))
    listed, after = run(ListSealed())
    assert after is None
    assert [one.table for one in listed] == ["users", "alerts", "alerts", "alerts"]
    assert [unseal(one.stored, SecretKeys(FIRST), one.purpose) for one in listed] == ["JBSWY3DPEHPK3PXP"] + 3 * [
        "whsec"
    ]


def test_what_is_sealed_anew_opens_under_the_current_secret(books: Books) -> None:
    run, ada, both = books.ledger.run, person(books), SecretKeys(SECOND, FIRST)
    run(ChangePerson(ada.user_id, {"totp_secret": seal("first", SecretKeys(FIRST), of_totp(ada.user_id))}, ""))
    [listed], _ = run(ListSealed())
    assert run(Reseal((listed,), (seal("first", both, listed.purpose),))) == 1
    found = run(FindPerson(ada.email))
    assert found is not None
    assert found.totp_secret is not None
    assert is_current(found.totp_secret, both, listed.purpose)
    assert unseal(found.totp_secret, SecretKeys(FIRST), listed.purpose) == "first"


def test_a_secret_that_was_changed_meanwhile_is_not_replaced_by_the_one_before(books: Books) -> None:
    run, ada = books.ledger.run, person(books)
    run(ChangePerson(ada.user_id, {"totp_secret": seal("first", SecretKeys(FIRST), "")}, ""))
    [listed], _ = run(ListSealed())
    changed = seal("second", SecretKeys(FIRST), "")
    run(ChangePerson(ada.user_id, {"totp_secret": changed}, ""))
    assert run(Reseal((listed,), (seal("first", SecretKeys(SECOND, FIRST), ""),))) == 0
    found = run(FindPerson(ada.email))
    assert found is not None
    assert found.totp_secret == changed
