"""Links, sign-up, recovery codes and passkeys: each opens the service to one person, and each link and code once."""

from __future__ import annotations

import pytest

from serve_app.contracts import people
from serve_app.contracts.books import Audit
from serve_app.contracts.errors import AccountNotFound, Conflict, InvalidValue
from serve_app.contracts.operators import SetOperatorRole
from serve_app.contracts.sign_in import (
    MAX_PASSKEYS,
    AddPasskey,
    CountRecoveryCodes,
    FindPasskey,
    FindSignInLink,
    ListPasskeys,
    MakeSignInLink,
    RemovePasskey,
    ReplaceRecoveryCodes,
    SignUp,
    UseSignInLink,
)

from .books import NOON, Books, Clock

EMAIL = "ada@example.org"
HOUR = 3600.0


def link(books: Books, digest: str = "l1") -> None:
    books.ledger.run(MakeSignInLink(books.account_id, digest, NOON + 600, Audit("make serve")))


def use(books: Books, digest: str = "l1", email: str = EMAIL) -> people.Person:
    return books.ledger.run(UseSignInLink(digest, email, "Ada", "a hash"))


def sign_up(books: Books, email: str, credit: int = 0, cap: int = 0) -> people.Person:
    return books.ledger.run(SignUp(email, "Ada", "Ada's", "a hash", credit, cap))


def test_the_first_link_makes_an_owner_who_is_an_operator_and_later_ones_sign_this_person_in(timed: Books) -> None:
    link(timed)
    found = timed.ledger.run(FindSignInLink("l1"))
    assert found is not None
    assert (found.account_id, found.person) == (timed.account_id, None)
    person = use(timed)
    assert (person.email, person.roles, person.operator_role) == (EMAIL, {timed.account_id: "owner"}, "admin")
    link(timed, "l2")
    assert use(timed, "l2", email="") == person


def test_a_link_works_once_until_it_expires_or_is_replaced(timed: Books, clock: Clock) -> None:
    link(timed)
    use(timed)
    link(timed, "l2")
    link(timed, "l3")
    for gone in ("l1", "l2", "never"):
        with pytest.raises(InvalidValue, match="used, replaced or expired"):
            use(timed, gone)
    clock.now += 600
    assert timed.ledger.run(FindSignInLink("l3")) is None
    with pytest.raises(InvalidValue):
        use(timed, "l3")
    with pytest.raises(AccountNotFound):
        timed.ledger.run(MakeSignInLink("acct_none", "l4", NOON + 600))


def test_a_link_signs_in_no_owner_who_is_not_an_admin_and_none_who_is_suspended(timed: Books) -> None:
    link(timed)
    use(timed)
    for change in (people.SuspendPerson(EMAIL, True), SetOperatorRole(EMAIL, "support", timed.account_id)):
        timed.ledger.run(people.SuspendPerson(EMAIL, False))
        timed.ledger.run(change)
        link(timed, "again")
        found = timed.ledger.run(FindSignInLink("again"))
        assert found is not None
        assert found.person is None
        with pytest.raises(Conflict, match="already belongs"):
            use(timed, "again")
        assert timed.ledger.run(FindSignInLink("again")) is not None, "a mistake does not use it up"


def test_a_sign_up_makes_an_account_with_starting_credit_up_to_the_cap_of_a_day(timed: Books, clock: Clock) -> None:
    persons = [sign_up(timed, f"{n}@example.org", 40, 100) for n in range(3)]
    accounts = [next(iter(person.roles)) for person in persons]
    assert [timed.ledger.get_account(one).balance for one in accounts] == [40, 40, 0]
    assert {tuple(person.roles.values()) for person in persons} == {("owner",)}
    assert timed.ledger.get_account(accounts[0]).name == "Ada's"
    clock.now += 24 * HOUR
    [later] = sign_up(timed, "later@example.org", 40, 100).roles
    assert timed.ledger.get_account(later).balance == 40
    assert timed.ledger.check().ok
    with pytest.raises(Conflict):
        sign_up(timed, "LATER@example.org")


