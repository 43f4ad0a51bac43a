"""The ASGI application of the console."""

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
from serve_app.console.web import HEADERS, Console, Handler, Visit, responder


def static(name: str) -> Handler:
    async def send(_: Visit) -> Response:
        return FileResponse(Path(__file__).parent / name, headers={"cache-control": "max-age=3600"})

    return send


PAGES: Final[dict[str, Handler]] = {
    "GET /static/console.css": static("console.css"),
    "GET /static/playground.js": static("playground.js"),
    "GET /static/copy.js": static("copy.js"),
    "GET /sign-in": people_pages.show_sign_in,
    "POST /sign-in": people_pages.sign_in,
    "GET /sign-in/openid": openid_pages.begin_sign_in,
    "GET /sign-in/openid/return": openid_pages.come_back,
    "GET /invitations/{token}": people_pages.show_invitation,
    "POST /invitations/{token}": people_pages.accept,
    "POST /invitations/{token}/openid": openid_pages.begin_accept,
    "POST /payments/{provider}": payment_pages.report,
    "POST /invitations/{token}/join": people_pages.join,
    "GET /": account_pages.home,
    "POST /sign-out": people_pages.sign_out,
    "GET /profile": people_pages.profile,
    "POST /profile/password": people_pages.change_password,
    "POST /profile/totp": people_pages.totp_on,
    "POST /profile/totp/off": people_pages.totp_off,
    "POST /profile/openid": openid_pages.begin_link,
    "POST /profile/openid/off": openid_pages.unlink,
    "POST /profile/sessions/{session_id}/end": people_pages.end_session,
    "GET /operator/accounts": operator_pages.accounts,
    "GET /operator/accounts/{id}": operator_pages.account,
    "POST /operator/accounts/{id}/limits": operator_pages.set_limits,
    "POST /operator/accounts/{id}/active": operator_pages.set_active,
    "POST /operator/accounts/{id}/credit": operator_pages.credit,
    "POST /operator/accounts/{id}/attempts/{attempt_id}/end": operator_pages.end_attempt,
    "GET /operator/credits": operator_pages.pending,
    "POST /operator/credits/{pending_id}/approve": operator_pages.approve,
    "POST /operator/credits/{pending_id}/reject": operator_pages.reject,
    "GET /operator/audit": operator_pages.audit,
    "GET /operator/books": operator_pages.books,
    "GET /operator/live": live_pages.show,
    "GET /accounts/{account_id}": account_pages.overview,
    "GET /accounts/{account_id}/docs": account_pages.docs,
    "GET /accounts/{account_id}/keys": account_pages.keys,
    "POST /accounts/{account_id}/keys": account_pages.create_key,
    "POST /accounts/{account_id}/keys/{key_id}/revoke": account_pages.revoke_key,
    "POST /accounts/{account_id}/keys/{key_id}/rotate": account_pages.rotate_key,
    "GET /accounts/{account_id}/playground": playground_pages.playground,
    "POST /accounts/{account_id}/playground/key": playground_pages.make_key,
    "GET /accounts/{account_id}/playground/requests/{request_id}": playground_pages.charged,
    "GET /accounts/{account_id}/usage": usage_pages.usage,
    "GET /accounts/{account_id}/usage/{month}.csv": usage_pages.csv,
    "GET /accounts/{account_id}/requests": usage_pages.requests,
    "GET /accounts/{account_id}/billing": billing_pages.billing,
    "POST /accounts/{account_id}/billing": payment_pages.add_funds,
    "POST /accounts/{account_id}/billing/recharge": recharge_pages.change,
    "POST /accounts/{account_id}/billing/recharge/method": recharge_pages.save_method,
    "POST /accounts/{account_id}/billing/recharge/resume": recharge_pages.resume,
    "POST /accounts/{account_id}/billing/recharge/off": recharge_pages.stop,
    "GET /accounts/{account_id}/statements/{month}": billing_pages.statement,
    "GET /accounts/{account_id}/alerts": alert_pages.show,
    "POST /accounts/{account_id}/alerts": alert_pages.create,
    "POST /accounts/{account_id}/alerts/{alert_id}/remove": alert_pages.remove,
    "GET /accounts/{account_id}/management-keys": management_pages.show,
    "POST /accounts/{account_id}/management-keys": management_pages.create,
    "POST /accounts/{account_id}/management-keys/{key_id}/revoke": management_pages.revoke,
    "GET /accounts/{account_id}/members": member_pages.members,
    "POST /accounts/{account_id}/members": member_pages.invite,
    "POST /accounts/{account_id}/members/{user_id}": member_pages.change,
    "POST /accounts/{account_id}/members/invitations/{invitation_id}/revoke": member_pages.revoke,
}


async def no_page(request: Request, _: Exception) -> Response:
    """Serve hands over the bare prefix as a path of its own."""
    root = str(request.scope.get("root_path", ""))
    if request.url.path == root:
        return RedirectResponse(f"{root}/", headers=HEADERS)
    return PlainTextResponse("There is no such page.\n", 404, headers=HEADERS)


def build_console(console: Console) -> FastAPI:
    """Each page behind its rule. Raises KeyError for a page without one."""
    app = FastAPI(title="console", openapi_url=None, redirect_slashes=False, exception_handlers={404: no_page})
    for route, handler in PAGES.items():
        method, path = route.split()
        app.add_api_route(path, responder(console, method, path, handler), methods=[method], response_model=None)
    return app
