"""Members come, change their roles and go; a further account is joined by whom its invitation names."""

from __future__ import annotations

import re

from serve_app.contracts.key_format import digest
from serve_app.contracts.people import MAX_INVITATIONS_A_DAY, FindPerson, InvitePerson

from .conftest import CSRF, PASSWORD, House, submit, words


def user_id(house: House, email: str) -> str:
    person = house.ledger.run(FindPerson(email))
    assert person is not None
    return person.user_id


def test_an_owner_changes_a_role_and_it_holds_at_the_next_page(house: House) -> None:
    owner, member = house.member(), house.member("ben@example.org", "member")
    path = f"/console/accounts/{house.account_id}/members"
    action = f"{path}/{user_id(house, 'ben@example.org')}"
    assert member.get(f"/console/accounts/{house.account_id}/keys").status_code == 200
    assert submit(owner, path, action, role="billing").status_code == 303
    assert member.get(f"/console/accounts/{house.account_id}/keys").status_code == 403
    assert submit(owner, path, action, role="none").status_code == 303
    assert member.get(f"/console/accounts/{house.account_id}").status_code == 403
    assert member.get("/console/").status_code == 200
    assert submit(owner, path, action, role="owner").status_code == 422
    for wrong in ("", "admin", "operator"):
        assert submit(owner, path, action, role=wrong).status_code == 422
    mine = f"{path}/{user_id(house, 'ada@example.org')}"
    answer = submit(owner, path, mine, role="none")
    assert (answer.status_code, "last owner" in answer.text) == (422, True)


def test_a_member_of_another_account_is_out_of_reach(house: House) -> None:
    other = house.ledger.create_account("Bob's").account_id
    house.member("bob@example.org", "owner", other)
    owner, path = house.member(), f"/console/accounts/{house.account_id}/members"
    assert submit(owner, path, f"{path}/{user_id(house, 'bob@example.org')}", role="none").status_code == 422
    person = house.ledger.run(FindPerson("bob@example.org"))
    assert person is not None
    assert person.roles == {other: "owner"}


def test_a_person_joins_a_second_account_and_chooses_between_the_two(house: House) -> None:
    other = house.ledger.create_account("Bob & Co").account_id
    ada, eve = house.member(), house.member("eve@example.org")
    token, expires_at = digest("second"), house.clock.now + 3600
    house.ledger.run(InvitePerson(other, "ada@example.org", "billing", token, expires_at))
    path = "/console/invitations/second"
    assert "Join account" not in eve.get(path).text
    assert "Join account" in ada.get(path).text
    assert submit(eve, "/console/profile", f"{path}/join").status_code == 422
    assert submit(ada, path, f"{path}/join").status_code == 303
    page = ada.get("/console/").text
    assert "Bob &amp; Co" in page
    assert "Ada&#39;s" in page
    assert ada.get(f"/console/accounts/{other}/billing").status_code == 200
    assert submit(ada, "/console/profile", f"{path}/join").status_code == 422


def test_an_owner_does_not_learn_whether_an_address_has_a_login(house: House) -> None:
    other = house.ledger.create_account("Bob's").account_id
    house.member("bob@example.org", "owner", other)
    owner, path, pages = house.member(), f"/console/accounts/{house.account_id}/members", []
    for email in ("bob@example.org", "new@example.org"):
        made = submit(owner, path, path, email=email, role="member")
        assert made.status_code == 201
        link = re.search(r"/console/invitations/[\w-]+", made.text)
        assert link is not None
        for browser in (owner, house.browser()):
            page = CSRF.sub("", browser.get(link[0]).text)
            pages.append(page.replace(email, "EMAIL").replace(link[0], "LINK"))
    assert pages[:2] == pages[2:]


def test_an_invitation_that_was_open_before_the_sign_in_opens_again_for_its_person_alone(house: House) -> None:
    other = house.ledger.create_account("Bob & Co").account_id
    for email in ("ada@example.org", "eve@example.org"):
        house.member(email)
    path, expires_at = "/console/invitations/second", house.clock.now + 3600
    house.ledger.run(InvitePerson(other, "ada@example.org", "billing", digest("second"), expires_at))
    for email, target in ("eve@example.org", "/console/"), ("ada@example.org", path):
        browser = house.browser()
        assert browser.get(path).status_code == 200
        for wanted in (target, "/console/"):  # once
            answer = submit(browser, "/console/sign-in", "/console/sign-in", email=email, password=PASSWORD)
            assert (answer.status_code, answer.headers["location"]) == (303, wanted), email
            browser.cookies.delete("console_session")
    browser = house.browser()
    browser.cookies.set("console_invitation", "//evil.example.org")
    answer = submit(browser, "/console/sign-in", "/console/sign-in", email="ada@example.org", password=PASSWORD)
    assert answer.headers["location"] == "/console/"


def test_a_newer_invitation_and_a_membership_replace_the_open_ones(house: House) -> None:
    owner, path = house.member(), f"/console/accounts/{house.account_id}/members"
    first = house.invite("ben@example.org", "owner")
    made = submit(owner, path, path, email="Ben@example.org", role="member").text
    page = owner.get(path).text
    assert (page.count("The link that you sent to ben@example.org"), page.count("/revoke")) == (1, 1)
    assert "ben@example.org Member" in words(page)
    assert house.browser().get(first).status_code == 404
    second, link = "token-of-another-account", re.search(r"/console/invitations/[\w-]+", made)
    assert link is not None
    other = house.ledger.create_account("Bob's").account_id
    house.ledger.run(InvitePerson(other, "ben@example.org", "owner", digest(second), house.clock.now + 3600))
    assert submit(house.browser(), link[0], link[0], name="Ben", new_password=PASSWORD).status_code == 303
    assert "/revoke" not in owner.get(path).text
    assert house.browser().get(f"/console/invitations/{second}").status_code == 200, "that of another account stays"


def test_an_accounts_owners_make_few_invitations_in_a_day_and_the_operator_is_not_bound(house: House) -> None:
    owner, path = house.member(), f"/console/accounts/{house.account_id}/members"
    made = []
    for number in range(MAX_INVITATIONS_A_DAY):
        made.append(submit(owner, path, path, email=f"p{number}@example.org", role="member").status_code)
    assert made == [201] * (MAX_INVITATIONS_A_DAY - 1) + [422], "the owner's own invitation counts"
    house.invite("by-the-operator@example.org")
    house.clock.now += 86_401
    fields = {"email": "ada@example.org", "password": PASSWORD}
    assert submit(owner, "/console/sign-in", "/console/sign-in", **fields).status_code == 303
    assert submit(owner, path, path, email="later@example.org", role="member").status_code == 201
