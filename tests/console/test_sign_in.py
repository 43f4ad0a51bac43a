"""Tests that a sign-in proves the identity, and that a session is new, hidden from scripts, and ends when it should."""

from __future__ import annotations

import html
import re

import httpx
import pyotp
import pytest
from starlette.testclient import TestClient

from serve_app.console import passwords, web
from serve_app.console.attempts import OF_CODES, OF_EMAIL, OF_SIGNED_IN, WINDOW_S
from serve_app.console.people_pages import HALF_S, MAX_WAITING
from serve_app.contracts import people
from serve_app.storage.sealing import SecretKeys

from .conftest import CSRF, PASSWORD, House, submit

EMAIL = "ada@example.org"
SIGN_IN = "/console/sign-in"
CODES = "/console/profile/codes"


def sign_in(house: House, browser, email: str = EMAIL, password: str = PASSWORD, **more: str):  # type: ignore[no-untyped-def]
    return submit(browser, SIGN_IN, SIGN_IN, email=email, password=password, **more)


def test_an_invitation_leads_to_the_overview_and_opens_once(house: House) -> None:
    browser = house.member()
    page = browser.get(browser.get("/console/").headers["location"])
    assert "$5.00" in page.text
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
    prefix, path = ("__Host-", "Path=/;") if scheme == "https" else ("", "Path=/console;")
    [cookie] = [one for one in answer.headers.get_list("set-cookie") if one.startswith(f"{prefix}console_session=")]
    assert "planted" not in cookie
    for flag in ("HttpOnly", "SameSite=lax", path):
        assert flag in cookie
    assert "Domain" not in cookie
    assert ("Secure" in cookie) == (scheme == "https")
    out = submit(browser, "/console/profile", "/console/sign-out")
    assert out.headers["location"] == SIGN_IN
    assert browser.get("/console/profile").status_code == 303


def test_over_https_a_session_that_another_host_or_plain_http_could_set_opens_nothing(house: House) -> None:
    browser = house.member()
    stolen = browser.cookies["console_session"]
    other = house.browser("https")
    other.cookies.set("console_session", stolen, domain="console.test", path="/")
    assert other.get("/console/profile").status_code == 303
    other.cookies.set("__Host-console_session", stolen, domain="console.test", path="/")
    assert other.get("/console/profile").status_code == 200


def test_wrong_sign_ins_are_all_told_the_same(house: House) -> None:
    house.member()
    pages = [
        sign_in(house, house.browser(), email, password)
        for email, password in ((EMAIL, "wrong"), ("nobody@example.org", PASSWORD))
    ]
    assert {page.status_code for page in pages} == {403}
    assert all("Email or password is wrong." in page.text for page in pages)


@pytest.mark.parametrize("trusted_proxies", [0, 1])
def test_guessing_slows_new_browsers_and_not_the_persons_own(house: House, trusted_proxies: int) -> None:
    """Anybody can try an address. That must not keep its person out."""
    house.console.trusted_proxies = trusted_proxies
    own, guesser = house.member(), house.browser()
    if trusted_proxies:
        guesser.headers["x-forwarded-for"] = "203.0.113.9"
    submit(own, "/console/profile", "/console/sign-out")
    while (answer := sign_in(house, guesser, password="wrong")).status_code == 403:
        pass
    assert answer.status_code == 429
    assert "Too many attempts: try again in" in answer.text
    assert sign_in(house, own, password="a typing error").status_code == 403
    assert sign_in(house, own).status_code == 303
    if trusted_proxies:
        assert sign_in(house, house.browser()).status_code == 303, "from elsewhere, also a new browser"
    assert sign_in(house, guesser).status_code == 429
    house.clock.now += WINDOW_S / OF_EMAIL if not trusted_proxies else WINDOW_S
    assert sign_in(house, guesser, password="wrong").status_code == 403, "it is never locked out for good"