def test_a_recovery_code_opens_one_session_and_ends_with_the_one_time_codes(timed: Books) -> None:
    person, run = sign_up(timed, EMAIL), timed.ledger.run

    def opens(code: str, session: str) -> bool:
        try:
            run(people.OpenSession(person.user_id, session, NOON + HOUR, password=secret, recovery=code))
        except InvalidValue:
            return False
        return True

    secret = person.password
    with pytest.raises(InvalidValue):
        run(ReplaceRecoveryCodes(person.user_id, ("r0",)))
    run(people.ChangePerson(person.user_id, {"totp_secret": "sealed"}, "", recovery=("r1", "r2")))
    other = sign_up(timed, "ben@example.org")
    run(people.ChangePerson(other.user_id, {"totp_secret": "sealed"}, "", recovery=("r3",)))
    assert opens("r1", "s1")
    assert not any(opens(code, f"again {code}") for code in ("r1", "r3", "never"))
    assert run(CountRecoveryCodes(person.user_id)) == 1
    run(ReplaceRecoveryCodes(person.user_id, ("r4",)))
    assert not opens("r2", "s2")
    run(people.ChangePerson(person.user_id, {"totp_secret": None}, ""))
    assert run(CountRecoveryCodes(person.user_id)) == 0
    assert run(CountRecoveryCodes(other.user_id)) == 1


def test_a_passkey_belongs_to_one_person_who_can_remove_it(timed: Books) -> None:
    ada, ben, run = sign_up(timed, EMAIL), sign_up(timed, "ben@example.org"), timed.ledger.run
    made = run(AddPasskey("p1", ada.user_id, "laptop", "key", 0))
    with pytest.raises(Conflict):
        run(AddPasskey("p1", ben.user_id, "stolen", "key", 0))
    assert run(FindPasskey("p1")) == (made, ada)
    run(people.OpenSession(ada.user_id, "s1", NOON + HOUR, passkey=("p1", 7)))
    [found] = run(ListPasskeys(ada.user_id))
    assert (found.sign_count, found.used_at) == (7, NOON)
    run(RemovePasskey(ben.user_id, "p1"))
    assert run(ListPasskeys(ada.user_id)) == [found]
    run(RemovePasskey(ada.user_id, "p1"))
    with pytest.raises(InvalidValue, match="removed"):
        run(people.OpenSession(ada.user_id, "s2", NOON + HOUR, passkey=("p1", 8)))
    for number in range(MAX_PASSKEYS):
        run(AddPasskey(f"p{number}", ada.user_id, "one of many", "key", 0))
    with pytest.raises(Conflict, match="at most"):
        run(AddPasskey("one more", ada.user_id, "one of many", "key", 0))


def test_an_operators_reset_removes_passkeys_and_recovery_codes(timed: Books) -> None:
    person, run = sign_up(timed, EMAIL), timed.ledger.run
    run(AddPasskey("p1", person.user_id, "laptop", "key", 0))
    run(people.ChangePerson(person.user_id, {"totp_secret": "sealed"}, "", recovery=("r1",)))
    run(people.ResetPerson(EMAIL, None))
    assert (run(CountRecoveryCodes(person.user_id)), len(run(ListPasskeys(person.user_id)))) == (0, 1)
    run(people.ResetPerson(EMAIL, people.reset_text("token", NOON + HOUR)))
    assert run(ListPasskeys(person.user_id)) == []


def test_a_password_changes_only_while_it_is_the_one_that_was_seen(timed: Books) -> None:
    person, run = sign_up(timed, EMAIL), timed.ledger.run
    run(people.ChangePerson(person.user_id, {"password": "second"}, "", before="a hash"))
    with pytest.raises(InvalidValue, match="meanwhile"):
        run(people.ChangePerson(person.user_id, {"password": "third"}, "", before="a hash"))


def test_an_invitation_names_its_account_and_inviter(timed: Books) -> None:
    wanted = people.InvitePerson(timed.account_id, EMAIL, "member", "d1", NOON + HOUR, invited_by="Ada")
    timed.ledger.run(wanted)
    found = timed.ledger.run(people.FindInvitation("d1"))
    assert found is not None
    assert (found.invited_by, found.account_name) == ("Ada", timed.ledger.get_account(timed.account_id).name)
