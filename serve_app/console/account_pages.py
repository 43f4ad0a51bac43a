"""An account's overview and its keys."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any, Final

from fastapi.responses import Response

from serve_app.console.web import WITH_COPY, Refused, Visit
from serve_app.contracts import commands
from serve_app.contracts.books import KeySnapshot, Outcome
from serve_app.contracts.calls import Unavailable
from serve_app.contracts.key_format import digest, hint, new_key
from serve_app.contracts.limiting import AccountStatus
from serve_app.contracts.limits import ACCOUNT_LIMITS, KEY_LIMITS
from serve_app.contracts.money import parse_amount
from serve_app.contracts.periods import period_at
from serve_app.contracts.units import DAY_S

_BURN_DAYS: Final = 7
STATUS_S: Final = 2.0
#: Seconds for which a replaced key keeps working, by choice.
OVERLAPS: Final = {"1 day": DAY_S, "1 hour": 3600.0, "7 days": 7 * DAY_S, "0 minutes": 0.0}


async def home(visit: Visit) -> Response:
    """Redirects to the person's only account, or shows a choice."""
    if len(visit.me.roles) == 1:
        return visit.go(f"/accounts/{next(iter(visit.me.roles))}")
    run = visit.console.books.run
    accounts = [(await run(commands.GetAccount(account_id)), role) for account_id, role in visit.me.roles.items()]
    return visit.page("home.html", accounts=accounts)


async def overview(visit: Visit) -> Response:
    run, now = visit.console.books.run, visit.console.now()
    account_id = visit.request.path_params["account_id"]
    today = period_at("day", now)
    first = period_at("day", now - (_BURN_DAYS - 1) * DAY_S).name
    account = await run(commands.GetAccount(account_id))
    days = await run(commands.SumUsage(account_id, day_from=first, group_by=("day",)))
    recent = await run(commands.ListUsage(account_id, time_from=today.begins))
    status = await _status(visit, account_id)
    burn = sum(row.charged for row in days) // _BURN_DAYS
    balance = account.available(now)
    return visit.page(
        "overview.html",
        account=account,
        balance=balance,
        burn=burn,
        days_left=balance // burn if burn else None,
        today=next((row for row in days if row.day == today.name), None),
        errors=sum(row.outcome is Outcome.FAILED for row in recent.rows),
        more=recent.next is not None,
        held=None if status is None else status.held,
        limits=[
            (name, account.limits.get(name, None if status is None else getattr(status.contract, name)))
            for name in ACCOUNT_LIMITS
        ],
        pressed=() if status is None else status.pressed,
    )


async def docs(visit: Visit) -> Response:
    """Shows the first steps, with the URL that the visitor uses."""
    try:
        models = await visit.console.models()
    except Unavailable:
        models = []
    model, base = next(iter(models), "MODEL"), f"{visit.origin}/v1"
    return visit.page("docs.html", allowed=WITH_COPY, models=models, model=model, base=base, key="YOUR_KEY")


async def _status(visit: Visit, account_id: str) -> AccountStatus | None:
    """Returns the account's state; None if the limiter does not answer, so the page shows the rest."""
    try:
        async with asyncio.timeout(STATUS_S):
            return await visit.console.status_of(account_id)
    except (Unavailable, TimeoutError):
        return None


async def keys(visit: Visit) -> Response:
    run, account_id = visit.console.books.run, visit.request.path_params["account_id"]
    used: dict[str | None, str] = {}
    for row in await run(commands.SumUsage(account_id, group_by=("key", "day"))):
        used[row.key_id] = max(used.get(row.key_id, ""), row.day or "")
    found = await run(commands.ListKeys(account_id))
    models = await visit.console.models()
    return visit.page(
        "keys.html",
        keys=found,
        used=used,
        models=models,
        limits=KEY_LIMITS,
        overlaps=OVERLAPS,
        now=visit.console.now(),
    )


async def create_key(visit: Visit) -> Response:
    account_id, name, key = visit.request.path_params["account_id"], visit.form.get("name", "").strip(), new_key()
    command = commands.CreateKey(account_id, name, digest(key), hint(key), await _terms(visit), visit.audit)
    return await _show_key(visit, key, await visit.console.books.run(command))


async def rotate_key(visit: Visit) -> Response:
    old, overlap = await _key(visit), OVERLAPS.get(visit.form.get("overlap", ""))
    if overlap is None or not old.active:
        raise Refused(422, "Choose an active key, and how long the old one keeps working.")
    key, until = new_key(), visit.console.now() + overlap
    command = commands.RotateKey(old.account_id, old.key_id, digest(key), hint(key), until, visit.audit)
    made = await visit.console.books.run(command)
    return await _show_key(visit, key, made, min(until, old.expires_at or until) if overlap else None)


async def revoke_key(visit: Visit) -> Response:
    await visit.console.books.run(commands.RevokeKey((await _key(visit)).key_id, visit.audit))
    return visit.go(f"/accounts/{visit.request.path_params['account_id']}/keys")


async def _key(visit: Visit) -> KeySnapshot:
    """Returns the key that the path names. Raises Refused."""
    account_id, key_id = visit.request.path_params["account_id"], visit.request.path_params["key_id"]
    for key in await visit.console.books.run(commands.ListKeys(account_id)):
        if key.key_id == key_id:
            return key
    raise Refused(404, "This account has no such key.")


async def _show_key(visit: Visit, key: str, made: KeySnapshot, old_until: float | None = None) -> Response:
    """Returns the page that shows a new key, once."""
    model = (made.models or await visit.console.models() or ["MODEL"])[0]
    page = {"key": key, "name": made.name, "model": model, "base": f"{visit.origin}/v1", "old_until": old_until}
    return visit.page("key_made.html", 201, allowed=WITH_COPY, **page)


async def _terms(visit: Visit) -> dict[str, Any]:
    """Returns the key's terms from the form. Raises Refused, InvalidAmount."""
    form, terms = visit.form, dict[str, Any]()
    if models := visit.lists.get("model"):
        if not set(models) <= set(await visit.console.models()):
            raise Refused(422, "Choose models that are served.")
        terms["models"] = tuple(models)
    if tags := [tag.strip() for tag in form.get("tags", "").split(",") if tag.strip()]:
        terms["tags"] = tags
    if addresses := form.get("addresses", "").replace(",", " ").split():
        terms["addresses"] = addresses
    for name in KEY_LIMITS:
        if text := form.get(name, "").strip():
            if not (text.isascii() and text.isdigit() and len(text) <= 13):
                raise Refused(422, f"{name} must be a whole number.")
            terms[name] = int(text)
    if text := form.get("budget", "").strip():
        terms |= {"budget": parse_amount(text), "budget_period": form.get("budget_period", "month")}
    if (expires_at := last_moment(form.get("expires", ""))) is not None:
        terms["expires_at"] = expires_at
    return terms


def last_moment(day: str) -> float | None:
    """Returns the end of a day, YYYY-MM-DD in UTC; None for an empty text. Raises Refused."""
    if not day.strip():
        return None
    try:
        begins = datetime.strptime(day.strip(), "%Y-%m-%d").replace(tzinfo=UTC)
    except ValueError:
        raise Refused(422, "Give the expiry as YYYY-MM-DD.") from None
    return begins.timestamp() + DAY_S
