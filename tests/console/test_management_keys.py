"""Owners make management keys on a page of their own; each is shown once, and revoked for good."""

from __future__ import annotations

import dataclasses
import logging
import re

import pytest

from serve_app.contracts.key_format import MANAGEMENT, digest, well_formed
from serve_app.contracts.management import (
    MAX_KEYS,
    CreateManagementKey,
    FindManagementKey,
    ListManagementKeys,
)

from .conftest import STRAY_SCRIPT, House, submit

SCRIPT = "<script>alert(1)</script>\"'"


def page(house: House) -> str:
    return f"/console/accounts/{house.account_id}/management-keys"


def made_key(text: str) -> str:
    found = re.search(r"mk-[0-9A-Za-z]{49}", text)
    assert found is not None
    assert well_formed(found[0], MANAGEMENT)
    return found[0]


def test_a_management_key_is_shown_once_and_revoked(house: House, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    browser, path = house.member(), page(house)
    made = submit(browser, path, path, name="robot", expires="2026-07-01")
    assert (made.status_code, made.headers["cache-control"]) == (201, "no-store")
    key = made_key(made.text)
    found = house.ledger.run(FindManagementKey(digest(key)))
    assert found is not None
    assert (found[0].name, found[1].account_id) == ("robot", house.account_id)
    assert found[0].expires_at == 1782950400.0  # the end of the day
    shown = browser.get(path).text
    assert found[0].hint in shown
    assert "Active" in shown
    assert 'title="1 Jun 2026, 12:00:00 UTC"' in shown
    assert 'title="2 Jul 2026, 00:00:00 UTC"' in shown
    records = house.ledger.audit_log()
    assert (records[0].actor, records[0].action) == ("ada@example.org", "create_management_key")
    assert (records[0].subject, records[0].account_id) == (found[0].key_id, house.account_id)
    for secret in (key, digest(key)):
        assert secret not in shown + caplog.text + repr([dataclasses.asdict(one) for one in records])
    for _ in range(2):
        assert submit(browser, path, f"{path}/{found[0].key_id}/revoke").status_code == 303
    [after] = house.ledger.run(ListManagementKeys(house.account_id))
    assert after.revoked_at == house.clock.now
    assert [one.action for one in house.ledger.audit_log()][:2] == ["revoke_management_key", "create_management_key"]
    assert "Revoked" in browser.get(path).text


def test_one_that_is_over_is_shown_as_expired(house: House) -> None:
    browser, path = house.member(), page(house)
    assert submit(browser, path, path, name="robot", expires="2026-06-01").status_code == 201
    house.clock.now += 43_200
    browser = house.member("eve@example.org")
    assert "Expired" in browser.get(path).text


def test_a_management_key_of_another_account_is_not_revoked(house: House) -> None:
    other = house.ledger.create_account("Bob's").account_id
    theirs = house.ledger.run(CreateManagementKey(other, "his", "0" * 64, "mk-…"))
    path = page(house)
    assert submit(house.member(), path, f"{path}/{theirs.key_id}/revoke").status_code == 404
    assert house.ledger.run(ListManagementKeys(other)) == [theirs]


def test_what_is_no_management_key_is_refused(house: House) -> None:
    browser, path = house.member(), page(house)
    for wrong in (
        {"name": ""},
        {"name": "x" * 101},
        {"expires": SCRIPT},
        {"expires": "2026-05-30"},
        {"expires": "1.7.2026"},
    ):
        assert submit(browser, path, path, **{"name": "robot", **wrong}).status_code == 422, wrong
    assert house.ledger.run(ListManagementKeys(house.account_id)) == []


def test_a_name_is_text_on_the_page(house: House) -> None:
    browser, path = house.member(), page(house)
    made = submit(browser, path, path, name=SCRIPT)
    assert made.status_code == 201
    for text in (made.text, browser.get(path).text):
        assert "&lt;script&gt;" in text
        assert not STRAY_SCRIPT.search(text)


def test_an_account_has_not_more_than_its_most(house: House) -> None:
    for number in range(MAX_KEYS):
        house.ledger.run(CreateManagementKey(house.account_id, "robot", f"{number:064x}", "mk-…"))
    browser, path = house.member(), page(house)
    answer = submit(browser, path, path, name="robot")
    assert (answer.status_code, "revoke one" in answer.text) == (422, True)
    [first, *_] = house.ledger.run(ListManagementKeys(house.account_id))
    assert submit(browser, path, f"{path}/{first.key_id}/revoke").status_code == 303
    assert submit(browser, path, path, name="robot").status_code == 201


@pytest.mark.parametrize(("role", "there"), [("owner", True), ("member", False), ("billing", False)])
def test_only_owners_see_the_page(house: House, role: str, there: bool) -> None:
    text = house.member(role=role).get(f"/console/accounts/{house.account_id}").text
    assert ("/management-keys" in text) is there
