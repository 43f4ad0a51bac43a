"""Operators see in one look who spends most, what the service earns, and whether users are served."""

from __future__ import annotations

import csv
import io
import re
from typing import Any

import pytest

from serve_app.console.serving import serving
from serve_app.contracts.books import Outcome
from serve_app.contracts.units import DAY_S
from tests.accounting.books import COST, NOON, settlement

from .conftest import House, cells, chart, operator, words

LIVE: dict[str, Any] = {
    "limiters": [{"shard": 0, "admits": True}],
    "models": [{"id": "svc-chat", "backends": [{"name": "a", "share": 0.9}, {"name": "b:lora", "share": 0.1}]}],
    "backends": [
        {"name": "a", "status": "RUNNING", "load": {"pressure": 0.5, "effective_share": 1.0}},
        {"name": "b", "status": "RUNNING", "load": None},
    ],
    "gateways": [{"holder": "g", "spool": {"ledger_away": False, "settlements": 3}}],
}


def down(*names: str) -> list[dict[str, Any]]:
    return [one | {"status": "UNHEALTHY"} if one["name"] in names else one for one in LIVE["backends"]]


@pytest.mark.parametrize(
    ("changed", "state", "reason"),
    [
        ({}, "ok", ""),
        ({"models": [], "backends": []}, "ok", ""),
        ({"limiters": [{"shard": 0, "admits": True}, {"shard": 1, "admits": None}]}, "degraded", "Limiter 1 of 2"),
        ({"limiters": [{"shard": 0, "admits": False}]}, "failed", "Limiter 0 of 1"),
        ({"backends": down("b")}, "degraded", "the backend b:lora is down; the others answer"),
        ({"backends": down("a", "b")}, "failed", "svc-chat has no running backend"),
        ({"backends": [{"name": "a", "status": None, "load": None}]}, "ok", ""),  # Serve can't be reached
        (
            {"backends": [LIVE["backends"][0] | {"load": {"pressure": 1.5, "effective_share": 0.4}}]},
            "degraded",
            "a is overloaded: the limits of its users are lowered to 40%.",
        ),
        (
            {"gateways": [{"holder": "g", "spool": {"ledger_away": True, "settlements": 1200}}, {"spool": None}]},
            "degraded",
            "1,200 settlements wait",
        ),
    ],
)
def test_the_verdict_says_what_is_wrong(changed: dict[str, Any], state: str, reason: str) -> None:
    found = serving(LIVE | changed)
    assert found.state == state
    assert any(reason in one for one in found.reasons) == bool(reason)


def test_without_a_limiter_nobody_is_served() -> None:
    assert serving(None).state == "failed"


def spent(house: House) -> dict[str, str]:
    """Two accounts with usage of today and of 40 days ago. Returns their ids by name."""
    ids = {}
    for name, requests in (("Small", 1), ("Large", 3)):
        account_id = house.ledger.create_account(name).account_id
        house.ledger.credit(account_id, 10**12)
        key = house.ledger.create_key(account_id, "k", f"{requests:064d}", "sk-…").key_id
        for number in range(requests):
            more = {"model": "svc-coder" if number else "svc-chat", "prompt_tokens": 10}
            house.ledger.settle([settlement(f"{name}{number}", account_id, key, **more)])
        house.ledger.settle([settlement(f"{name}f", account_id, key, outcome=Outcome.FAILED)])
        house.ledger.settle([settlement(f"{name}old", account_id, key, finished_at=NOON - 40 * DAY_S)])
        ids[name] = account_id
    return ids


def test_the_overview_names_who_spends_most_today_and_the_error_rate(house: House) -> None:
    ids = spent(house)
    browser = operator(house, "read-only", "ann@example.org")
    page = browser.get("/console/operator").text
    assert "Operational" in page
    today = page[page.index("Top spenders today") :]
    assert today.index(ids["Large"]) < today.index(ids["Small"])
    assert cells(today, "Large")[1:3] == ["75.0%", "4"]
    assert "33.33%" in page  # 2 of 6 requests failed
    assert '<a href="#failures">2 failed requests</a>' in page
    failures = page[page.index('id="failures"') :]
    for account_id in ids.values():
        assert f"/operator/accounts/{account_id}/refusals" in failures
    assert "Requests 6 Today" in words(page)
    assert '<a href="/console/operator/live">Live figures</a>' in page
    for of_live in ("Open requests", "Backends now", "data-chart"):
        assert of_live not in page
    assert browser.get("/console/operator", params={"days": "90"}).text.count("25.00%") == 1  # of 8
    house.live = None
    assert "users are not served" in browser.get("/console/operator").text


