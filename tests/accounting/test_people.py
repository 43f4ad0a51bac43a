"""People of the console: an invitation makes one person once, and a session ends with its person's trust."""

from __future__ import annotations

import dataclasses

import pytest

from serve_app.contracts import people
from serve_app.contracts.books import Audit
from serve_app.contracts.errors import AccountNotFound, Conflict, InvalidValue

from .books import NOON, Books, Clock

HOUR = 3600.0
OPERATOR = Audit("cli:ada")
ADDRESS = "ada@example.org"


def invite(books: Books, digest: str = "d1", email: str = ADDRESS, role: str = "owner") -> people.Invitation:
    wanted = people.InvitePerson(books.account_id, email, role, digest, NOON + HOUR, OPERATOR)
    return books.ledger.run(wanted)


def accept(books: Books, digest: str = "d1") -> people.Person:
    return books.ledger.run(people.AcceptInvitation(digest, "Ada", "$argon2id$secret", "192.0.2.1"))


def sign_in(books: Books, person: people.Person, digest: str, step: int | None = None) -> people.SignedIn:
    return books.ledger.run(people.OpenSession(person.user_id, digest, NOON + HOUR, step, Audit(person.email)))


def test_an_invitation_makes_one_person_once(timed: Books) -> None:
    invite(timed, email=" Ada@Example.org ")
    person = accept(timed)
    assert (person.email, person.roles, person.operator_role) == (ADDRESS, {timed.account_id: "owner"}, None)
    assert timed.ledger.run(people.FindPerson("ADA@example.org")) == person
    with pytest.raises(InvalidValue, match="used"):
        accept(timed)
    assert timed.ledger.run(people.FindInvitation("d1")) is None


@pytest.mark.parametrize(
    "changes",
    [{"password": "another hash"}, {"totp_secret": "sealed:x"}, {"password": "another hash", "totp_secret": "s"}],
)
def test_a_sign_in_that_was_checked_before_a_change_opens_nothing(timed: Books, changes: dict[str, str]) -> None:
    """Its password was right when it began; the check takes time."""
    invite(timed)
    person = accept(timed)
    timed.ledger.run(people.ChangePerson(person.user_id, changes, ""))
    late = people.OpenSession(person.user_id, "late", NOON + HOUR, password=person.password)
    with pytest.raises(InvalidValue, match="changed meanwhile"):
        timed.ledger.run(late)
    assert timed.ledger.run(people.FindSession("late")) is None


def test_a_sign_in_with_the_present_password_opens_a_session(timed: Books) -> None:
    invite(timed)
    person = accept(timed)
    timed.ledger.run(people.OpenSession(person.user_id, "now", NOON + HOUR, password=person.password))
    timed.ledger.run(people.ChangePerson(person.user_id, {"totp_secret": "sealed:x"}, ""))
    timed.ledger.run(people.OpenSession(person.user_id, "coded", NOON + HOUR, 7, password=person.password))
    assert timed.ledger.run(people.FindSession("coded")) is not None


def test_an_invitation_that_is_over_or_revoked_makes_nobody(timed: Books, clock: Clock) -> None:
    revoked = invite(timed)
    timed.ledger.run(people.RevokeInvitation(revoked.invitation_id, OPERATOR))
    invite(timed, "d2")
    clock.now = NOON + HOUR
    for digest in ("d1", "d2", "d3", "\0"):
        with pytest.raises(InvalidValue):
            accept(timed, digest)
    assert timed.ledger.run(people.FindPerson(ADDRESS)) is None


def test_a_second_invitation_never_takes_somebody_over(timed: Books) -> None:
    other = timed.ledger.create_account("Eve's").account_id
    timed.ledger.run(people.InvitePerson(other, ADDRESS, "owner", "d1", NOON + HOUR, OPERATOR))
    invite(timed, "d2")
    before = accept(timed, "d2")
    with pytest.raises(Conflict):
        accept(timed, "d1")
    with pytest.raises(Conflict):
        invite(timed, "d3")
    assert timed.ledger.run(people.FindPerson(ADDRESS)) == before


def test_wrong_addresses_roles_and_accounts_are_refused(timed: Books) -> None:
    for email in ("", "ada", "a b@c", "<b>@c", "\0@c"):
        with pytest.raises(InvalidValue):
            invite(timed, email=email)
    with pytest.raises(InvalidValue):
        invite(timed, role="admin")
    with pytest.raises(AccountNotFound):
        timed.ledger.run(people.InvitePerson("acct_none", ADDRESS, "owner", "d", NOON + HOUR))


