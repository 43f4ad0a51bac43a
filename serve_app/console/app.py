"""The console's pages, and its ASGI application."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, PlainTextResponse, RedirectResponse, Response

from serve_app.console import (
    account_pages,
    alert_pages,
    billing_pages,
    live_pages,
    management_pages,
    member_pages,
    openid_pages,
    operator_pages,
    payment_pages,
    people_pages,
    playground_pages,
    recharge_pages,
    usage_pages,
)
from serve_app.console.rules import (
    ANYONE,
    EVERY_MEMBER,
    FINANCE,
    KEY_HOLDERS,
    OPERATORS,
    OWNERS,
    PAYERS,
    PROVIDER,
    SIGNED_IN,
    SUPPORT,
)
from serve_app.console.web import HEADERS, Console, Handler, Page, Visit, responder


def static(name: str) -> Handler:
    async def send(_: Visit) -> Response:
        return FileResponse(Path(__file__).parent / name, headers={"cache-control": "max-age=3600"})

    return send


#: Roles are roles in the account that the path names, except for the operator roles.
PAGES: Final = (
    Page("GET", "/static/console.css", ANYONE, static("console.css")),
    Page("GET", "/static/playground.js", ANYONE, static("playground.js")),
    Page("GET", "/static/copy.js", ANYONE, static("copy.js")),
    Page("GET", "/sign-in", ANYONE, people_pages.show_sign_in),
    Page("POST", "/sign-in", ANYONE, people_pages.sign_in),
    Page("GET", "/sign-in/openid", ANYONE, openid_pages.begin_sign_in),
    Page("GET", "/sign-in/openid/return", ANYONE, openid_pages.come_back),
    Page("GET", "/invitations/{token}", ANYONE, people_pages.show_invitation),
    Page("POST", "/invitations/{token}", ANYONE, people_pages.accept),
    Page("POST", "/invitations/{token}/openid", ANYONE, openid_pages.begin_accept),
    Page("GET", "/reset/{link}", ANYONE, people_pages.show_reset),
    Page("POST", "/reset/{link}", ANYONE, people_pages.reset),
    Page("POST", "/payments/{provider}", PROVIDER, payment_pages.report),
    Page("POST", "/invitations/{token}/join", SIGNED_IN, people_pages.join),
    Page("GET", "/", SIGNED_IN, account_pages.home),
    Page("POST", "/sign-out", SIGNED_IN, people_pages.sign_out),
    Page("GET", "/profile", SIGNED_IN, people_pages.profile),
    Page("POST", "/profile/password", SIGNED_IN, people_pages.change_password),
    Page("POST", "/profile/totp", SIGNED_IN, people_pages.totp_on),
    Page("POST", "/profile/totp/off", SIGNED_IN, people_pages.totp_off),
    Page("POST", "/profile/openid", SIGNED_IN, openid_pages.begin_link),
    Page("POST", "/profile/openid/off", SIGNED_IN, openid_pages.unlink),
    Page("POST", "/profile/sessions/{session_id}/end", SIGNED_IN, people_pages.end_session),
    Page("GET", "/operator/accounts", OPERATORS, operator_pages.accounts, "Accounts"),
    Page("GET", "/operator/accounts/{id}", OPERATORS, operator_pages.account),
    Page("POST", "/operator/accounts/{id}/limits", SUPPORT, operator_pages.set_limits),
    Page("POST", "/operator/accounts/{id}/active", SUPPORT, operator_pages.set_active),
    Page("POST", "/operator/accounts/{id}/credit", FINANCE, operator_pages.credit),
    Page("POST", "/operator/accounts/{id}/attempts/{attempt_id}/end", FINANCE, operator_pages.end_attempt),
    Page("GET", "/operator/credits", OPERATORS, operator_pages.pending, "Credits"),
    Page("POST", "/operator/credits/{pending_id}/approve", FINANCE, operator_pages.approve),
    Page("POST", "/operator/credits/{pending_id}/reject", FINANCE, operator_pages.reject),
    Page("GET", "/operator/audit", OPERATORS, operator_pages.audit, "Audit log"),
    Page("GET", "/operator/books", OPERATORS, operator_pages.books, "Books"),
    Page("GET", "/operator/live", OPERATORS, live_pages.show, "Live"),
    Page("GET", "/accounts/{account_id}", EVERY_MEMBER, account_pages.overview, "Overview"),
    Page("GET", "/accounts/{account_id}/playground", KEY_HOLDERS, playground_pages.playground, "Playground"),
    Page("POST", "/accounts/{account_id}/playground/key", KEY_HOLDERS, playground_pages.make_key),
    Page("GET", "/accounts/{account_id}/playground/requests/{request_id}", KEY_HOLDERS, playground_pages.charged),
    Page("GET", "/accounts/{account_id}/keys", KEY_HOLDERS, account_pages.keys, "Keys"),
    Page("POST", "/accounts/{account_id}/keys", KEY_HOLDERS, account_pages.create_key),
    Page("POST", "/accounts/{account_id}/keys/{key_id}/revoke", KEY_HOLDERS, account_pages.revoke_key),
    Page("POST", "/accounts/{account_id}/keys/{key_id}/rotate", KEY_HOLDERS, account_pages.rotate_key),
    Page("GET", "/accounts/{account_id}/usage", EVERY_MEMBER, usage_pages.usage, "Usage"),
    Page("GET", "/accounts/{account_id}/usage/{month}.csv", EVERY_MEMBER, usage_pages.csv),
    Page("GET", "/accounts/{account_id}/requests", EVERY_MEMBER, usage_pages.requests),
    Page("GET", "/accounts/{account_id}/billing", PAYERS, billing_pages.billing, "Billing"),
    Page("POST", "/accounts/{account_id}/billing", PAYERS, payment_pages.add_funds),
    Page("POST", "/accounts/{account_id}/billing/recharge", PAYERS, recharge_pages.change),
    Page("POST", "/accounts/{account_id}/billing/recharge/method", PAYERS, recharge_pages.save_method),
    Page("POST", "/accounts/{account_id}/billing/recharge/resume", PAYERS, recharge_pages.resume),
    Page("POST", "/accounts/{account_id}/billing/recharge/off", PAYERS, recharge_pages.stop),
    Page("GET", "/accounts/{account_id}/statements/{month}", PAYERS, billing_pages.statement),
    Page("GET", "/accounts/{account_id}/alerts", PAYERS, alert_pages.show, "Alerts"),
    Page("POST", "/accounts/{account_id}/alerts", PAYERS, alert_pages.create),
    Page("POST", "/accounts/{account_id}/alerts/{alert_id}/remove", PAYERS, alert_pages.remove),
    Page("GET", "/accounts/{account_id}/members", OWNERS, member_pages.members, "Members"),
    Page("POST", "/accounts/{account_id}/members", OWNERS, member_pages.invite),
    Page("POST", "/accounts/{account_id}/members/{user_id}", OWNERS, member_pages.change),
    Page("POST", "/accounts/{account_id}/members/invitations/{invitation_id}/revoke", OWNERS, member_pages.revoke),
    Page("GET", "/accounts/{account_id}/management-keys", OWNERS, management_pages.show, "API"),
    Page("POST", "/accounts/{account_id}/management-keys", OWNERS, management_pages.create),
    Page("POST", "/accounts/{account_id}/management-keys/{key_id}/revoke", OWNERS, management_pages.revoke),
    Page("GET", "/accounts/{account_id}/docs", EVERY_MEMBER, account_pages.docs, "Docs"),
)


async def no_page(request: Request, _: Exception) -> Response:
    """Handles a missing page. Serve passes the bare prefix as a separate path."""
    root = str(request.scope.get("root_path", ""))
    if request.url.path == root:
        return RedirectResponse(f"{root}/", headers=HEADERS)
    return PlainTextResponse("There is no such page.\n", 404, headers=HEADERS)


def build_console(console: Console) -> FastAPI:
    """Builds the application, with each page behind its rule."""
    console.pages = PAGES
    app = FastAPI(title="console", openapi_url=None, redirect_slashes=False, exception_handlers={404: no_page})
    for page in PAGES:
        app.add_api_route(page.path, responder(console, page), methods=[page.method], response_model=None)
    return app
