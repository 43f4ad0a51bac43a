"""The page of an account's errors, as its members see it."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.contracts.commands import RevokeKey
from serve_app.contracts.units import utc_text
from tests.accounting.books import NOON

from .conftest import House, words

HINT = "Allow the model in the key's settings"


def not_allowed(key: str, model: str = "svc-chat") -> dict[str, Any]:
    """A line of the request log."""
    found = {"time": utc_text(NOON - 60, "milliseconds"), "status": 422, "code": "model_not_found", "reason": None}
    return found | {"model": model, "key": key, "request_id": "r1"}


@pytest.mark.parametrize("role", ["owner", "member", "billing"])
def test_a_model_that_a_key_may_not_use_leads_to_the_keys_settings(house: House, role: str) -> None:
    path, browser = f"/console/accounts/{house.account_id}", house.member(role=role)
    made = house.ledger.create_key(house.account_id, "laptop", "0" * 64, "sk-…", models=("svc-coder",))
    link = f'href="{path}/keys/{made.key_id}">{HINT}</a>'
    for line, is_shown in (
        (not_allowed(made.key_id), True),
        (not_allowed(made.key_id, "none"), False),  # a model that does not exist
        (not_allowed(made.key_id, "svc-coder"), False),  # allowed since then
        (not_allowed("key_of_before"), False),
        (not_allowed(made.key_id) | {"code": "context_length_exceeded"}, False),
    ):
        house.answers["refusals"] = {"lines": [line], "is_complete": True}
        page = browser.get(f"{path}/errors").text
        assert (link in page) == (is_shown and role != "billing"), line
    house.answers["refusals"] = {"lines": [not_allowed(made.key_id)], "is_complete": True}
    assert browser.get(f"{path}/keys/{made.key_id}").status_code == (403 if role == "billing" else 200)
    house.ledger.run(RevokeKey(made.key_id))
    assert HINT not in browser.get(f"{path}/errors").text


def test_a_search_that_was_cut_claims_no_whole_day(house: House) -> None:
    path, browser = f"/console/accounts/{house.account_id}/errors", house.member()
    house.answers["refusals"] = {"lines": [], "is_complete": False}
    page = words(browser.get(path).text)
    assert "The latest part of the log has no errors." in page
    assert "No request of this account" not in page
    house.answers["refusals"] = {"lines": [not_allowed("k1")], "is_complete": False}
    assert "Of the latest 1: 1 rejected (4xx), 0 failed (5xx)" in words(browser.get(path).text)