def test_a_flood_of_sign_ins_does_not_delay_people_at_known_browsers(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = house.member()
    monkeypatch.setattr(passwords.UNKNOWN, "waiting", MAX_WAITING)
    refused = sign_in(house, house.browser())
    assert (refused.status_code, "try again in a moment" in refused.text) == (503, True)
    submit(own, "/console/profile", "/console/sign-out")
    assert sign_in(house, own).status_code == 303


def test_a_session_confirms_few_passwords_and_one_that_is_not_signed_in_uses_none_of_them_up(house: House) -> None:
    browser = house.member()
    for _ in range(OF_EMAIL):
        sign_in(house, house.browser(), password="wrong")
    profile, fields = "/console/profile", {"new_password": PASSWORD, "password": "wrong"}
    for _ in range(OF_SIGNED_IN):
        assert submit(browser, profile, f"{profile}/password", **fields).status_code == 403
    assert submit(browser, profile, f"{profile}/password", **fields).status_code == 429


def test_forms_and_pages_of_a_person_have_a_rate_and_other_peoples_go_on(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "FORMS_PER_MINUTE", 6)
    monkeypatch.setattr(web, "PAGES_PER_MINUTE", 12)
    ada, ben = house.member(), house.member("ben@example.org")
    path = f"/console/accounts/{house.account_id}/keys"
    found = CSRF.search(ada.get(path).text)
    assert found is not None
    assert {ada.post(path, data={"csrf": "0" * 64}).status_code for _ in range(7)} == {403}, "forged: not counted"
    fields = {"csrf": found[1], "name": "x"}
    assert [ada.post(path, data=fields).status_code for _ in range(7)] == [201] * 6 + [429]
    assert submit(ben, path, path, name="y").status_code == 201
    house.clock.now += 60 / 6
    assert ada.post(path, data=fields).status_code == 201
    assert [ada.get("/console/profile").status_code for _ in range(13)][-1] == 429
    assert ada.get(SIGN_IN).status_code == 303


def test_a_person_whom_an_operator_has_reset_chooses_a_new_password_once(house: House) -> None:
    browser = house.member()
    turn_on_codes(house, browser)
    token = f"{'YWRhQGV4YW1wbGUub3Jn'}.{'t' * 43}"  # the address in base64url, without padding
    text = people.reset_text(token, house.clock.now + 3600)
    house.ledger.run(people.ResetPerson(EMAIL.upper(), text))
    assert browser.get("/console/profile").status_code == 303, "its sessions have ended"
    for password in (PASSWORD, text, "the password of nobody"):
        assert sign_in(house, house.browser(), password=password).status_code == 403
    path, new = f"/console/reset/{token}", "another long enough one"
    for wrong in ("x", "YWRhQGV4YW1wbGUub3Jn.x", f"bm9ib2R5.{'t' * 43}", "%FF.x", "a.b"):
        assert house.browser().get(f"/console/reset/{wrong}").status_code == 404
    other = house.browser()
    assert "An operator of this service made this link" in other.get(path).text
    assert submit(other, path, path, new_password="short").status_code == 422
    assert submit(other, path, path, new_password=new).headers["location"] == "/console/"
    assert other.get("/console/profile").status_code == 200
    assert house.browser().get(path).status_code == 404
    assert sign_in(house, house.browser(), password=new).status_code == 303, "and its codes are off"


@pytest.mark.parametrize("suspended", [True, False])
def test_a_link_to_reset_opens_nothing_later_or_for_a_person_who_is_suspended(house: House, suspended: bool) -> None:
    house.member()
    token = f"YWRhQGV4YW1wbGUub3Jn.{'t' * 43}"
    house.ledger.run(people.ResetPerson(EMAIL, people.reset_text(token, house.clock.now + 3600)))
    if suspended:
        house.ledger.run(people.SuspendPerson(EMAIL, True))
    else:
        house.clock.now += 3600
    assert house.browser().get(f"/console/reset/{token}").status_code == 404


def test_nothing_in_a_request_says_where_sign_in_leads(house: House) -> None:
    house.member()
    path = f"{SIGN_IN}?next=https://evil.example"
    answer = submit(house.browser(), path, path, email=EMAIL, password=PASSWORD, next="https://evil.example")
    assert answer.headers["location"] == "/console/"


HALF = re.compile(r'name="half" value="([^"]+)"')
RECOVERY = re.compile(r"[0-9a-z]{4}(?:-[0-9a-z]{4}){3}")


def turn_on_codes(house: House, browser: TestClient) -> tuple[str, list[str]]:
    """Turns one-time codes on. Returns the secret that the page shows, and the recovery codes."""
    page = browser.get(CODES)
    found = re.search(r'name="secret" value="([A-Z2-7]{32})"', page.text)
    assert found is not None
    fields = {"secret": found[1], "code": pyotp.TOTP(found[1]).at(house.clock.now), "password": PASSWORD}
    made = submit(browser, CODES, CODES, **fields)
    assert made.status_code == 200, made.text
    return found[1], RECOVERY.findall(made.text)


def sign_in_with(house: House, code: str, browser: TestClient | None = None) -> httpx.Response:
    """Signs in with the password and then with a code."""
    browser = browser or house.browser()
    first = sign_in(house, browser)
    half = HALF.search(first.text)
    assert half is not None
    assert first.status_code == 200
    assert "console_session" not in browser.cookies
    return submit(browser, SIGN_IN, SIGN_IN, half=html.unescape(half[1]), code=code)


def test_with_codes_on_a_password_alone_does_not_open_and_no_code_opens_twice(house: House) -> None:
    secret, _ = turn_on_codes(house, house.member())
    house.clock.now += 3 * passwords.STEP_S
    code = pyotp.TOTP(secret).at(house.clock.now)
    for wrong in ("", "ü", "000000"):
        assert sign_in_with(house, wrong).status_code == 403
    assert sign_in_with(house, code).status_code == 303
    assert sign_in_with(house, code).status_code == 403
    house.console.secret_keys = SecretKeys(b"another secret key")
    house.clock.now += WINDOW_S
    assert sign_in_with(house, code).status_code == 503


@pytest.mark.parametrize(("drift", "is_good"), [(-2, False), (-1, True), (0, True), (1, True), (2, False)])
def test_a_phone_may_be_one_step_before_or_after_the_service(house: House, drift: int, is_good: bool) -> None:
    secret, _ = turn_on_codes(house, house.member())
    house.clock.now += 3 * passwords.STEP_S
    code = pyotp.TOTP(secret).at(house.clock.now + drift * passwords.STEP_S)
    assert sign_in_with(house, code).status_code == (303 if is_good else 403)


def test_a_code_needs_a_right_password_in_the_same_browser_a_short_time_before(house: House) -> None:
    secret, _ = turn_on_codes(house, house.member())

    def code() -> str:
        return pyotp.TOTP(secret).at(house.clock.now)

    browser, other = house.browser(), house.browser()
    half = HALF.search(sign_in(house, browser).text)
    assert half is not None
    stolen = {"half": html.unescape(half[1]), "code": code()}
    assert submit(other, SIGN_IN, SIGN_IN, **stolen).status_code == 403
    assert submit(browser, SIGN_IN, SIGN_IN, half="x", code=code()).status_code == 403
    house.clock.now += HALF_S + 1
    late = submit(browser, SIGN_IN, SIGN_IN, **stolen | {"code": code()})
    assert (late.status_code, "took too long" in late.text) == (403, True)
    assert sign_in_with(house, code()).status_code == 303


def test_a_recovery_code_opens_once_and_they_are_shown_once(house: House) -> None:
    browser = house.member()
    _, codes = turn_on_codes(house, browser)
    assert len(set(codes)) == 10
    assert sign_in_with(house, codes[0].upper().replace("-", " ")).status_code == 303
    assert sign_in_with(house, codes[0]).status_code == 403
    profile = browser.get("/console/profile").text
    assert "9 recovery codes" in profile
    assert not RECOVERY.findall(profile)
    renewed = submit(browser, "/console/profile", f"{CODES}/recovery", password=PASSWORD)
    newer = RECOVERY.findall(renewed.text)
    assert sign_in_with(house, codes[1]).status_code == 403
    assert sign_in_with(house, newer[1]).status_code == 303
    assert submit(browser, "/console/profile", f"{CODES}/recovery", password="wrong").status_code == 403


def test_codes_are_few(house: House) -> None:
    turn_on_codes(house, house.member())
    answers = [sign_in_with(house, "000000").status_code for _ in range(OF_CODES + 1)]
    assert answers == [403] * OF_CODES + [429]


def test_the_secret_of_the_codes_is_a_picture_without_a_style_that_the_policy_refuses(house: House) -> None:
    browser = house.member()
    page = browser.get(CODES).text
    assert "<svg" in page
    assert " style=" not in page
    fields = {"secret": "A" * 32, "code": "000000", "password": PASSWORD}
    wrong = submit(browser, CODES, CODES, **fields)
    assert (wrong.status_code, 'value="' + "A" * 32 in wrong.text) == (422, True), "the app keeps its entry"
    assert submit(browser, CODES, CODES, **fields | {"password": "wrong"}).status_code == 403


def test_a_person_signs_out_the_other_sessions_and_keeps_this_one(house: House) -> None:
    first, here = house.member(), house.browser()
    sign_in(house, here)
    stranger = house.member("bob@example.org")
    assert "Sign out other sessions" in here.get("/console/profile").text
    assert submit(here, "/console/profile", "/console/profile/sessions/end-others").status_code == 303
    assert [one.get("/console/profile").status_code for one in (first, here, stranger)] == [303, 200, 200]
    assert "Sign out other sessions" not in here.get("/console/profile").text


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
    assert answer.status_code == 404
    assert "There is no such page." in answer.text
    assert 'href="/console/"' in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_what_a_shared_cache_may_keep_sets_no_cookie(house: House) -> None:
    for name in ("console.css", "playground.js", "tabler.min.css", "brand.css"):
        answer = house.browser().get(f"/console/static/{name}")
        assert answer.headers["cache-control"] == "no-cache"
        assert "set-cookie" not in answer.headers
    assert "set-cookie" in house.browser().get(SIGN_IN).headers
