"""A passkey signs its person in, from this service's own pages, with its user verified, and each answer once."""

from __future__ import annotations

import html
import re
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from serve_app.console.passkey_pages import FRESH_S
from serve_app.console.passkeys import CHALLENGE_S
from serve_app.contracts import people

from .authenticator import PRESENT, Authenticator
from .conftest import CSRF, PASSWORD, House, submit

PAGE, SIGN_IN = "/console/profile/passkeys", "/console/sign-in"
HOST, ORIGIN = "console.test", "http://console.test"


def asked(page: str) -> dict[str, str]:
    """What a page with a passkey's form asks of the browser, and its fields."""
    options = re.search(r'data-options="([^"]+)"', page)
    challenge = re.search(r'name="challenge" value="([^"]+)"', page)
    csrf = CSRF.search(page)
    assert options is not None
    assert challenge is not None
    assert csrf is not None
    return {"options": html.unescape(options[1]), "challenge": html.unescape(challenge[1]), "csrf": csrf[1]}


def add(browser: TestClient, device: Authenticator, name: str = "laptop", **fields: Any) -> httpx.Response:
    found = asked(browser.get(PAGE).text)
    found["credential"] = device.create(found.pop("options"))
    return browser.post(PAGE, data={**found, "name": name, "password": PASSWORD, **fields})


def prepared(browser: TestClient, device: Authenticator) -> dict[str, str]:
    """The form with which the device signs in."""
    found = asked(browser.get(SIGN_IN).text)
    found["credential"] = device.get(found.pop("options"))
    return found


def sign_in(browser: TestClient, device: Authenticator) -> httpx.Response:
    return browser.post(f"{SIGN_IN}/passkey", data=prepared(browser, device))


@pytest.fixture
def device() -> Authenticator:
    return Authenticator(ORIGIN, HOST)


def test_a_passkey_signs_in_without_password_and_code_until_it_is_removed(house: House, device: Authenticator) -> None:
    owner = house.member()
    assert add(owner, device).status_code == 303
    assert add(owner, Authenticator(ORIGIN, HOST), "phone").status_code == 303
    profile = owner.get("/console/profile").text
    assert "laptop" in profile
    assert "phone" in profile
    for _ in range(2):
        browser = house.browser()
        assert sign_in(browser, device).headers["location"] == "/console/"
        assert browser.get("/console/profile").status_code == 200
    removal = next(part for part in html.unescape(profile).split('"') if part.endswith("/remove"))
    assert submit(owner, "/console/profile", removal).status_code == 303
    left = owner.get("/console/profile").text
    assert ("laptop" in left) + ("phone" in left) == 1
    gone = device if "laptop" not in left else None
    if gone is not None:
        assert sign_in(house.browser(), gone).status_code == 403


def test_an_answer_is_accepted_once_soon_and_in_the_browser_that_asked(house: House, device: Authenticator) -> None:
    add(house.member(), device)
    browser = house.browser()
    form = prepared(browser, device)
    assert house.browser().post(f"{SIGN_IN}/passkey", data=form).status_code == 403
    assert browser.post(f"{SIGN_IN}/passkey", data=form).status_code == 303
    again = house.browser()
    again.cookies.set("console_visit", browser.cookies["console_visit"], domain=HOST, path="/console")
    assert again.post(f"{SIGN_IN}/passkey", data=form).status_code == 403
    late = house.browser()
    form = prepared(late, device)
    house.clock.now += CHALLENGE_S + 1
    assert late.post(f"{SIGN_IN}/passkey", data=form).status_code == 403


def test_an_answer_for_another_site_or_without_its_user_is_refused(house: House, device: Authenticator) -> None:
    owner = house.member()
    add(owner, device)
    elsewhere = Authenticator("https://evil.example", HOST)
    assert add(owner, elsewhere).status_code == 422
    device.origin = "https://evil.example"
    assert sign_in(house.browser(), device).status_code == 403
    device.origin, device.flags = ORIGIN, PRESENT
    assert sign_in(house.browser(), device).status_code == 403
    stranger = Authenticator(ORIGIN, HOST)
    stranger.passkey_id = device.passkey_id
    assert sign_in(house.browser(), stranger).status_code == 403
    assert sign_in(house.browser(), Authenticator(ORIGIN, HOST)).status_code == 403
    for wrong in ("", "[]", "{}", "nonsense"):
        browser = house.browser()
        form = prepared(browser, device) | {"credential": wrong}
        assert browser.post(f"{SIGN_IN}/passkey", data=form).status_code in (403, 422)


def test_a_copied_device_whose_count_does_not_grow_is_refused(house: House, device: Authenticator) -> None:
    add(house.member(), device)
    assert sign_in(house.browser(), device).status_code == 303
    device.count = 0
    assert sign_in(house.browser(), device).status_code == 403


def owner_session(house: House, user_id: str) -> str:
    [session] = house.ledger.run(people.ListSessions(user_id))
    return session.session_id


def test_an_open_session_alone_adds_no_passkey_and_a_suspended_person_uses_none(
    house: House, device: Authenticator
) -> None:
    owner = house.member()
    assert add(owner, device, password="wrong").status_code == 403
    assert add(owner, device).status_code == 303
    person = house.ledger.run(people.FindPerson("ada@example.org"))
    assert person is not None
    house.ledger.run(people.ChangePerson(person.user_id, {"password": ""}, owner_session(house, person.user_id)))
    house.clock.now += FRESH_S + 1
    assert add(owner, Authenticator(ORIGIN, HOST)).status_code == 403, "of a person without a password, too"
    house.ledger.run(people.SuspendPerson("ada@example.org", True))
    assert sign_in(house.browser(), device).status_code == 403


def test_an_answer_that_is_nested_without_end_is_refused(house: House) -> None:
    browser = house.browser()
    found = asked(browser.get(SIGN_IN).text)
    found.pop("options")
    assert browser.post(f"{SIGN_IN}/passkey", data={**found, "credential": "[" * 20000}).status_code == 422


def test_an_address_that_is_a_number_offers_no_passkeys_and_says_what_to_open(house: House) -> None:
    browser = house.member()
    host = {"host": "127.0.0.1:8000"}
    page = browser.get(PAGE, headers=host).text
    hint = "Passkeys can't be added at an IP address"
    assert hint in browser.get("/console/profile", headers=host).text
    assert hint not in browser.get("/console/profile").text
    assert "http://localhost:8000/console" in page
    assert "data-passkey" not in house.browser().get(SIGN_IN, headers=host).text
