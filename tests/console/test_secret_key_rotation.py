"""Replacing the secret key ends no session or sign-in, refuses no open form, and loses no sealed secret."""

from __future__ import annotations

import pyotp
import pytest

from serve_app.console.openid import OpenId
from serve_app.console.passwords import STEP_S
from serve_app.console.resealing import Resealing
from serve_app.contracts.notices import CreateAlert
from serve_app.contracts.sealed_secrets import ListSealed
from serve_app.settings import OpenIdSettings
from serve_app.storage.sealing import SecretKeys, is_current, of_webhooks, seal, unseal

from .conftest import CSRF, PASSWORD, SECRET, House, submit
from .openid_provider import CLIENT, Provider
from .openid_provider import SECRET as CLIENT_SECRET
from .test_openid import leads_to
from .test_sign_in import sign_in, sign_in_with, turn_on_codes

NEXT = b"the secret that follows it"
OLD, BOTH, NEW = SecretKeys(SECRET), SecretKeys(NEXT, SECRET), SecretKeys(NEXT)


def use(house: House, secrets: SecretKeys) -> None:
    """As a console that was restarted with them."""
    house.console.secret_keys = secrets


def test_a_session_goes_on(house: House) -> None:
    browser = house.member()
    use(house, NEW)
    assert browser.get("/console/profile").status_code == 200


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


async def test_sealed_secrets_are_sealed_anew_and_open_when_the_secret_before_is_gone(house: House) -> None:
    secret, _ = turn_on_codes(house, house.member())
    code = pyotp.TOTP(secret).at(house.clock.now + STEP_S)
    webhook = seal("whsec", OLD, of_webhooks(house.account_id))
    house.ledger.run(CreateAlert(house.account_id, "day", 1, "https://example.org", webhook))
    resealing = Resealing(house.console.books, BOTH)
    assert await resealing.turn() == 2
    assert await resealing.turn() == 0
    listed, _ = house.ledger.run(ListSealed())
    assert all(is_current(one.stored, BOTH, one.purpose) for one in listed)
    assert [unseal(one.stored, OLD, one.purpose) for one in listed] == [secret, "whsec"]  # by a console of before
    use(house, NEW)
    assert sign_in_with(house, code).status_code == 303


async def test_what_neither_secret_opens_is_left_as_it_is(house: House, caplog: pytest.LogCaptureFixture) -> None:
    strange = seal("whsec", SecretKeys(b"a third secret"), of_webhooks(house.account_id))
    house.ledger.run(CreateAlert(house.account_id, "day", 1, "https://example.org", strange))
    assert await Resealing(house.console.books, BOTH).turn() == 0
    [listed], _ = house.ledger.run(ListSealed())
    assert listed.stored == strange
    assert "SERVE_APP_SECRET_KEY" in caplog.text


async def test_what_was_sealed_under_two_secrets_is_sealed_under_the_one_that_is_left(house: House) -> None:
    """Checks that the previous secret opens nothing in a later copy of the ledger."""
    webhook = seal("whsec", BOTH, of_webhooks(house.account_id))
    house.ledger.run(CreateAlert(house.account_id, "day", 1, "https://example.org", webhook))
    await Resealing(house.console.books, NEW).run()
    [listed], _ = house.ledger.run(ListSealed())
    assert unseal(listed.stored, NEW, listed.purpose) == "whsec"
    with pytest.raises(ValueError, match="does not open"):
        unseal(listed.stored, OLD, listed.purpose)
