"""Members come, change their roles and go; a further account is joined by whom its invitation names."""

from __future__ import annotations

from serve_app.contracts.key_format import digest
from serve_app.contracts.people import FindPerson, InvitePerson

from .conftest import House, submit


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
    assert "who is already a user of this console" in house.browser().get(path).text
    assert "who is already a user of this console" in eve.get(path).text
    assert submit(eve, "/console/profile", f"{path}/join").status_code == 422
    assert submit(ada, path, f"{path}/join").status_code == 303
    page = ada.get("/console/").text
    assert "Bob &amp; Co" in page
    assert "Ada&#39;s" in page
    assert ada.get(f"/console/accounts/{other}/billing").status_code == 200
    assert submit(ada, "/console/profile", f"{path}/join").status_code == 422
