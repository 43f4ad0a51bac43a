"""The playground: its page, its key, and the charge of a turn."""

from __future__ import annotations

from typing import Final

from fastapi.responses import JSONResponse, Response

from serve_app.api.doors import DOORS
from serve_app.console.web import Refused, Visit
from serve_app.contracts import commands
from serve_app.contracts.key_format import digest, hint, new_key
from serve_app.contracts.money import format_amount

KEY_S: Final = 3600.0
#: Formats that the script can write as code, by the path of their door.
_FORMATS: Final = {"/chat/completions": "Chat completions", "/responses": "Responses", "/messages": "Messages"}
#: The page's script calls the service's API like any client.
_ALLOWED: Final = "script-src 'self'; connect-src 'self'"


async def playground(visit: Visit) -> Response:
    served = {door.path for door in DOORS}
    formats = [(path, name) for path, name in _FORMATS.items() if path in served]
    return visit.page("playground.html", allowed=_ALLOWED, models=await visit.console.models(), formats=formats)


async def make_key(visit: Visit) -> Response:
    """Creates a key for one hour, and revokes the person's previous playground key in this account."""
    console, account_id = visit.console, visit.request.path_params["account_id"]
    key, name = new_key(), f"Playground of {visit.me.email}"[:100]
    before = [one for one in await console.books.run(commands.ListKeys(account_id)) if one.name == name and one.active]
    terms = {"expires_at": console.now() + KEY_S}
    await console.books.run(commands.CreateKey(account_id, name, digest(key), hint(key), terms, visit.audit))
    for one in before:
        await console.books.run(commands.RevokeKey(one.key_id, visit.audit))
    return JSONResponse({"key": key})


async def charged(visit: Visit) -> Response:
    account_id, request_id = (visit.request.path_params[name] for name in ("account_id", "request_id"))
    found = await visit.console.books.run(commands.FindRequest(request_id))
    if found is None or found.account_id != account_id:
        raise Refused(404, "This account has no such request.")
    return JSONResponse({"charged": format_amount(found.charged)})
