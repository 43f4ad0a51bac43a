"""A new key secret ends nobody's session, refuses no form or invitation, and loses no secret that was sealed."""

from __future__ import annotations

import re

import pyotp
import pytest

from serve_app.console.openid import OpenId
from serve_app.console.resealing import Resealing
from serve_app.contracts.key_format import KeySecrets, digest
from serve_app.contracts.key_secrets import ListSealed
from serve_app.contracts.notices import CreateAlert
from serve_app.contracts.people import FindPerson, InvitePerson
from serve_app.contracts.sealed import is_current, of_webhooks, seal, unseal
from serve_app.settings import OpenIdSettings

from .conftest import CSRF, PASSWORD, SECRET, House, submit
from .openid_provider import CLIENT, Provider
from .openid_provider import SECRET as CLIENT_SECRET
from .test_openid import leads_to
from .test_sign_in import EMAIL, sign_in

NEXT = b"the secret that follows it"
OLD, BOTH, NEW = KeySecrets(SECRET), KeySecrets(NEXT, SECRET), KeySecrets(NEXT)


def use(house: House, secrets: KeySecrets) -> None:
    """As a console that was restarted with them."""
    house.console.key_secrets = secrets


def test_a_session_goes_on_while_both_secrets_are_valid(house: House) -> None:
    browser = house.member()
    use(house, BOTH)
    assert browser.get("/console/profile").status_code == 200
    later = house.browser()
    assert sign_in(house, later).status_code == 303
    use(house, NEW)
    assert later.get("/console/profile").status_code == 200
    assert browser.get("/console/profile").status_code == 303  # it was of the secret before


def test_a_form_that_was_opened_before_is_taken(house: House) -> None:
    browser = house.member()
    found = CSRF.search(browser.get("/console/profile").text)
    assert found is not None
    form = {"csrf": found[1], "password": PASSWORD, "new_password": "another long one"}
    use(house, NEW)
    assert browser.post("/console/profile/password", data=form).status_code in (303, 401, 403)
    use(house, BOTH)
    assert browser.post("/console/profile/password", data=form | {"csrf": "0" * 64}).status_code == 403
    assert browser.post("/console/profile/password", data=form).headers["location"] == "/console/profile"
    assert sign_in(house, house.browser(), password="another long one").status_code == 303


def test_an_invitation_of_the_secret_before_is_accepted(house: House) -> None:
    path = house.invite(EMAIL)
    use(house, BOTH)
    browser = house.browser()
    accepted = submit(browser, path, path, name="Ada", new_password=PASSWORD)
    assert accepted.status_code == 303
    assert house.browser().get(path).status_code == 404


def test_an_invitation_of_the_secret_before_joins_a_further_account(house: House) -> None:
    browser, other = house.member(), house.ledger.create_account("Other").account_id
    digest_before, expires_at = house.console.digest("second"), house.clock.now + 3600
    house.ledger.run(InvitePerson(other, EMAIL, "billing", digest_before, expires_at))
    path = "/console/invitations/second"
    use(house, BOTH)
    assert submit(browser, path, f"{path}/join").status_code == 303
    person = house.ledger.run(FindPerson(EMAIL))
    assert person is not None
    assert person.roles[other] == "billing"


def test_a_sign_in_that_was_begun_before_ends_after(house: House) -> None:
    provider = Provider(house.clock)
    try:
        settings = OpenIdSettings(issuer=provider.issuer, client_id=CLIENT, name="Ada's house")
        house.console.openid = OpenId(settings, CLIENT_SECRET, house.clock)
        browser = house.member()
        page = submit(browser, "/console/profile", "/console/profile/openid", password=PASSWORD)
        back = provider.sign_in(leads_to(page))
        use(house, BOTH)
        assert browser.get(back).headers["location"] == "/console/profile"
    finally:
        provider.close()


def test_a_key_that_is_made_while_both_are_valid_is_found_under_both(house: House) -> None:
    browser, keys = house.member(), f"/console/accounts/{house.account_id}/keys"
    use(house, BOTH)
    page = submit(browser, keys, keys, name="laptop")
    found = re.search(r"sk-[0-9A-Za-z]{49}", page.text)
    assert found is not None
    for secret in (SECRET, NEXT):
        assert house.ledger.find_key(digest(found[0], secret)) is not None


async def test_sealed_secrets_are_sealed_anew_and_open_when_the_secret_before_is_gone(house: House) -> None:
    browser, secret = house.member(), pyotp.random_base32()
    code = pyotp.TOTP(secret).at(house.clock.now)
    on = submit(browser, "/console/profile", "/console/profile/totp", secret=secret, code=code, password=PASSWORD)
    assert on.status_code == 303
    webhook = seal("whsec", OLD, of_webhooks(house.account_id))
    house.ledger.run(CreateAlert(house.account_id, "day", 1, "https://example.org", webhook))
    resealing = Resealing(house.console.books, BOTH)
    assert await resealing.turn() == 2
    assert await resealing.turn() == 0
    listed, _ = house.ledger.run(ListSealed())
    assert all(is_current(one.stored, BOTH, one.purpose) for one in listed)
    assert [unseal(one.stored, OLD, one.purpose) for one in listed] == [secret, "whsec"]  # by a console of before
    use(house, NEW)
    assert sign_in(house, house.browser(), code=code).status_code == 303


async def test_what_neither_secret_opens_is_left_as_it_is(house: House, caplog: pytest.LogCaptureFixture) -> None:
    strange = seal("whsec", KeySecrets(b"a third secret"), of_webhooks(house.account_id))
    house.ledger.run(CreateAlert(house.account_id, "day", 1, "https://example.org", strange))
    assert await Resealing(house.console.books, BOTH).turn() == 0
    [listed], _ = house.ledger.run(ListSealed())
    assert listed.stored == strange
    assert "SERVE_APP_KEY_SECRET" in caplog.text


async def test_what_was_sealed_under_two_secrets_is_sealed_under_the_one_that_is_left(house: House) -> None:
    """Who has the secret before, and reads a later copy of the ledger, opens nothing."""
    webhook = seal("whsec", BOTH, of_webhooks(house.account_id))
    house.ledger.run(CreateAlert(house.account_id, "day", 1, "https://example.org", webhook))
    await Resealing(house.console.books, NEW).run()
    [listed], _ = house.ledger.run(ListSealed())
    assert unseal(listed.stored, NEW, listed.purpose) == "whsec"
    with pytest.raises(ValueError, match="does not open"):
        unseal(listed.stored, OLD, listed.purpose)
