"""The playground: its page, its key, and the charge of a turn."""

from __future__ import annotations

from typing import Any, Final

from fastapi.responses import JSONResponse, Response

from serve_app.api.doors import DOORS
from serve_app.api.tools_and_formats import TOOL_CHOICES
from serve_app.console import parameters
from serve_app.console.key_names import PLAYGROUND_S, is_playground, playground_name
from serve_app.console.web import Refused, Visit
from serve_app.contracts import commands
from serve_app.contracts.calls import Unavailable
from serve_app.contracts.key_format import digest, hint, new_key
from serve_app.contracts.money import format_amount, format_price

#: Formats that the script can write as code, by the path of their door.
_FORMATS: Final = {
    "/chat/completions": "Chat completions",
    "/responses": "Responses",
    "/messages": "Messages",
    "/completions": "Text completions",
}


async def playground(visit: Visit) -> Response:
    account = await visit.console.books.run(commands.GetAccount(visit.request.path_params["account_id"]))
    served = {door.path for door in DOORS}
    return visit.page(
        "playground.html",
        account=account,
        models=await visit.console.models(),
        offers=await _offers(visit),
        formats=[(path, name) for path, name in _FORMATS.items() if path in served],
        panel=parameters.panel(),
        tool_choices=list(TOOL_CHOICES),
    )


async def make_key(visit: Visit) -> Response:
    """Creates a key for one hour, and revokes the person's previous playground keys in this account."""
    console, account_id = visit.console, visit.request.path_params["account_id"]
    key, name = new_key(), playground_name(visit.me.email)
    known = await console.books.run(commands.ListKeys(account_id))
    before = [one for one in known if one.name == name and one.active and is_playground(one)]
    terms = {"expires_at": console.now() + PLAYGROUND_S}
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


async def _offers(visit: Visit) -> dict[str, dict[str, Any]]:
    """Returns what the page's script shows of each model; nothing while the gateway does not answer."""
    try:
        found = [] if visit.console.offers is None else await visit.console.offers()
    except Unavailable:
        found = []
    return {
        one.identifier: {
            "input": format_price(one.price.input),
            "cached": format_price(one.price.cached_input),
            "output": format_price(one.price.output),
            "context": one.context_length,
            "temperatures": dict(one.recommended_temperatures),
        }
        for one in found
    }
