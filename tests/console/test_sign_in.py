"""Tests that a sign-in proves the identity, and that a session is new, hidden from scripts, and ends when it should."""

from __future__ import annotations

import pyotp
import pytest

from serve_app.console.attempts import OF_ADDRESS, OF_EMAIL, WINDOW_S
from serve_app.storage.sealing import SecretKeys

from .conftest import CSRF, PASSWORD, House, submit

EMAIL = "ada@example.org"
SIGN_IN = "/console/sign-in"


def sign_in(house: House, browser, email: str = EMAIL, password: str = PASSWORD, **more: str):  # type: ignore[no-untyped-def]
    return submit(browser, SIGN_IN, SIGN_IN, email=email, password=password, **more)


def test_an_invitation_leads_to_the_overview_and_opens_once(house: House) -> None:
    browser = house.member()
    page = browser.get(browser.get("/console/").headers["location"])
    assert "5.00 USD" in page.text
    assert house.browser().get("/console/invitations/token-of-ada@example.org").status_code == 404
    out = submit(browser, "/console/profile", "/console/sign-out")
    assert out.headers["location"] == SIGN_IN
    assert browser.get("/console/profile").status_code == 303
    assert sign_in(house, browser).headers["location"] == "/console/"


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_session_is_new_at_sign_in_and_hidden_from_scripts(house: House, scheme: str) -> None:
    house.member()
    browser = house.browser(scheme)
    browser.cookies.set("console_session", "planted", domain="console.test", path="/console")
    answer = sign_in(house, browser)
    [cookie] = [one for one in answer.headers.get_list("set-cookie") if one.startswith("console_session=")]
    assert "planted" not in cookie
    for flag in ("HttpOnly", "SameSite=lax", "Path=/console"):
        assert flag in cookie
    assert ("Secure" in cookie) == (scheme == "https")


def test_wrong_sign_ins_are_all_told_the_same(house: House) -> None:
    house.member()
    pages = [
        sign_in(house, house.browser(), email, password)
        for email, password in ((EMAIL, "wrong"), ("nobody@example.org", PASSWORD))
    ]
    assert {page.status_code for page in pages} == {403}
    assert all("E-mail, password or code is wrong." in page.text for page in pages)


def test_guessing_stops_by_email_and_by_address_until_the_window_is_over(house: House) -> None:
    house.member()
    for _ in range(OF_EMAIL):
        assert sign_in(house, house.browser(), password="wrong").status_code == 403
    assert sign_in(house, house.browser()).status_code == 429
    for number in range(OF_ADDRESS - OF_EMAIL):
        assert house.console.attempts.begin("192.0.2.7", f"{number}@x")
    assert not house.console.attempts.begin("192.0.2.7", "another@x")
    house.clock.now += WINDOW_S
    assert sign_in(house, house.browser()).status_code == 303


def test_nothing_in_a_request_says_where_sign_in_leads(house: House) -> None:
    house.member()
    path = f"{SIGN_IN}?next=https://evil.example"
    answer = submit(house.browser(), path, path, email=EMAIL, password=PASSWORD, next="https://evil.example")
    assert answer.headers["location"] == "/console/"


def test_with_codes_on_a_password_alone_does_not_open_and_no_code_opens_twice(house: House) -> None:
    browser = house.member()
    secret = pyotp.random_base32()
    code = pyotp.TOTP(secret).at(house.clock.now)
    on = submit(browser, "/console/profile", "/console/profile/totp", secret=secret, code=code, password=PASSWORD)
    assert on.status_code == 303
    assert sign_in(house, house.browser()).status_code == 403
    assert sign_in(house, house.browser(), code="ü").status_code == 403
    assert sign_in(house, house.browser(), code=code).status_code == 303
    assert sign_in(house, house.browser(), code=code).status_code == 403
    house.console.secret_keys = SecretKeys(b"another secret key")
    assert sign_in(house, house.browser(), code=code).status_code == 503


def test_a_new_password_ends_the_other_sessions(house: House) -> None:
    browser, other = house.member(), house.browser()
    sign_in(house, other)
    changed = submit(
        browser, "/console/profile", "/console/profile/password", password=PASSWORD, new_password="another long one"
    )
    assert changed.status_code == 303
    assert other.get("/console/profile").status_code == 303
    assert browser.get("/console/profile").status_code == 200
    assert CSRF.search(browser.get("/console/profile").text) is not None


def test_what_is_no_page_is_404_with_the_same_headers(house: House) -> None:
    answer = house.browser().get("/console/nothing/here")
    assert (answer.status_code, answer.text) == (404, "There is no such page.\n")
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_what_a_shared_cache_may_keep_sets_no_cookie(house: House) -> None:
    for name in ("console.css", "playground.js", "copy.js"):
        answer = house.browser().get(f"/console/static/{name}")
        assert answer.headers["cache-control"] == "max-age=3600"
        assert "set-cookie" not in answer.headers
    assert "set-cookie" in house.browser().get(SIGN_IN).headers
