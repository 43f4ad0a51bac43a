"""A key is shown once; what people type is text on every page."""

from __future__ import annotations

import dataclasses
import logging
import re

import pytest

from serve_app.contracts.calls import Unavailable
from serve_app.contracts.key_format import digest
from serve_app.contracts.limiting import AccountStatus
from serve_app.contracts.limits import Contract
from serve_app.contracts.people import FindPerson
from tests.accounting.books import NOON, settlement

from .conftest import PASSWORD, STRAY_SCRIPT, House, submit, words

SCRIPT = "<script>alert(1)</script>\"'"


def test_a_key_is_made_with_its_terms_shown_once_and_revoked(house: House, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    browser, path = house.member(), f"/console/accounts/{house.account_id}/keys"
    terms = {"model": "svc-chat", "rpm": "3", "budget": "2.50", "budget_period": "day", "expires": "2026-07-01"}
    terms |= {"tags": " team-a, batch ,", "addresses": "203.0.113.7, 10.0.0.0/8  2001:db8::/48"}
    made = submit(browser, path, path, name="laptop", **terms)
    assert made.status_code == 201
    key = re.search(r"sk-[0-9A-Za-z]{49}", made.text)[0]  # type: ignore[index]
    found = house.ledger.find_key(digest(key))
    assert found is not None
    assert (found[0].models, dict(found[0].limits), found[0].budget) == (("svc-chat",), {"rpm": 3}, 2_500_000_000)
    assert found[0].tags == ("team-a", "batch")
    assert found[0].addresses == ("203.0.113.7/32", "10.0.0.0/8", "2001:db8::/48")
    page = words(browser.get(path).text)
    assert "laptop team-a batch sk-" in page
    assert "Only from 203.0.113.7/32, 10.0.0.0/8, 2001:db8::/48" in page
    assert "no-store" in made.headers["cache-control"]
    assert key not in browser.get(path).text
    assert key not in caplog.text
    log = house.ledger.audit_log()
    assert key not in str([dataclasses.asdict(one) for one in log])
    assert (log[0].actor, log[0].action) == ("ada@example.org", "create_key")
    assert submit(browser, path, f"{path}/{found[0].key_id}/revoke").status_code == 303
    assert house.ledger.list_keys(house.account_id)[0].active is False


def test_a_keys_page_has_its_maker_its_spend_and_its_last_use(house: House) -> None:
    browser, path = house.member(), f"/console/accounts/{house.account_id}/keys"
    submit(browser, path, path, name="laptop")
    [key] = house.ledger.list_keys(house.account_id)
    by_operator = house.ledger.create_key(house.account_id, "old", digest("k"), "sk-…")
    used = [settlement("r1", house.account_id, key.key_id, started_at=NOON - 200, finished_at=NOON - 180)]
    house.ledger.settle([*used, settlement("r2", house.account_id, by_operator.key_id, finished_at=NOON - 3 * 86400)])
    listed = words(browser.get(path).text)
    assert "3 minutes ago" in listed
    assert "29 May 2026" in listed, "the day of a use before the last day"
    assert listed.partition("Separated by")[0].count(" by ") == 1, "an account does not see which operator made a key"
    page = browser.get(f"{path}/{key.key_id}").text
    assert "<title>laptop · " in page
    assert "Last used 3 minutes ago" in words(page)
    assert f'href="/console/accounts/{house.account_id}/requests?key={key.key_id}&amp;range=30d"' in page
    assert [f'action="{path}/{key.key_id}/{act}"' in page for act in ("rotate", "revoke")] == [True, True]
    old = f"{path}/{by_operator.key_id}"
    assert 'datetime="2026-05-29T12:00:00Z"' in browser.get(old).text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serve_app.accounting.usage.MAX_SEARCHED", 1)
        later = settlement("r3", house.account_id, key.key_id, finished_at=NOON - 3 * 86400 + 60)
        house.ledger.settle([later])
        assert "Last used 29 May 2026" in words(browser.get(old).text), "the day, if the search ends before its time"


def test_a_key_of_another_account_is_not_revoked(house: House) -> None:
    other = house.ledger.create_account("Bob's").account_id
    key = house.ledger.create_key(other, "his", digest("k"), "sk-…")
    path = f"/console/accounts/{house.account_id}/keys"
    assert submit(house.member(), path, f"{path}/{key.key_id}/revoke").status_code == 404
    assert house.ledger.list_keys(other)[0].active


def test_what_people_type_is_text_on_every_page(house: House) -> None:
    browser, invitation = house.browser(), house.invite("eve@example.org")
    assert submit(browser, invitation, invitation, name=SCRIPT, new_password=PASSWORD).status_code == 303
    person = house.ledger.run(FindPerson("eve@example.org"))
    assert person is not None
    assert person.name == SCRIPT
    path = f"/console/accounts/{house.account_id}"
    pages = [submit(browser, f"{path}/keys", f"{path}/keys", name=SCRIPT)]
    for field in ("model", "rpm", "budget", "budget_period", "expires", "addresses"):
        fields = {"name": "k", "budget": "1", field: SCRIPT}
        pages.append(submit(browser, f"{path}/keys", f"{path}/keys", **fields))
        assert pages[-1].status_code == 422, field
    key = house.ledger.list_keys(house.account_id)[0]
    assert key.name == SCRIPT
    house.ledger.update_key(key.key_id, tags=[SCRIPT])
    house.ledger.settle([settlement("r1", house.account_id, key.key_id)])
    house.ledger.credit(house.account_id, 1, kind="grant", memo=SCRIPT)
    sections = ("", "/keys", "/usage?by=key", "/requests?day=2026-06-01", "/billing", "/statements/2026-06", "/members")
    sections += ("/usage?by=tag",)
    pages += [browser.get(one) for one in (*(path + section for section in sections), "/console/profile")]
    assert [page.status_code for page in pages[-9:]] == [200] * 9
    assert sum("&lt;script&gt;" in page.text for page in pages[-9:]) == 9
    pages.append(submit(house.browser(), "/console/sign-in", "/console/sign-in", email=SCRIPT, password=SCRIPT))
    for page in pages:
        assert not STRAY_SCRIPT.search(page.text)
        assert "'unsafe" not in page.headers["content-security-policy"]
        assert page.headers["cache-control"] == "no-store"


def test_a_key_is_for_all_models_or_for_those_that_are_selected(house: House) -> None:
    browser, path = house.member(), f"/console/accounts/{house.account_id}/keys"
    made = {"all": {"any_model": "yes", "model": "svc-chat"}, "one": {"any_model": "no", "model": "svc-chat"}}
    for name, fields in made.items():
        assert submit(browser, path, path, name=name, **fields).status_code == 201
    assert {key.name: key.models for key in house.ledger.list_keys(house.account_id)} == {
        "all": None,
        "one": ("svc-chat",),
    }
    refused = submit(browser, path, path, name="none", any_model="no")
    assert (refused.status_code, "Select at least one model" in refused.text) == (422, True)
    assert re.search(r'value="no" checked', refused.text)


@pytest.mark.parametrize(("overlap", "seconds"), [("1 hour", 3600), ("7 days", 7 * 86400), ("0 minutes", 0)])
def test_a_key_is_rotated_and_the_old_one_ends_after_the_overlap(house: House, overlap: str, seconds: int) -> None:
    browser, path = house.member(), f"/console/accounts/{house.account_id}/keys"
    terms = {"model": "svc-chat", "rpm": "3", "budget": "2.50", "budget_period": "day"}
    terms |= {"tags": "ci, lab", "addresses": "10.0.0.0/8"}
    assert submit(browser, path, path, name="laptop", **terms).status_code == 201
    [old] = house.ledger.list_keys(house.account_id)
    made = submit(browser, path, f"{path}/{old.key_id}/rotate", overlap=overlap)
    assert made.status_code == 201
    key = re.search(r"sk-[0-9A-Za-z]{49}", made.text)[0]  # type: ignore[index]
    found = house.ledger.find_key(digest(key))
    assert found is not None
    assert (found[0].tags, found[0].addresses) == (("ci", "lab"), ("10.0.0.0/8",))
    named = ("name", "models", "limits", "budget", "budget_period", "tags", "addresses")
    assert [getattr(found[0], name) for name in named] == [getattr(old, name) for name in named]
    assert (found[0].expires_at, found[0].active) == (None, True)
    [after] = [one for one in house.ledger.list_keys(house.account_id) if one.key_id == old.key_id]
    assert (after.active, after.expires_at) == ((True, house.clock.now + seconds) if seconds else (False, None))
    again = submit(browser, path, f"{path}/{old.key_id}/rotate", overlap="for ever")
    assert again.status_code == 422
    assert len(house.ledger.list_keys(house.account_id)) == 2


def test_the_playground_has_one_key_a_person_for_an_hour(house: House) -> None:
    browser, path = house.member(), f"/console/accounts/{house.account_id}/playground"
    page = browser.get(path)
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert '<option value="/chat/completions">Chat completions (/v1/chat/completions)</option>' in page.text
    first, second = (submit(browser, path, f"{path}/key").json()["key"] for _ in range(2))
    assert first != second
    gone, there = sorted(house.ledger.list_keys(house.account_id), key=lambda one: one.active)
    assert (gone.active, there.active, there.expires_at) == (False, True, house.clock.now + 3600)
    assert there.name == "Playground of ada@example.org"
    house.ledger.settle([settlement("chatcmpl-1", house.account_id, there.key_id)])
    assert browser.get(f"{path}/requests/chatcmpl-1").json() == {"charged": "0.000000046"}
    other = house.ledger.create_account("Bob's").account_id
    stranger = house.member("bob@example.org", account_id=other)
    assert stranger.get(f"/console/accounts/{other}/playground/requests/chatcmpl-1").status_code == 404


def test_the_overview_shows_the_limits_that_apply_and_why_they_are_lower_now(house: House) -> None:
    browser, path = house.member(), f"/console/accounts/{house.account_id}"
    page = words(browser.get(path).text)
    assert "Requests per minute the service's default" in page
    assert "held for running" not in page
    assert "Error rate" not in page
    house.ledger.set_limits(house.account_id, tpm=7)
    contract = Contract(rpm=11, tpm=22, concurrency=33)
    house.status = AccountStatus(house.account_id, 250_000_000, 2, contract, pressed=(("smollm2", 5),))
    page = words(browser.get(path).text)
    limits = ("Requests per minute 0 of 11", "Tokens per minute 0 of 7", "Concurrent requests 2 of 33")
    assert [one in page for one in limits] == [True] * 3
    assert "$0.25 held for running requests" in page
    assert "smollm2 is busy, so this account may use 5 tokens per minute there" in page


@pytest.mark.parametrize("role", ["owner", "member", "billing"])
def test_the_quick_start_has_the_visitors_own_address_and_only_links_that_open(house: House, role: str) -> None:
    browser = house.member(role=role)
    root = f"/console/accounts/{house.account_id}"
    browser.cookies.set("__Host-console_session", browser.cookies["console_session"], domain="console.test", path="/")
    page = browser.get(f"{root}/docs", headers={"host": "api.example.org", "x-forwarded-proto": "https"})
    assert page.text.count("https://api.example.org/v1") >= 5
    assert "svc-chat or svc-coder" in page.text
    links = re.findall(rf'href="({root}[^"]*)"', page.text)
    assert [browser.get(link).status_code for link in links] == [200] * len(links)
    assert (f"{root}/keys" in links) == (role != "billing")
    assert (f"{root}/management-keys" in links) == (role == "owner")


def test_the_quick_start_is_there_while_the_gateway_is_not(house: House) -> None:
    async def away() -> list[str]:
        raise Unavailable("the gateway restarts")

    house.console.models = away
    page = house.member().get(f"/console/accounts/{house.account_id}/docs")
    assert (page.status_code, "no models are available" in page.text) == (200, True)
