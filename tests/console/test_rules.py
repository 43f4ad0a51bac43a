"""Every route is open to whom its rule names and to nobody else; nothing is posted without a page's token."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from serve_app.console.app import PAGES
from serve_app.console.rules import ANYONE, PROVIDER, SIGNED_IN
from serve_app.contracts.operators import SetOperatorRole

from .conftest import CSRF, PASSWORD, House, submit

ROLES = ("owner", "member", "billing")
NONE = dict.fromkeys(
    (
        "token",
        "name",
        "key_id",
        "attempt_id",
        "session_id",
        "invitation_id",
        "link",
        "request_id",
        "alert_id",
        "provider",
        "id",
        "pending_id",
        "user_id",
        "passkey_id",
        "entry_id",
        "person_id",
        "notice_id",
        "model",
    ),
    "none",
) | {"month": "2026-06"}
RULES = {page.route: page.rule for page in PAGES}
OPERATORS = ("admin", "support", "finance", "read-only")


def routes(app: FastAPI) -> set[str]:
    return {f"{method} {route.path}" for route in app.routes if isinstance(route, APIRoute) for method in route.methods}


def test_there_are_no_routes_but_those_of_the_table(house: House) -> None:
    assert routes(house.pages) == RULES.keys()
    assert len(house.pages.routes) == len(PAGES)


@pytest.mark.parametrize("who", ["nobody", *ROLES, "another account's owner", *OPERATORS])
def test_each_route_is_open_to_whom_its_rule_names(house: House, who: str) -> None:
    other = house.ledger.create_account("Bob's").account_id
    if who == "nobody":
        browser = house.browser()
        browser.get("/console/sign-in")
    else:
        role = who if who in ROLES else "owner"
        browser = house.member("one@example.org", role, house.account_id if who in ROLES else other)
    if who in OPERATORS:
        house.ledger.run(SetOperatorRole("one@example.org", who, other))
        fields = {"email": "one@example.org", "password": PASSWORD}
        assert submit(browser, "/console/sign-in", "/console/sign-in", **fields).status_code == 303
    cookies: dict[str, str] = {}
    for route in sorted(routes(house.pages) - {"POST /sign-out"}):
        method, path = route.split()
        path = path.format(**NONE, account_id=house.account_id)
        if method == "POST" and dict(browser.cookies) != cookies:  # a form has a token of its session
            found = CSRF.search(browser.get("/console/profile" if who != "nobody" else "/console/sign-in").text)
            assert found is not None
            cookies, token = dict(browser.cookies), found[1]
        answer = browser.request(method, f"/console{path}", data={"csrf": token} if method == "POST" else None)
        rule = RULES[route]
        if rule is PROVIDER:
            assert answer.status_code == 404, route  # no session and no form opens it: test_payments.py
        elif rule is ANYONE or (rule is SIGNED_IN and who != "nobody") or who in rule:
            assert answer.status_code != 401, route
            assert "Your role does not open" not in answer.text, route
        elif who == "nobody" and method == "GET":
            assert (answer.status_code, answer.headers["location"]) == (303, "/console/sign-in"), route
        else:
            assert answer.status_code == (401 if who == "nobody" else 403), route


def test_no_form_is_taken_without_its_own_token(house: House) -> None:
    browser = house.member()
    house.ledger.run(SetOperatorRole("ada@example.org", "admin", house.account_id))
    fields = {"email": "ada@example.org", "password": PASSWORD}
    assert submit(browser, "/console/sign-in", "/console/sign-in", **fields).status_code == 303
    another_s = CSRF.search(house.member("bob@example.org").get("/console/profile").text)
    assert another_s is not None
    before = house.ledger.audit_log()
    forms = [
        route.split()[1] for route in routes(house.pages) if route.startswith("POST") and RULES[route] is not PROVIDER
    ]
    sent = [(path, data) for path in forms for data in ({}, {"csrf": another_s[1]})]
    sent += [("/profile/password", {"csrf": token}) for token in ("", "0" * 64, "ü")]
    for path, data in sent:
        answer = browser.post(f"/console{path.format(**NONE, account_id=house.account_id)}", data=data)
        assert (answer.status_code, "out of date" in answer.text) == (403, True), (path, data)
    assert house.ledger.audit_log() == before


def test_the_table_lets_only_owners_and_members_at_keys_and_nobody_at_pages_of_people() -> None:
    """Written out again, so that a slip in the table is no slip in its test too."""
    assert {route for route, rule in RULES.items() if rule is ANYONE} == {
        "GET /static/{name}",
        "GET /sign-in",
        "POST /sign-in",
        "GET /sign-in/openid",
        "GET /sign-in/openid/return",
        "GET /invitations/{token}",
        "POST /invitations/{token}",
        "POST /invitations/{token}/openid",
        "GET /reset/{link}",
        "POST /reset/{link}",
        "POST /sign-in/passkey",
        "GET /first/{token}",
        "POST /first/{token}",
        "GET /sign-up",
        "POST /sign-up",
        "GET /sign-up/{token}",
        "POST /sign-up/{token}",
        "GET /reset",
        "POST /reset",
    }
    for route, rule in RULES.items():
        assert ("{account_id}" in route) == (rule <= {*ROLES}), route
        assert ("/operator" in route) == (rule <= {*OPERATORS}), route
        if "/keys" in route or "}/playground" in route:
            assert rule == {"owner", "member"}, route
        if any(name in route for name in ("/billing", "/statements", "/alerts")):
            assert rule == {"owner", "billing"}, route
        if "/members" in route or "/management-keys" in route:
            assert rule == {"owner"}, route
    assert RULES["POST /accounts/{account_id}/first-steps/dismiss"] == {"owner", "member", "billing"}
    assert RULES["GET /accounts"] == SIGNED_IN
    assert RULES["POST /operator/accounts/{id}/credit"] == {"admin", "finance"}
    assert RULES["POST /operator/accounts/{id}/attempts/{attempt_id}/end"] == {"admin", "finance"}
    assert RULES["POST /operator/credits/{pending_id}/approve"] == {"admin", "finance"}
    assert RULES["POST /operator/accounts/{id}/limits"] == {"admin", "support"}
    assert RULES["POST /operator/accounts/{id}/active"] == {"admin", "support"}
    writes = {route: rule for route, rule in RULES.items() if route.startswith("POST /operator/")}
    support, finance = {"admin", "support"}, {"admin", "finance"}
    for route, rule in writes.items():
        if any(
            name in route for name in ("/people/", "/notices", "/canary", "/promote", "/rollback", "/limits", "/active")
        ):
            assert rule == support, route
        elif any(name in route for name in ("/credit", "/price", "/attempts/")):
            assert rule == finance, route
        else:
            assert route == "POST /operator/accounts/{id}/notes"
            assert rule == support | finance
    assert all(rule == {*OPERATORS} for route, rule in RULES.items() if route.startswith("GET /operator"))
