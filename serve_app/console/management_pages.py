"""An account's management keys, with which programs use `/account` of the API."""

from __future__ import annotations

from fastapi.responses import Response

from serve_app.console.account_pages import last_moment
from serve_app.console.web import Refused, Visit
from serve_app.contracts import management
from serve_app.contracts.key_format import MANAGEMENT, digest, hint, new_key


async def show(visit: Visit) -> Response:
    account_id = visit.request.path_params["account_id"]
    found = await visit.console.books.run(management.ListManagementKeys(account_id))
    return visit.page("management_keys.html", keys=found)


async def create(visit: Visit) -> Response:
    console, account_id = visit.console, visit.request.path_params["account_id"]
    key, name = new_key(MANAGEMENT), visit.form.get("name", "").strip()
    expires_at = last_moment(visit.form.get("expires", ""))
    command = management.CreateManagementKey(account_id, name, digest(key), hint(key), expires_at, visit.audit)
    await console.books.run(command)
    base = f"{visit.origin}/v1"
    return visit.page("management_key_made.html", 201, key=key, name=name, base=base)


async def revoke(visit: Visit) -> Response:
    account_id, key_id = (visit.request.path_params[name] for name in ("account_id", "key_id"))
    found = await visit.console.books.run(management.ListManagementKeys(account_id))
    if key_id not in {key.key_id for key in found}:
        raise Refused(404, "This account has no such management key.")
    await visit.console.books.run(management.RevokeManagementKey(account_id, key_id, visit.audit))
    return visit.go(f"/accounts/{account_id}/management-keys", done="Management key revoked")
