"""The page of an account says why requests were refused or failed, who may use it, and what operators know of it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from serve_app.console.key_names import playground_name
from serve_app.contracts.limiting import AccountStatus
from serve_app.contracts.limits import Contract
from serve_app.contracts.units import utc_text
from tests.accounting.books import NOON

from .conftest import House, cells, chart, operator, submit, words

MINUTE = 60.0


def line(seconds_ago: float, status: int = 429, **more: Any) -> dict[str, Any]:
    reason = "Requests per minute: the limit is 3 and 3 are used."
    found = {"time": utc_text(NOON - seconds_ago, "milliseconds"), "status": status, "code": "requests"}
    return found | {"reason": reason, "model": "svc-chat", "key": None, "request_id": f"r{seconds_ago:.0f}"} | more


def test_why_a_request_was_refused_at_a_time_is_one_question(house: House) -> None:
    lines = [line(300), line(240), line(60, 402, code="insufficient_balance", reason=None, model="none")]
    house.answers["refusals"] = {"lines": lines, "is_complete": True}
    browser, path = operator(house, "read-only", "ray@example.org"), f"/console/operator/accounts/{house.account_id}"
    page = browser.get(path).text
    assert "Requests per minute: the limit is 3 and 3 are used." in page
    assert f'href="{path}/refusals"' in page
    page = browser.get(f"{path}/refusals").text
    assert 'name="at" type="datetime-local" value=""' in page
    assert "Reasons, in the last 24 hours" in page
    page = browser.get(f"{path}/refusals", params={"at": "2026-06-01T11:55"}).text
    assert house.asked[-1][:2] == (
        "refusals",
        {"account_id": house.account_id, "since": NOON - 15 * MINUTE, "until": NOON + 5 * MINUTE},
    )
    shown = words(page)
    assert "Reasons, from 1 Jun 2026, 11:45 UTC to 1 Jun 2026, 12:05 UTC 3 rejected (4xx), 0 failed (5xx)" in shown
    assert "429 2 × More requests per minute than the limit." in words(page)
    assert "The account&#39;s balance did not cover the request." in page  # a line without its reason
    assert page.index("<code>r60</code>") < page.index("<code>r300</code>")
    actions = [one.action for one in house.ledger.audit_log(house.account_id)[:3]]
    assert actions == ["read_refusals", "read_refusals", "read_account"]
    answer = browser.get(f"{path}/refusals", params={"at": "14:05"})
    assert answer.status_code == 422
    assert "Give the time as YYYY-MM-DDTHH:MM, in UTC." in answer.text


def test_refused_and_failed_requests_are_counted_apart_and_equal_neighbours_are_one_row(house: House) -> None:
    wait = "Requests per minute: the limit is 3 and 3 are used. Try again in {} seconds."
    lines = [
        line(7200, 503, code="server_error", reason="The reply failed."),
        *(line(seconds, reason=wait.format(seconds)) for seconds in (300, 240, 180)),
        line(120, 200, code="server_error", reason="The stream broke off."),
        line(60, reason="Tokens per minute: the limit of this API key is 9 and 9 are used.", code="tokens", key="k1"),
    ]
    house.answers["refusals"] = {"lines": lines, "is_complete": True}
    browser, path = operator(house, "support", "sue@example.org"), f"/console/operator/accounts/{house.account_id}"
    page = words(browser.get(path).text)
    assert "Rejected (4xx) 4 last 24 hours, see why Failed (5xx) 2 last 24 hours" in page
    assert "3 times since 1 Jun 2026, 11:55:00 UTC , svc-chat" in page
    page = browser.get(f"{path}/refusals").text
    assert "4 rejected (4xx), 2 failed (5xx)" in words(page)
    assert "the latest of 3" in page
    assert "2 earlier, from 1 Jun 2026, 11:55:00 UTC" in words(page)
    assert page.count(f'href="{path}#limits"') == 1  # the other limit is the key's own
    assert chart(page, "errors")["labels"][-2:] == ["2026-06-01T11", "2026-06-01T12"]
    assert {one["name"]: sum(one["values"]) for one in chart(page, "errors")["series"]} == {
        "More requests per minute than the limit": 3,
        "The service failed": 2,
        "Too many tokens per minute, or the model is busy": 1,
    }
    assert ">API key</th>" in page
    page = browser.get(f"{path}/refusals", params={"code": "server_error", "at": "2026-06-01T11:58"}).text
    assert f'href="{path}/refusals?at=2026-06-01T11%3A58&code=requests"' in page.replace("&amp;", "&")
    table = page[page.index("Errors, latest first") :]
    assert "The stream broke off." in table
    assert "3 are used" not in table
    assert ">API key</th>" not in table
    house.answers["refusals"] = {"lines": lines * 40, "is_complete": True}
    assert "Rejected (4xx) ≥ 160 last 24 hours, see why Failed (5xx) ≥ 80" in words(
        browser.get(path).text
    )  # a gateway returns the latest


def test_members_see_why_their_requests_were_rejected(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.console.error_pages.SEARCHES_PER_MINUTE", 2)
    house.answers["refusals"] = {"lines": [line(60), line(30, code="model_not_found", reason=None, model="none")]}
    member, path = house.member("mia@example.org", "member"), f"/console/accounts/{house.account_id}"
    assert f'href="{path}/errors"' in member.get(f"{path}/requests").text
    page = member.get(f"{path}/errors", params={"at": "2026-06-01T11:55"}).text
    assert house.asked[-1][1]["account_id"] == house.account_id
    assert "Requests per minute: the limit is 3 and 3 are used. Error code requests" in words(page)
    assert "The request named a model that does not exist." in page
    assert "/operator" not in page
    assert "Raise the limit" not in page
    assert all(one.action != "read_refusals" for one in house.ledger.audit_log(house.account_id))
    del house.answers["refusals"]
    assert "No gateway answers" in member.get(f"{path}/errors").text
    assert member.get(f"{path}/errors").status_code == 429  # the third search of the minute


def test_an_account_is_shown_while_gateways_and_limiters_are_away(house: House) -> None:
    browser, path = operator(house, "read-only", "ray@example.org"), f"/console/operator/accounts/{house.account_id}"
    page = browser.get(path)
    assert page.status_code == 200
    assert "No gateway answers" in page.text
    assert "No gateway answers" in browser.get(f"{path}/refusals").text
    assert browser.get("/console/operator/accounts/acct_none").status_code == 404
    assert browser.get("/console/operator/accounts/acct_none/refusals").status_code == 404


def test_the_page_shows_keys_people_entries_and_the_limits_of_now(house: House) -> None:
    house.member("eve@example.org", "billing")
    soon = NOON + 59 * MINUTE + 1
    house.ledger.create_key(house.account_id, playground_name("eve@example.org"), "1" * 64, "sk-p…z", expires_at=soon)
    house.ledger.create_key(house.account_id, "<i>laptop", "0" * 64, "sk-abc…z")
    house.status = AccountStatus(house.account_id, 10**9, 2, Contract(rpm=77), (("smollm2", 1234),))
    browser, path = operator(house, "read-only", "ray@example.org"), f"/console/operator/accounts/{house.account_id}"
    page = browser.get(path).text
    assert cells(page, "Adaeve@example.org") == ["Billing", "Active"]  # the name is above the address
    assert cells(page, "&lt;i&gt;laptop")[0] == "sk-abc…z"
    assert cells(page, "Playground (Ada)")[-1] == "in 59 minutes"
    assert page.index("&lt;i&gt;laptop") < page.index("Playground (Ada)")  # although it was created first
    assert "Requests per minute 77 (default)" in words(page)
    assert "smollm2: 1,234 tokens per minute" in page
    assert "Payment" in page
    assert "Save limits" not in page  # a reader changes nothing
    assert "Add credit or payment" not in page
    assert "Open requests 2 $1.00 held for them" in words(page)
    house.status = AccountStatus(house.account_id, 400_000, 2, Contract(), ())
    assert "Open requests 2 < $0.01 held for them" in words(browser.get(path).text)


def test_notes_stay_with_the_account_and_operators_alone_see_them(house: House) -> None:
    browser, path = operator(house, "finance", "fay@example.org"), f"/console/operator/accounts/{house.account_id}"
    for _ in range(2):
        fields = {"text": "<b>pays late</b>", "once": "0123"}
        assert submit(browser, path, f"{path}/notes", **fields).status_code == 303
    page = browser.get(path).text
    assert page.count("&lt;b&gt;pays late&lt;/b&gt;") == 1
    assert "added a note about Ada&#39;s" in page
    answer = submit(browser, path, f"{path}/notes", text="x" * 1001)
    assert answer.status_code == 422
    assert "a note has 1 to 1000 printable characters" in answer.text
    reader = operator(house, "read-only", "ray@example.org")
    assert submit(reader, path, f"{path}/notes", text="x").status_code == 403
    owner = house.member("ada@example.org")
    assert "pays late" not in owner.get(f"/console/accounts/{house.account_id}").text


def test_accounts_are_sorted_as_chosen_and_a_wrong_order_is_the_usual_one(house: House) -> None:
    browser = operator(house, "read-only", "ray@example.org")
    house.clock.now += 1
    house.ledger.credit(house.ledger.create_account("Zoe").account_id, 10**15)
    for order, first in (("name", "Ada&#39;s"), ("highest balance", "Zoe"), ("newest", "Zoe"), ("richest", "Zoe")):
        page = browser.get("/console/operator/accounts", params={"order": order}).text
        names = re.findall(r'/console/operator/accounts/acct_\w+">([^<]+)<', page)
        assert names[0] == first, order
        led = "Balance" if "balance" in order else "Spent today"
        assert re.findall(r'data-label="([^"]+)" data-lead', page) == [f"{led} (USD)"] * len(names)