def test_the_list_of_accounts_says_what_each_spent_today(house: House) -> None:
    ids = spent(house)
    page = operator(house, "read-only", "ann@example.org").get("/console/operator/accounts").text
    [_, _, today, month, *_] = cells(page, f"Large{ids['Large']}")
    assert today == month == "< 0.01"  # three cheap requests
    assert cells(page, f"Ada&#39;s{house.account_id}")[2] == "0.00"


def test_the_overview_counts_refused_requests_and_leads_to_their_reasons(house: House) -> None:
    ids = spent(house)
    browser = operator(house, "read-only", "ann@example.org")
    assert "no gateway answers" in browser.get("/console/operator").text
    codes = [["requests", 1200, 429, None], ["model_not_found", 30, 422, "svc-chat"], ["model_not_found", 4, 422, None]]
    rows = [{"account": ids["Small"], "refused": 1234, "code": "requests", "codes": codes}]
    house.answers["refused"] = {"accounts": rows, "unidentified": 11, "is_complete": False}
    page = browser.get("/console/operator").text
    assert "Rejected today (4xx) ≥ 1,245" in words(page)
    assert cells(page, "Small")[-1] == "1,234"
    assert cells(page, "Large")[-1] == "0"
    refused = page[page.index('id="refused"') :]
    assert "429 1,200 × More requests per minute than the limit." in words(refused)
    assert "422 30 × The API key may not use svc-chat." in words(refused)
    assert "422 4 × The request named a model that does not exist." in words(refused)
    assert "401 11 × The API key is missing, wrong, revoked or expired." in words(refused)
    assert f'href="/console/operator/accounts/{ids["Small"]}/refusals"' in refused
    assert house.asked[-1][1] == {"since": NOON - DAY_S / 2, "until": NOON}  # since the beginning of the day
    codes[1:] = [["model_not_found", 34, 422]]  # of a gateway of the previous release
    refused = browser.get("/console/operator").text.partition('id="refused"')[2]
    assert "422 34 × The model does not exist, or the API key may not use it." in words(refused)


@pytest.mark.parametrize("query", [{"from": "x"}, {"from": "2026-06-02", "to": "2026-06-01"}, {"from": "2020-01-01"}])
def test_a_range_that_is_none_is_refused(house: House, query: dict[str, str]) -> None:
    browser = operator(house, "read-only", "ann@example.org")
    for path in ("/console/operator", "/console/operator/revenue", "/console/operator/revenue.csv"):
        assert browser.get(path, params=query).status_code == 422


def test_the_revenue_sums_to_the_same_total_by_day_model_and_account(house: House) -> None:
    ids = spent(house)
    browser = operator(house, "finance", "fay@example.org")
    for group, names in (("day", {"Revenue"}), ("model", {"svc-chat", "svc-coder"}), ("account", {"Large", "Small"})):
        page = browser.get("/console/operator/revenue", params={"by": group, "days": "90"}).text
        data = chart(page, "revenue")
        assert {one["name"] for one in data["series"]} == names
        assert len(data["labels"]) == 90
        text = browser.get("/console/operator/revenue.csv", params={"by": group, "days": "90"}).text
        rows = list(csv.DictReader(io.StringIO(text)))
        assert sum(round(float(row["charged"]) * 10**9) for row in rows) == 6 * COST
        assert {row["currency"] for row in rows} == {"USD"}
    assert {row["account_id"] for row in rows} == set(ids.values())
    page = browser.get("/console/operator/revenue", params={"from": "2026-01-01", "to": "2026-01-05"}).text
    assert "No revenue in this range" in page
    page = words(browser.get("/console/operator/revenue", params={"days": "30"}).text)
    assert re.search(r"Revenue \S+ \+100% vs previous 30 days", page)
    assert re.search(r"Requests \S+ \+200% vs previous 30 days", page)
    assert "+" not in words(browser.get("/console/operator/revenue", params={"days": "1"}).text)
