"""Operators invite, list and suspend people; the link is shown once, and each change is on the audit log."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from serve_app.contracts import key_format, people
from serve_app.contracts.people import AcceptInvitation, FindInvitation, FindPerson, OpenSession
from serve_app.contracts.sign_in import FindSignInLink
from tests.gateway.world import World

ADA = "ada@example.org"


async def invite(world: World, admin: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await admin.post(
        f"/admin/accounts/{world.account_id}/people", json={"email": ADA, "role": "owner", **body}
    )
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


def digest(made: dict[str, Any]) -> str:
    """Returns the invitation's digest, by which the console looks it up."""
    return key_format.digest(made["path"].removeprefix("/invitations/"))


async def actions(admin: httpx.AsyncClient) -> list[str]:
    return [record["action"] for record in (await admin.get("/admin/audit")).json()["data"]][::-1]


async def test_an_invitation_opens_the_account_for_whom_it_names_and_is_shown_once(
    world: World, admin: httpx.AsyncClient
) -> None:
    made = await invite(world, admin, hours=2)
    found = world.ledger.run(FindInvitation(digest(made)))
    assert found is not None
    assert (found.email, found.role, found.account_id) == (ADA, "owner", world.account_id)
    assert found.expires_at == pytest.approx(found.created_at + 7200, abs=1)
    listed = (await admin.get(f"/admin/accounts/{world.account_id}/people")).json()
    assert listed["data"] == []
    assert [one["id"] for one in listed["invitations"]] == [made["id"]]
    token = made["path"].removeprefix("/invitations/")
    assert token not in str(listed)
    assert token not in (await admin.get("/admin/audit")).text
    assert await actions(admin) == ["invite_person", "read_people"]


async def test_a_person_is_listed_and_suspended_and_may_come_back(world: World, admin: httpx.AsyncClient) -> None:
    made = await invite(world, admin, role="billing")
    person = world.ledger.run(AcceptInvitation(digest(made), "Ada", "a hash"))
    session = OpenSession(person.user_id, "digest of a session", 4e9)
    world.ledger.run(session)
    listed = (await admin.get(f"/admin/accounts/{world.account_id}/people")).json()
    [shown] = listed["data"]
    assert listed["invitations"] == []
    assert {**shown, "created_at": ""} == {
        "email": ADA, "name": "Ada", "role": "billing", "suspended": False, "totp": False, "created_at": "",
    }  # fmt: skip
    assert "hash" not in str(listed)
    answer = await admin.post("/admin/people/suspend", json={"email": ADA.upper()})
    assert answer.json() == {"email": ADA, "suspended": True}
    assert world.ledger.run(people.FindSession("digest of a session")) is None
    answer = await admin.post("/admin/people/suspend", json={"email": ADA, "suspended": False})
    assert answer.json() == {"email": ADA, "suspended": False}
    found = world.ledger.run(FindPerson(ADA))
    assert found is not None
    assert not found.suspended
    assert (await actions(admin)).count("suspend_person") + (await actions(admin)).count("resume_person") >= 1


async def test_a_person_is_reset_with_a_link_or_without_their_codes_alone(
    world: World, admin: httpx.AsyncClient
) -> None:
    made = await invite(world, admin)
    person = world.ledger.run(AcceptInvitation(digest(made), "Ada", "a hash"))
    for codes_only in (True, False):
        world.ledger.run(people.ChangePerson(person.user_id, {"totp_secret": "sealed"}, ""))
        world.ledger.run(OpenSession(person.user_id, f"session {codes_only}", 4e9))
        asked = {"email": f" {ADA.upper()}", "codes_only": codes_only, "hours": 2}
        answer = await admin.post("/admin/people/reset", json=asked)
        assert answer.status_code == 200, answer.text
        found = world.ledger.run(FindPerson(ADA))
        assert found is not None
        assert found.totp_secret is None
        assert world.ledger.run(people.FindSession(f"session {codes_only}")) is None
        if codes_only:
            assert answer.json() == {"email": ADA, "path": None, "expires_at": None}
            assert found.password == "a hash"
    token = answer.json()["path"].removeprefix("/reset/")
    assert found.password == people.reset_text(token, float(found.password.split()[1]))
    assert token not in found.password
    records = (await admin.get("/admin/audit")).json()["data"]
    details = [one["detail"] for one in records if one["action"] == "reset_person"]
    assert details == [{"password": True, "codes": True}, {"password": False, "codes": True}]
    assert token not in str(records)
    assert (await admin.post("/admin/people/reset", json={"email": "nobody@example.org"})).status_code == 422