def test_sessions_end_by_time_sign_out_password_and_suspension(timed: Books, clock: Clock) -> None:
    invite(timed)
    person = accept(timed)
    ledger = timed.ledger
    first, second = sign_in(timed, person, "s1"), sign_in(timed, person, "s2")
    assert ledger.run(people.FindSession("s1")) == (first, person)
    ledger.run(people.EndSession("user_other", first.session_id))
    assert ledger.run(people.FindSession("s1")) is not None
    ledger.run(people.EndSession(person.user_id, first.session_id, Audit(person.email)))
    assert ledger.run(people.FindSession("s1")) is None
    third = sign_in(timed, person, "s3")
    ledger.run(people.ChangePerson(person.user_id, {"password": "$new"}, third.session_id, Audit(person.email)))
    assert ledger.run(people.ListSessions(person.user_id)) == [third]
    assert second != third
    ledger.run(people.SuspendPerson(person.email, True, OPERATOR))
    assert ledger.run(people.FindSession("s3")) is None
    with pytest.raises(InvalidValue, match="suspended"):
        sign_in(timed, person, "s4")
    ledger.run(people.SuspendPerson(person.email, False, OPERATOR))
    assert ledger.run(people.FindSession("s3")) is None
    sign_in(timed, person, "s5")
    clock.now = NOON + HOUR
    assert ledger.run(people.FindSession("s5")) is None


def test_a_code_opens_one_session(timed: Books) -> None:
    invite(timed)
    person = accept(timed)
    sign_in(timed, person, "s1", 7)
    with pytest.raises(InvalidValue, match="used"):
        sign_in(timed, person, "s2", 7)
    sign_in(timed, person, "s3", 8)


def test_what_people_do_is_on_the_log_under_their_address_without_secrets(timed: Books) -> None:
    invite(timed, "digest-of-invitation")
    person = accept(timed, "digest-of-invitation")
    session = sign_in(timed, person, "digest-of-session")
    audit = Audit(person.email)
    timed.ledger.run(people.ChangePerson(person.user_id, {"totp_secret": "JBSWY3DP"}, session.session_id, audit))
    timed.ledger.run(people.EndSession(person.user_id, session.session_id, audit))
    log = [one for one in reversed(timed.ledger.audit_log()) if one.actor in (ADDRESS, "cli:ada")]
    assert [(one.actor, one.action) for one in log] == [
        ("cli:ada", "invite_person"),
        (ADDRESS, "accept_invitation"),
        (ADDRESS, "sign_in"),
        (ADDRESS, "totp_on"),
        (ADDRESS, "end_session"),
    ]
    text = str([dataclasses.asdict(one) for one in log])
    for secret in ("digest-of", "argon2", "JBSWY3DP"):
        assert secret not in text
    assert timed.ledger.check().ok


def test_a_role_is_changed_and_taken_away_but_never_that_of_the_last_owner(timed: Books) -> None:
    invite(timed)
    ada = accept(timed)
    invite(timed, "d2", "ben@example.org", "member")
    ben = accept(timed, "d2")
    run, account = timed.ledger.run, timed.account_id
    for role in ("member", None):
        with pytest.raises(Conflict, match="last owner"):
            run(people.SetMembership(account, ada.user_id, role, OPERATOR))
    assert run(people.SetMembership(account, ben.user_id, "owner", OPERATOR)).roles == {account: "owner"}
    assert run(people.SetMembership(account, ada.user_id, "billing", OPERATOR)).roles == {account: "billing"}
    assert run(people.SetMembership(account, ada.user_id, None, OPERATOR)).roles == {}
    with pytest.raises(InvalidValue, match="no such member"):
        run(people.SetMembership(account, ada.user_id, None, OPERATOR))
    with pytest.raises(InvalidValue, match="give one of"):
        run(people.SetMembership(account, ben.user_id, "king", OPERATOR))
    changes = [one for one in timed.ledger.audit_log(account) if one.action == "set_membership"]
    assert [(one.subject, one.detail["role"]["is"]) for one in changes] == [
        (ada.user_id, None),
        (ada.user_id, "billing"),
        (ben.user_id, "owner"),
    ]


def test_a_person_joins_a_further_account_once_and_only_by_an_invitation_of_their_own(timed: Books) -> None:
    invite(timed)
    ada = accept(timed)
    other = timed.ledger.create_account("Bob's").account_id
    with pytest.raises(Conflict, match="already belongs to this account"):
        invite(timed, "d2")
    for digest, email in (("d5", ADDRESS), ("d4", "ben@example.org"), ("d3", ADDRESS)):
        timed.ledger.run(people.InvitePerson(other, email, "member", digest, NOON + HOUR, OPERATOR))
    with pytest.raises(Conflict, match="sign in"):
        accept(timed, "d3")
    with pytest.raises(InvalidValue, match="for another e-mail address"):
        timed.ledger.run(people.JoinAccount("d4", ada.user_id))
    joined = timed.ledger.run(people.JoinAccount("d3", ada.user_id, "192.0.2.1"))
    assert joined.roles == {timed.account_id: "owner", other: "member"}
    with pytest.raises(InvalidValue, match="used"):
        timed.ledger.run(people.JoinAccount("d3", ada.user_id))
    with pytest.raises(InvalidValue, match="revoked"):
        timed.ledger.run(people.JoinAccount("d5", ada.user_id))
