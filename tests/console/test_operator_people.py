"""Operators find people and help them to sign in; only an admin has power over another operator."""

from __future__ import annotations

import pytest

from serve_app.console.attempts import OF_EMAIL
from serve_app.contracts.people import FindPerson, ListSessions

from .conftest import PASSWORD, House, operator, submit

PEOPLE = "/console/operator/people"


def person_id(house: House, email: str) -> str:
    found = house.ledger.run(FindPerson(email))
    assert found is not None
    return found.user_id


def test_a_person_is_found_by_a_part_of_the_address_and_the_search_is_recorded(house: House) -> None:
    house.member("eve@corner.example")
    browser = operator(house, "read-only", "ray@example.org")
    for text in ("corner", "EVE@"):
        page = browser.get(PEOPLE, params={"search": text}).text
        assert f"{PEOPLE}/{person_id(house, 'eve@corner.example')}" in page
        assert "ray@example.org" not in page.partition('id="found"')[2].partition("</main>")[0]
    assert "Nobody found" in browser.get(PEOPLE, params={"search": "%"}).text
    assert [one.detail for one in house.ledger.audit_log()[:3]] == [{"search": one} for one in ("%", "EVE@", "corner")]
    browser.get(PEOPLE)
    assert house.ledger.audit_log()[0].detail == {"search": ""}
    browser.get(f"{PEOPLE}/{person_id(house, 'eve@corner.example')}")
    assert "opened the page of eve@corner.example" in browser.get("/console/operator/audit?reads=1").text
    assert "opened the page of" not in browser.get("/console/operator/audit").text
    assert browser.get(f"{PEOPLE}/user_none").status_code == 404


def test_a_password_link_works_once_and_ends_sessions_and_the_old_password(house: House) -> None:
    eve = house.member("eve@example.org")
    browser, path = operator(house, "support", "sue@example.org"), f"{PEOPLE}/{person_id(house, 'eve@example.org')}"
    made = submit(browser, path, f"{path}/reset", typed="eve@example.org")
    assert made.status_code == 201
    assert made.headers["cache-control"] == "no-store"
    link = made.text.partition("http://console.test")[2].partition("<")[0]
    assert eve.get("/console/profile").status_code == 303
    fresh = house.browser()
    fields = {"email": "eve@example.org", "password": PASSWORD}
    assert submit(fresh, "/console/sign-in", "/console/sign-in", **fields).status_code == 403
    assert submit(fresh, link, link, new_password="another long password").status_code == 303
    assert house.browser().get(link).status_code == 404
    assert "reset the password of eve@example.org" in browser.get("/console/operator/audit").text
    assert link.rpartition("/")[2] not in browser.get("/console/operator/audit").text


def test_a_person_who_tried_too_often_may_try_again_at_once(house: House) -> None:
    house.member("eve@example.org")
    browser, path = operator(house, "support", "sue@example.org"), f"{PEOPLE}/{person_id(house, 'eve@example.org')}"
    for _ in range(OF_EMAIL):
        house.console.attempts.begin(None, "eve@example.org")
    house.console.attempts.begin_code("eve@example.org", None)
    fields = {"email": "EVE@example.org", "password": PASSWORD}
    sign_in = "/console/sign-in"
    assert submit(house.browser(), sign_in, sign_in, **fields).status_code == 429
    page = browser.get(path).text
    assert "seconds: too many attempts" in page
    assert "Unlock sign-in" in page
    assert submit(browser, path, f"{path}/unlock").status_code == 303
    page = browser.get(path).text
    assert "<dt>Sign-in lock</dt><dd>None</dd>" in page
    assert "Unlock sign-in" not in page
    assert "<h1>Ada</h1>" in page  # the address is below the name
    assert submit(house.browser(), sign_in, sign_in, **fields).status_code == 303
    assert "unlocked the sign-in of eve@example.org" in browser.get("/console/operator/audit").text


def test_sessions_are_ended_and_a_person_is_suspended_and_reactivated(house: House) -> None:
    eve, user_id = house.member("eve@example.org"), person_id(house, "eve@example.org")
    browser, path = operator(house, "support", "sue@example.org"), f"{PEOPLE}/{user_id}"
    assert submit(browser, path, f"{path}/sessions").status_code == 303
    assert house.ledger.run(ListSessions(user_id)) == []
    assert eve.get("/console/profile").status_code == 303
    for given, state in (("yes", True), ("no", False)):
        assert submit(browser, path, f"{path}/suspended", suspended=given).status_code == 303
        found = house.ledger.run(FindPerson("eve@example.org"))
        assert found is not None
        assert found.suspended is state


@pytest.mark.parametrize("form", ["reset", "codes", "sessions", "suspended", "unlock"])
def test_support_has_no_power_over_an_operator(house: House, form: str) -> None:
    operator(house, "admin", "ann@example.org")
    operator(house, "read-only", "ray@example.org")
    for email in ("ann@example.org", "ray@example.org"):
        path = f"{PEOPLE}/{person_id(house, email)}"
        browser = operator(house, "support", f"sue-{email}")
        answer = submit(browser, path, f"{path}/{form}", suspended="yes")
        assert answer.status_code == 403
        assert "only an admin may do this" in answer.text
        assert "Make a password link" not in browser.get(path).text
    boss = operator(house, "admin", "boss@example.org")
    answer = submit(boss, path, f"{path}/{form}", suspended="yes")
    assert answer.status_code == (403 if form == "reset" else 303), "who signs in as two operators needs no second one"
