"""Tests of sign-in through a provider: it names the person, e-mail finds nobody, and no token is trusted unchecked."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

import httpx
import pytest
from joserfc.jwk import OctKey
from starlette.testclient import TestClient

from serve_app.console.openid import OpenId
from serve_app.contracts.people import FindPerson, SuspendPerson
from serve_app.settings import OpenIdSettings

from .conftest import PASSWORD, House, submit
from .openid_provider import CLIENT, SECRET, Provider, key

PROFILE = "/console/profile"


@pytest.fixture
def provider(house: House) -> Iterator[Provider]:
    made = Provider(house.clock)
    settings = OpenIdSettings(issuer=made.issuer, client_id=CLIENT, name="Ada's house")
    house.console.openid = OpenId(settings, SECRET, house.clock)
    yield made
    made.close()


def leads_to(page: httpx.Response) -> str:
    """Returns the address to which the page sends the browser."""
    found = re.search(r'http-equiv="refresh" content="0; url=([^"]*)"', page.text)
    assert found is not None, page.text
    return html.unescape(found[1])


def sign_in(browser: TestClient, provider: Provider) -> httpx.Response:
    return browser.get(provider.sign_in(leads_to(browser.get("/console/sign-in/openid"))))


def link(browser: TestClient, provider: Provider, password: str = PASSWORD) -> httpx.Response:
    page = submit(browser, PROFILE, f"{PROFILE}/openid", password=password)
    return browser.get(provider.sign_in(leads_to(page))) if page.status_code == 200 else page


def test_who_has_linked_it_signs_in_with_it_until_it_is_unlinked(house: House, provider: Provider) -> None:
    member = house.member()
    assert sign_in(house.browser(), provider).status_code == 403
    assert link(member, provider, "wrong").status_code == 403
    assert link(member, provider).headers["location"] == PROFILE
    assert link(member, provider).status_code == 303
    browser = house.browser()
    assert "Ada&#39;s house" in browser.get("/console/sign-in").text
    assert sign_in(browser, provider).headers["location"] == "/console/"
    assert "ada@example.org" in browser.get(PROFILE).text
    assert [one.action for one in house.ledger.audit_log()].count("link_identity") == 1
    assert submit(member, PROFILE, f"{PROFILE}/openid/off", password=PASSWORD).status_code == 303
    assert sign_in(house.browser(), provider).status_code == 403


def test_an_invitation_is_accepted_with_it_and_makes_a_person_without_a_password(
    house: House, provider: Provider
) -> None:
    path, browser = house.invite("bob@example.org", "member"), house.browser()
    page = submit(browser, path, f"{path}/openid")
    assert path.rpartition("/")[2] not in leads_to(page)
    assert browser.get(provider.sign_in(leads_to(page))).headers["location"] == "/console/"
    person = house.ledger.run(FindPerson("bob@example.org"))
    assert person is not None
    assert (person.name, person.password, person.roles) == ("Ada L.", "", {house.account_id: "member"})
    assert browser.get(path).status_code == 404
    assert sign_in(house.browser(), provider).status_code == 303
    for password in ("", "the password of nobody", PASSWORD):
        fields = {"email": "bob@example.org", "password": password}
        answer = submit(house.browser(), "/console/sign-in", "/console/sign-in", **fields)
        assert answer.status_code == 403
    assert submit(browser, PROFILE, f"{PROFILE}/openid/off", password="").status_code == 403
    assert "You sign in with" in browser.get(PROFILE).text
    again = house.invite("carl@example.org")
    page = submit(house.browser(), again, f"{again}/openid")
    assert page.status_code == 200


def test_an_identity_opens_for_one_person_alone_and_for_nobody_who_is_suspended(
    house: House, provider: Provider
) -> None:
    link(house.member(), provider)
    assert link(house.member("bob@example.org"), provider).status_code == 422
    path, browser = house.invite("carl@example.org"), house.browser()
    page = submit(browser, path, f"{path}/openid")
    assert browser.get(provider.sign_in(leads_to(page))).status_code == 409
    house.ledger.run(SuspendPerson("ada@example.org", True))
    assert sign_in(house.browser(), provider).status_code == 403


def test_nobody_is_found_by_an_e_mail_address(house: House, provider: Provider) -> None:
    house.member()
    provider.claims |= {"email": "ada@example.org", "email_verified": True}
    assert sign_in(house.browser(), provider).status_code == 403


WRONG: list[dict[str, object]] = [
    {"iss": "https://another.example"},
    {"aud": "another client"},
    {"aud": "another client", "azp": CLIENT},
    {"aud": [CLIENT, "another"], "azp": "another"},
    {"nonce": "another"},
    {"nonce": None},
    {"exp": 1},
    {"sub": ""},
    {"sub": "x" * 501},
    {"sub": "a\x00"},
]


def test_a_token_that_is_not_for_this_sign_in_opens_nothing(house: House, provider: Provider) -> None:
    path, right = house.invite("bob@example.org"), provider.claims
    for claims in WRONG:
        browser = house.browser()
        provider.claims = right | claims
        page = submit(browser, path, f"{path}/openid")
        assert browser.get(provider.sign_in(leads_to(page))).status_code in (403, 422), claims
        assert house.ledger.run(FindPerson("bob@example.org")) is None, claims


@pytest.mark.parametrize("forged", ["another key", "symmetric"])
def test_a_token_that_the_provider_has_not_signed_opens_nothing(house: House, provider: Provider, forged: str) -> None:
    link(house.member(), provider)
    if forged == "another key":
        provider.key = key("second")
    else:
        provider.algorithm, provider.key = "HS256", OctKey.import_key(SECRET, {"kid": "one"})
    assert sign_in(house.browser(), provider).status_code == 403


def test_a_new_key_of_the_provider_is_taken(house: House, provider: Provider) -> None:
    link(house.member(), provider)
    provider.key = key("second")
    provider.keys = [provider.key]
    assert sign_in(house.browser(), provider).status_code == 303


def test_what_another_browser_began_or_what_is_old_or_used_ends_nowhere(house: House, provider: Provider) -> None:
    link(house.member(), provider)
    browser, other = house.browser(), house.browser()
    other.get("/console/sign-in")
    back = provider.sign_in(leads_to(browser.get("/console/sign-in/openid")))
    assert other.get(back).status_code == 403
    assert browser.get(back).status_code == 303
    assert house.browser().get(back).status_code == 403
    late = house.browser()
    back = provider.sign_in(leads_to(late.get("/console/sign-in/openid")))
    house.clock.now += 601
    assert late.get(back).status_code == 403
    for query in ("", "?state=x&code=y", "?state=sealed:&code=y", "?code=y", '?state=["sign in","",0,""]&code=y'):
        assert late.get(f"/console/sign-in/openid/return{query}").status_code == 403


def test_a_link_that_was_begun_by_another_session_links_nothing(house: House, provider: Provider) -> None:
    """Or else an attacker's identity would open the account of who follows a link."""
    attacker, victim = house.member("eve@example.org"), house.member()
    page = submit(attacker, PROFILE, f"{PROFILE}/openid", password=PASSWORD)
    assert victim.get(provider.sign_in(leads_to(page))).status_code == 403
    person = house.ledger.run(FindPerson("ada@example.org"))
    assert person is not None
    assert person.issuers == ()


def test_a_provider_that_is_away_or_another_s_is_said_so(house: House, provider: Provider) -> None:
    link(house.member(), provider)
    browser = house.browser()
    back = provider.sign_in(leads_to(browser.get("/console/sign-in/openid")))
    provider.is_away = True
    assert browser.get(back).status_code in (403, 503)
    settings = OpenIdSettings(issuer=provider.issuer, client_id=CLIENT)
    house.console.openid = OpenId(settings, SECRET, house.clock)
    assert house.browser().get("/console/sign-in/openid").status_code == 503
    provider.is_away, provider.issuer = False, "https://another.example"
    assert house.browser().get("/console/sign-in/openid").status_code == 403


def test_without_a_provider_there_is_no_such_sign_in(house: House) -> None:
    assert "openid" not in house.browser().get("/console/sign-in").text
    assert house.browser().get("/console/sign-in/openid").status_code == 404
    assert house.browser().get("/console/sign-in/openid/return").status_code == 404
