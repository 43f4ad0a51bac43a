"""An account's alerts and its sent notices."""

from __future__ import annotations

import base64
import secrets
from typing import Final

from fastapi.responses import Response

from serve_app.console.notifier import words
from serve_app.console.web import Refused, Visit
from serve_app.contracts import notices
from serve_app.contracts.commands import GetAccount
from serve_app.contracts.money import parse_amount
from serve_app.storage.sealing import of_webhooks, seal
from serve_app.webhook_address import BadAddress, pinned

LATEST: Final = 50
#: The conditions of an alert in its form, by kind.
CHOICES: Final = (
    ("balance", "The balance falls below the amount"),
    ("day", "Daily spend reaches the amount"),
    ("month", "Monthly spend reaches the amount"),
    ("unusual", "Daily spend reaches the amount and three times the 7-day average"),
)


async def show(visit: Visit) -> Response:
    run, account_id = visit.console.books.run, visit.request.path_params["account_id"]
    told = await run(notices.ListNotices(account_id, LATEST))
    return visit.page(
        "alerts.html",
        alerts=await run(notices.ListAlerts(account_id)),
        told=[(notice, words(notice)) for notice in told],
        currency=(await run(GetAccount(account_id))).currency,
        choices=CHOICES,
        has_mail=visit.console.has_mail,
    )


async def create(visit: Visit) -> Response:
    account_id, target = visit.request.path_params["account_id"], visit.form.get("target", "").strip()
    is_webhook = notices.is_webhook(target)
    if is_webhook:
        try:
            await pinned(target, private=visit.console.private_webhooks)
        except BadAddress as error:
            raise Refused(422, str(error), "target") from None
    elif not visit.console.has_mail:
        raise Refused(422, "This service sends no email: enter the https URL of a webhook.", "target")
    secret = f"whsec_{base64.b64encode(secrets.token_bytes(32)).decode()}"
    threshold = parse_amount(visit.form.get("threshold", "").strip())
    kind = visit.form.get("kind", "")
    stored = seal(secret, visit.console.secret_keys, of_webhooks(account_id)) if is_webhook else ""
    command = notices.CreateAlert(account_id, kind, threshold, target, stored, visit.audit)
    made = await visit.console.books.run(command)
    if is_webhook:
        return visit.page("webhook_made.html", 201, alert=made, secret=secret)
    return visit.go(f"/accounts/{account_id}/alerts", done="Alert created")


async def remove(visit: Visit) -> Response:
    account_id, alert_id = (visit.request.path_params[name] for name in ("account_id", "alert_id"))
    await visit.console.books.run(notices.RemoveAlert(account_id, alert_id, visit.audit))
    return visit.go(f"/accounts/{account_id}/alerts", done="Alert removed")
