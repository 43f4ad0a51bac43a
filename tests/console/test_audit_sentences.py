"""Every audit record reads as a sentence with names and units."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import serve_app
from serve_app.console.audit_sentences import ACTIONS, sentence
from serve_app.contracts.books import AuditRecord
from serve_app.contracts.limits import ACCOUNT_LIMITS

from .conftest import House, operator

NAMES = {"acct_1": "Acme", "user_1": "eve@example.com", "key_1": "laptop"}


def told(action: str, detail: dict[str, Any] | None = None, *, account: str = "acct_1", subject: str = "user_1") -> str:
    record = AuditRecord(1, 0.0, "anna@example.com", action, subject, account, detail or {})
    found = sentence(record, NAMES, "USD")
    assert found.actor == "anna@example.com"
    return found.text


@pytest.mark.parametrize(
    ("actor", "name"),
    [
        ("ada@desk key:f6e1909ec1f5", "ada@desk (operator key)"),
        ("key:f6e1909ec1f5", "Operator key f6e1909ec1f5"),
        ("setup key:f6e1909ec1f5", "Setup"),
        ("make serve key:f6e1909ec1f5", "Setup"),  # as earlier releases record it
        ("deployment", "Configuration file"),
        ("monkey:f6e1909ec1f5", "monkey:f6e1909ec1f5"),
    ],
)
def test_an_operator_key_reads_as_words(actor: str, name: str) -> None:
    assert sentence(AuditRecord(1, 0.0, actor, "sign_in", "user_1", "acct_1", {}), NAMES).actor == name


def change(was: Any, now: Any) -> dict[str, Any]:
    return {"was": was, "is": now}


@pytest.mark.parametrize(
    ("action", "detail", "text"),
    [
        ("set_limits", {"rpm": change(600, 1200)}, "raised the limit of Acme from 600 to 1,200 requests per minute"),
        ("set_limits", {"tpm": change(9000, 10)}, "lowered the limit of Acme from 9,000 to 10 tokens per minute"),
        ("set_limits", {"rpm": change(None, 5)}, "changed the limit of Acme from the default to 5 requests per minute"),
        (
            "set_limits",
            {"rpm": change(1, 2), "concurrency": change(3, None)},
            "changed the limits of Acme: requests per minute from 1 to 2, concurrent requests from 3 to the default",
        ),
        ("set_active", {"active": change(True, False)}, "suspended the account Acme"),
        ("credit", {"kind": "grant", "amount": 10**9, "memo": "sorry"}, "booked a credit of 1.00 USD to Acme (sorry)"),
        (
            "decide_credit",
            {"approved": False, "kind": "top_up", "amount": 10**9, "asked_by": "fred@example.com"},
            "rejected a payment of 1.00 USD for Acme, requested by fred@example.com",
        ),
        (
            "decide_credit",
            {"approved": False, "kind": "grant", "amount": 10**9, "asked_by": "anna@example.com"},
            "withdrew a credit of 1.00 USD for Acme, requested by anna@example.com",
        ),
        (
            "update_key",
            {"budget": change(None, 10**9), "expires_at": change(None, 1_800_000_000.0)},
            "changed the API key “eve@example.com” of Acme: budget from none to 1.00 USD, "
            "expires at from none to 15 Jan 2027, 08:00 UTC",
        ),
        ("correct", {"amount": -2 * 10**9, "memo": "t7"}, "corrected the balance of Acme: subtracted 2.00 USD (t7)"),
        ("set_operator_role", {"role": change(None, "admin")}, "gave eve@example.com the operator role admin"),
        ("set_operator_role", {"role": change("admin", None)}, "took the operator role admin from eve@example.com"),
        ("set_membership", {"role": change(None, "owner")}, "gave eve@example.com the role owner in Acme"),
        ("set_membership", {"role": change("owner", None)}, "took the role owner from eve@example.com in Acme"),
        ("reset_person", {"password": True}, "reset the password of eve@example.com and ended all sessions"),
        ("suspend_person", {"suspended": change(False, True)}, "suspended eve@example.com"),
        ("publish_notice", {"text": "Down"}, "published a notice to Acme: Down"),
        (
            "create_alert",
            {"kind": "month", "threshold": 4 * 10**9},
            "created an alert for Acme: monthly spend reaches 4.00 USD",
        ),
        ("something_new", {}, "something new of Acme"),
    ],
)  # fmt: skip
def test_a_record_reads_as_a_sentence(action: str, detail: dict[str, Any], text: str) -> None:
    assert told(action, detail) == text


def test_records_about_the_service_name_models_and_shares() -> None:
    weights = {"weights": change({"a": 100}, {"a": 95, "b": 5}), "reason": "new weights", "version": 3}
    assert told("set_traffic", weights, account="", subject="svc-chat") == (
        "shifted the traffic of svc-chat from a 100% to a 95%, b 5% (new weights)"
    )
    price = {"input": change(500, 600), "cached_input": change(1, 1), "output": change(None, 2), "effective_at": 0.0}
    assert told("schedule_price", price, account="", subject="svc-chat") == (
        "set the price of svc-chat in USD per million tokens: input from 0.50 to 0.60, cached input 0.001, "
        "output 0.002, effective 1 Jan 1970, 00:00 UTC"
    )
    assert told("publish_notice", {"text": "Down"}, account="") == "published a notice to all accounts: Down"


@pytest.mark.parametrize("action", [*ACTIONS, "an_action_of_a_newer_release"])
@pytest.mark.parametrize("detail", [{}, {"rpm": 5, "amount": "x", "role": 1, "weights": [], "expires_at": "?"}])
def test_no_record_breaks_the_page(action: str, detail: dict[str, Any]) -> None:
    assert told(action, detail)
    assert told(action, detail, account="", subject="")


def test_every_action_that_the_ledger_records_has_a_sentence() -> None:
    """Reads the calls of `write_audit`, as far as they name the action."""
    found = set()
    for path in (Path(serve_app.__file__).parent / "accounting").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("write_audit", "_change", "_record"):
                found |= {one.value for one in node.args[2:3] if isinstance(one, ast.Constant) and one.value}
    assert len(found) > 20
    assert {name for name in found if isinstance(name, str)} <= ACTIONS.keys()
    assert ACCOUNT_LIMITS


def test_the_log_is_filtered_by_who_and_what(house: House) -> None:
    browser, path = operator(house, "read-only", "ray@example.org"), "/console/operator/audit"
    page = browser.get(path, params={"actor": "RAY", "action": "sign_in"}).text
    assert "<strong>ray@example.org</strong> signed in" in page
    assert "joined" not in page.partition("<tbody>")[2]
    assert "No records here" in browser.get(path, params={"actor": "nobody"}).text
    assert browser.get(path, params={"action": "<script>"}).status_code == 200
    assert browser.get(path, params={"after": "x"}).status_code == 404


def test_a_search_goes_on_where_a_bounded_one_ended(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    browser, path = operator(house, "read-only", "ray@example.org"), "/console/operator/audit"
    first = house.ledger.audit_log()[-1]
    for where in ("serve_app.accounting.audit_log", "serve_app.contracts.commands"):
        monkeypatch.setattr(f"{where}.MAX_SEARCHED", 1)
    seen, query = 0, f"?action={first.action}&raw=1"
    for _ in range(100):
        page = browser.get(path + query).text
        seen += page.count(f"<code>{first.action} ")
        following = page.partition('rel="next" href="')[2].partition('"')[0].replace("&amp;", "&")
        if not following:
            break
        query = following
    assert seen == len([one for one in house.ledger.audit_log(action=None) if one.action == first.action])