async def test_a_role_of_operators_is_given_and_taken_and_ends_the_sessions(
    world: World, admin: httpx.AsyncClient
) -> None:
    made = await invite(world, admin)
    person = world.ledger.run(AcceptInvitation(digest(made), "Ada", "a hash"))
    for role in ("read-only", None):
        world.ledger.run(OpenSession(person.user_id, f"session before {role}", 4e9))
        asked = {"email": ADA.upper(), "role": role, "account_id": role and world.account_id}
        answer = await admin.post("/admin/people/operator", json=asked)
        assert answer.json() == {"email": ADA, "role": role}
        assert world.ledger.run(people.FindSession(f"session before {role}")) is None
        found = world.ledger.run(FindPerson(ADA))
        assert found is not None
        assert found.operator_role == role
    assert (await actions(admin)).count("set_operator_role") == 2
    known, unknown = {"email": ADA, "account_id": world.account_id}, {"email": "nobody@example.org"}
    for wrong in (known, {**known, "role": "king"}, {**unknown, "role": "admin"}, {"email": ADA, "role": "admin"}):
        assert (await admin.post("/admin/people/operator", json=wrong)).status_code in (400, 422)


async def test_a_revoked_invitation_opens_nothing(world: World, admin: httpx.AsyncClient) -> None:
    made = await invite(world, admin)
    answer = await admin.delete(f"/admin/invitations/{made['id']}")
    assert answer.status_code == 200
    assert answer.json()["revoked_at"]
    assert world.ledger.run(FindInvitation(digest(made))) is None
    assert await actions(admin) == ["invite_person", "revoke_invitation"]
    assert (await admin.delete("/admin/invitations/inv_none")).status_code == 422


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"email": "nobody", "role": "owner"}, 422),
        ({"email": ADA, "role": "king"}, 422),
        ({"email": ADA, "role": "owner", "hours": 0}, 422),
        ({"role": "owner"}, 400),
        ({"email": ADA, "role": "owner", "more": 1}, 400),
    ],
)
async def test_bad_invitations_are_refused(
    world: World, admin: httpx.AsyncClient, body: dict[str, Any], status: int
) -> None:
    answer = await admin.post(f"/admin/accounts/{world.account_id}/people", json=body)
    assert answer.status_code == status, answer.text
    assert await actions(admin) == []
    answer = await admin.post("/admin/accounts/acct_none/people", json={"email": ADA, "role": "owner"})
    assert answer.status_code == 404


async def test_an_unknown_person_is_not_suspended(admin: httpx.AsyncClient) -> None:
    answer = await admin.post("/admin/people/suspend", json={"email": ADA})
    assert answer.status_code == 422
    assert await actions(admin) == []


async def test_a_sign_in_link_of_an_account_works_once_for_ten_minutes_and_no_log_has_it(
    world: World, admin: httpx.AsyncClient
) -> None:
    path = f"/admin/accounts/{world.account_id}/sign-in-link"
    made = (await admin.post(path)).json()
    token = made["path"].removeprefix("/first/")
    link = world.ledger.run(FindSignInLink(key_format.digest(token)))
    assert link is not None
    assert (link.account_id, link.person) == (world.account_id, None)
    newer = (await admin.post(path)).json()
    assert world.ledger.run(FindSignInLink(key_format.digest(token))) is None
    log = (await admin.get("/admin/audit")).text
    assert token not in log
    assert newer["path"].removeprefix("/first/") not in log
    assert await actions(admin) == ["make_sign_in_link"] * 2
    assert (await admin.post("/admin/accounts/acct_none/sign-in-link")).status_code == 404
