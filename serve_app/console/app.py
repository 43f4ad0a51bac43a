"""The console's pages, and its ASGI application."""

from __future__ import annotations

from typing import Final

from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse, Response

from serve_app.console import (
    account_pages,
    alert_pages,
    billing_pages,
    code_pages,
    error_pages,
    live_pages,
    management_pages,
    member_pages,
    openid_pages,
    operator_account_pages,
    operator_model_pages,
    operator_overview_pages,
    operator_pages,
    operator_people_pages,
    overview_pages,
    passkey_pages,
    payment_pages,
    people_pages,
    playground_pages,
    recharge_pages,
    reference_pages,
    request_pages,
    sign_up_pages,
    static_files,
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
    WRITERS,
)
from serve_app.console.web import HEADERS, Console, Page, Refused, Visit, responder

#: Roles are roles in the account that the path names, except for the operator roles.
PAGES: Final = (
    Page("GET", "/static/{name}", ANYONE, static_files.send),
    Page("GET", "/sign-in", ANYONE, people_pages.show_sign_in),
    Page("POST", "/sign-in", ANYONE, people_pages.sign_in),
    Page("POST", "/sign-in/passkey", ANYONE, passkey_pages.sign_in),
    Page("GET", "/sign-in/openid", ANYONE, openid_pages.begin_sign_in),
    Page("GET", "/sign-in/openid/return", ANYONE, openid_pages.come_back),
    Page("GET", "/invitations/{token}", ANYONE, people_pages.show_invitation),
    Page("POST", "/invitations/{token}", ANYONE, people_pages.accept),
    Page("POST", "/invitations/{token}/openid", ANYONE, openid_pages.begin_accept),
    Page("GET", "/first/{token}", ANYONE, sign_up_pages.show_first),
    Page("POST", "/first/{token}", ANYONE, sign_up_pages.use_first),
    Page("GET", "/sign-up", ANYONE, sign_up_pages.show),
    Page("POST", "/sign-up", ANYONE, sign_up_pages.send),
    Page("GET", "/sign-up/{token}", ANYONE, sign_up_pages.show_confirmed),
    Page("POST", "/sign-up/{token}", ANYONE, sign_up_pages.sign_up),
    Page("GET", "/reset", ANYONE, people_pages.ask_reset),
    Page("POST", "/reset", ANYONE, people_pages.send_reset),
    Page("GET", "/reset/{link}", ANYONE, people_pages.show_reset),
    Page("POST", "/reset/{link}", ANYONE, people_pages.reset),
    Page("POST", "/payments/{provider}", PROVIDER, payment_pages.report),
    Page("POST", "/invitations/{token}/join", SIGNED_IN, people_pages.join),
    Page("GET", "/", SIGNED_IN, account_pages.home),
    Page("GET", "/accounts", SIGNED_IN, account_pages.accounts),
    Page("POST", "/sign-out", SIGNED_IN, people_pages.sign_out),
    Page("GET", "/profile", SIGNED_IN, people_pages.profile),
    Page("POST", "/profile/password", SIGNED_IN, people_pages.change_password),
    Page("GET", "/profile/codes", SIGNED_IN, code_pages.show),
    Page("POST", "/profile/codes", SIGNED_IN, code_pages.turn_on),
    Page("POST", "/profile/codes/off", SIGNED_IN, code_pages.turn_off),
    Page("POST", "/profile/codes/recovery", SIGNED_IN, code_pages.renew),
    Page("GET", "/profile/passkeys", SIGNED_IN, passkey_pages.show),
    Page("POST", "/profile/passkeys", SIGNED_IN, passkey_pages.add),
    Page("POST", "/profile/passkeys/{passkey_id}/remove", SIGNED_IN, passkey_pages.remove),
    Page("POST", "/profile/openid", SIGNED_IN, openid_pages.begin_link),
    Page("POST", "/profile/openid/off", SIGNED_IN, openid_pages.unlink),
    Page("POST", "/profile/sessions/end-others", SIGNED_IN, people_pages.end_other_sessions),
    Page("POST", "/profile/sessions/{session_id}/end", SIGNED_IN, people_pages.end_session),
    Page("GET", "/operator", OPERATORS, operator_overview_pages.overview, "Service"),
    Page("GET", "/operator/accounts", OPERATORS, operator_account_pages.accounts, "Accounts"),
    Page("GET", "/operator/accounts/{id}", OPERATORS, operator_account_pages.account),
    Page("GET", "/operator/accounts/{id}/refusals", OPERATORS, error_pages.for_operators),
    Page("POST", "/operator/accounts/{id}/limits", SUPPORT, operator_account_pages.set_limits),
    Page("POST", "/operator/accounts/{id}/active", SUPPORT, operator_account_pages.set_active),
    Page("POST", "/operator/accounts/{id}/notes", WRITERS, operator_account_pages.add_note),
    Page("POST", "/operator/accounts/{id}/credit", FINANCE, operator_account_pages.credit),
    Page("POST", "/operator/accounts/{id}/attempts/{attempt_id}/end", FINANCE, operator_account_pages.end_attempt),
    Page("GET", "/operator/people", OPERATORS, operator_people_pages.search, "People"),
    Page("GET", "/operator/people/{person_id}", OPERATORS, operator_people_pages.show),
    Page("POST", "/operator/people/{person_id}/unlock", SUPPORT, operator_people_pages.unlock),
    Page("POST", "/operator/people/{person_id}/reset", SUPPORT, operator_people_pages.reset),
    Page("POST", "/operator/people/{person_id}/codes", SUPPORT, operator_people_pages.codes_off),
    Page("POST", "/operator/people/{person_id}/sessions", SUPPORT, operator_people_pages.end_sessions),
    Page("POST", "/operator/people/{person_id}/suspended", SUPPORT, operator_people_pages.suspend),
    Page("GET", "/operator/live", OPERATORS, live_pages.show, "Live"),
    Page("GET", "/operator/models", OPERATORS, operator_model_pages.models, "Models"),
    Page("GET", "/operator/models/{model}", OPERATORS, operator_model_pages.model),
    Page("POST", "/operator/models/{model}/canary", SUPPORT, operator_model_pages.canary),
    Page("POST", "/operator/models/{model}/promote", SUPPORT, operator_model_pages.promote),
    Page("POST", "/operator/models/{model}/rollback", SUPPORT, operator_model_pages.roll_back),
    Page("POST", "/operator/models/{model}/price", FINANCE, operator_model_pages.price),
    Page("GET", "/operator/revenue", OPERATORS, operator_overview_pages.revenue, "Revenue"),
    Page("GET", "/operator/revenue.csv", OPERATORS, operator_overview_pages.revenue_csv),
    Page("GET", "/operator/credits", OPERATORS, operator_pages.pending, "Credits"),
    Page("POST", "/operator/credits/{pending_id}/approve", FINANCE, operator_pages.approve),
    Page("POST", "/operator/credits/{pending_id}/reject", FINANCE, operator_pages.reject),
    Page("GET", "/operator/notices", OPERATORS, operator_pages.notices, "Notices"),
    Page("POST", "/operator/notices", SUPPORT, operator_pages.publish_notice),
    Page("POST", "/operator/notices/{notice_id}/end", SUPPORT, operator_pages.end_notice),
    Page("GET", "/operator/audit", OPERATORS, operator_pages.audit, "Audit"),
    Page("GET", "/operator/books", OPERATORS, operator_pages.books, "Accounting"),
    Page("GET", "/operator/api", OPERATORS, reference_pages.show, "API reference"),
    Page("GET", "/operator/api.json", OPERATORS, reference_pages.document),
    Page("GET", "/accounts/{account_id}", EVERY_MEMBER, overview_pages.overview, "Overview"),
    Page("POST", "/accounts/{account_id}/first-steps/dismiss", EVERY_MEMBER, overview_pages.dismiss),
    Page("GET", "/accounts/{account_id}/playground", KEY_HOLDERS, playground_pages.playground, "Playground"),
    Page("POST", "/accounts/{account_id}/playground/key", KEY_HOLDERS, playground_pages.make_key),
    Page("GET", "/accounts/{account_id}/playground/requests/{request_id}", KEY_HOLDERS, playground_pages.charged),
    Page("GET", "/accounts/{account_id}/keys", KEY_HOLDERS, account_pages.keys, "API keys"),
    Page("POST", "/accounts/{account_id}/keys", KEY_HOLDERS, account_pages.create_key),
    Page("GET", "/accounts/{account_id}/keys/{key_id}", KEY_HOLDERS, account_pages.show_key),
    Page("POST", "/accounts/{account_id}/keys/{key_id}", KEY_HOLDERS, account_pages.update_key),
    Page("POST", "/accounts/{account_id}/keys/{key_id}/revoke", KEY_HOLDERS, account_pages.revoke_key),
    Page("POST", "/accounts/{account_id}/keys/{key_id}/rotate", KEY_HOLDERS, account_pages.rotate_key),
    Page("GET", "/accounts/{account_id}/usage", EVERY_MEMBER, usage_pages.usage, "Usage"),
    Page("GET", "/accounts/{account_id}/usage.csv", EVERY_MEMBER, usage_pages.csv),
    Page("GET", "/accounts/{account_id}/requests", EVERY_MEMBER, request_pages.requests, "Requests"),
    Page("GET", "/accounts/{account_id}/requests.csv", EVERY_MEMBER, request_pages.csv),
    Page("GET", "/accounts/{account_id}/requests/{request_id}", EVERY_MEMBER, request_pages.request),
    Page("GET", "/accounts/{account_id}/errors", EVERY_MEMBER, error_pages.of_account),
    Page("GET", "/accounts/{account_id}/billing", PAYERS, billing_pages.billing, "Billing"),
    Page("POST", "/accounts/{account_id}/billing", PAYERS, payment_pages.add_funds),
    Page("POST", "/accounts/{account_id}/billing/recharge", PAYERS, recharge_pages.change),
    Page("POST", "/accounts/{account_id}/billing/recharge/method", PAYERS, recharge_pages.save_method),
    Page("POST", "/accounts/{account_id}/billing/recharge/resume", PAYERS, recharge_pages.resume),
    Page("POST", "/accounts/{account_id}/billing/recharge/off", PAYERS, recharge_pages.stop),
    Page("GET", "/accounts/{account_id}/billing/details", PAYERS, billing_pages.details),
    Page("POST", "/accounts/{account_id}/billing/details", PAYERS, billing_pages.set_details),
    Page("GET", "/accounts/{account_id}/invoices/{entry_id}.pdf", PAYERS, billing_pages.invoice),
    Page("GET", "/accounts/{account_id}/statements/{month}.pdf", PAYERS, billing_pages.statement_file),
    Page("GET", "/accounts/{account_id}/statements/{month}", PAYERS, billing_pages.statement),
    Page("GET", "/accounts/{account_id}/alerts", PAYERS, alert_pages.show, "Alerts"),
    Page("POST", "/accounts/{account_id}/alerts", PAYERS, alert_pages.create),
    Page("POST", "/accounts/{account_id}/alerts/{alert_id}/remove", PAYERS, alert_pages.remove),
    Page("GET", "/accounts/{account_id}/members", OWNERS, member_pages.members, "Members"),
    Page("POST", "/accounts/{account_id}/members", OWNERS, member_pages.invite),
    Page("POST", "/accounts/{account_id}/members/{user_id}", OWNERS, member_pages.change),
    Page("POST", "/accounts/{account_id}/members/invitations/{invitation_id}/revoke", OWNERS, member_pages.revoke),
    Page("GET", "/accounts/{account_id}/management-keys", OWNERS, management_pages.show, "Settings"),
    Page("POST", "/accounts/{account_id}/management-keys", OWNERS, management_pages.create),
    Page("POST", "/accounts/{account_id}/management-keys/{key_id}/revoke", OWNERS, management_pages.revoke),
    Page("GET", "/accounts/{account_id}/docs", EVERY_MEMBER, account_pages.docs),
)


async def missing(_: Visit) -> Response:
    raise Refused(404, "There is no such page.")


def build_console(console: Console) -> FastAPI:
    """Builds the application. Each page is open only to the roles of its rule."""
    console.pages = PAGES
    respond = responder(console, Page("GET", "", ANYONE, missing))

    async def no_page(request: Request, _: Exception) -> Response:
        root = str(request.scope.get("root_path", ""))
        if request.url.path == root:  # Serve also passes on the route prefix without a slash
            return RedirectResponse(f"{root}/", headers=HEADERS)
        return await respond(request)

    app = FastAPI(title="console", openapi_url=None, redirect_slashes=False, exception_handlers={404: no_page})
    for page in PAGES:
        app.add_api_route(page.path, responder(console, page), methods=[page.method], response_model=None)
    return app
