"""A person's accounts, an account's API keys, and its quick start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any, Final

from fastapi.responses import Response

from serve_app.console.date_range import day_named
from serve_app.console.key_names import is_playground
from serve_app.console.web import Refused, Visit
from serve_app.contracts import commands
from serve_app.contracts.books import KeySnapshot
from serve_app.contracts.calls import Unavailable
from serve_app.contracts.errors import InvalidAmount
from serve_app.contracts.key_format import digest, hint, new_key
from serve_app.contracts.limits import KEY_LIMITS
from serve_app.contracts.money import NANO_PER_UNIT, parse_amount
from serve_app.contracts.people import ListPeople
from serve_app.contracts.periods import period_at
from serve_app.contracts.units import DAY_S

#: Labels of the limits in forms.
LIMIT_LABELS: Final = {"rpm": "Requests per minute", "tpm": "Tokens per minute", "concurrency": "Concurrent requests"}
LATEST: Final = 500  # maximum requests of the last 24 hours in which to search for the last use of the keys
CHART_DAYS: Final = 30
#: Seconds during which a replaced key keeps working, by option of the form.
OVERLAPS: Final = {"1 day": DAY_S, "1 hour": 3600.0, "7 days": 7 * DAY_S, "0 minutes": 0.0}


async def home(visit: Visit) -> Response:
    """Redirects to the person's only account, or shows a choice."""
    if len(visit.me.roles) == 1:
        return visit.go(f"/accounts/{next(iter(visit.me.roles))}")
    return await accounts(visit)


async def accounts(visit: Visit) -> Response:
    run = visit.console.books.run
    found = [(await run(commands.GetAccount(account_id)), role) for account_id, role in visit.me.roles.items()]
    return visit.page("home.html", accounts=found)


async def docs(visit: Visit) -> Response:
    """Shows the first steps, with the URL that the visitor uses."""
    try:
        models = await visit.console.models()
    except Unavailable:
        models = []
    model, base = next(iter(models), "MODEL"), f"{visit.origin}/v1"
    return visit.page("docs.html", models=models, model=model, base=base, key="YOUR_KEY")


async def keys(visit: Visit) -> Response:
    run, account_id = visit.console.books.run, visit.request.path_params["account_id"]
    now, month = visit.console.now(), period_at("month", visit.console.now()).name
    used: dict[str | None, str] = {}
    spent: Counter[str | None] = Counter()
    for row in await run(commands.SumUsage(account_id, group_by=("key", "day"))):
        used[row.key_id] = max(used.get(row.key_id, ""), row.day or "")
        spent[row.key_id] += row.charged if (row.day or "").startswith(month) else 0
    latest = await run(commands.SearchRequests(account_id, now - DAY_S, limit=LATEST))
    found = [key for key in await run(commands.ListKeys(account_id)) if not is_playground(key)]
    revoked = [key for key in found if not key.active]
    shows_revoked = "revoked" in visit.request.query_params
    return visit.page(
        "keys.html",
        keys=[key for key in found[::-1] if key.active or shows_revoked],
        revoked=len(revoked),
        shows_revoked=shows_revoked,
        used=used,
        used_at={row.key_id: row.finished_at for row in latest.rows[::-1]},
        spent=spent,
        makers=await _makers(visit, account_id),
        account=await run(commands.GetAccount(account_id)),
        models=await visit.console.models(),
        limits=LIMIT_LABELS,
        overlaps=OVERLAPS,
    )


async def show_key(visit: Visit) -> Response:
    """Shows the form that changes a key."""
    key = await _key(visit)
    if not key.active:
        raise Refused(404, "This key is revoked.")
    models = list(dict.fromkeys([*await visit.console.models(), *(key.models or ())]))
    run, now = visit.console.books.run, visit.console.now()
    days = [period_at("day", now - back * DAY_S).name for back in range(CHART_DAYS - 1, -1, -1)]
    rows = await run(commands.SumUsage(key.account_id, key_id=key.key_id, day_from=days[0], group_by=("day",)))
    last_day = max((row.day or "" for row in rows), default="")
    used_at = await _last_use(visit, key, last_day) if last_day else None
    return visit.page(
        "key.html",
        key=key,
        account=await run(commands.GetAccount(key.account_id)),
        models=models,
        limits=LIMIT_LABELS,
        overlaps=OVERLAPS,
        maker=(await _makers(visit, key.account_id)).get(key.key_id),
        used_at=used_at,
        used_on=last_day,
        days=days,
        usage=(usage := {row.day: row for row in rows}),
        spend_values=[usage[day].charged / NANO_PER_UNIT if day in usage else 0.0 for day in days],
    )


async def update_key(visit: Visit) -> Response:
    key = await _key(visit)
    terms = await _terms(visit, also=key.models or ())
    empty: dict[str, Any] = dict.fromkeys(("models", "tags", "addresses", "budget", "budget_period", *KEY_LIMITS))
    changes = {"name": visit.form.get("name", "").strip()} | empty | {"expires_at": None} | terms
    await visit.console.books.run(commands.UpdateKey(key.key_id, changes, visit.audit))
    return visit.go(f"/accounts/{key.account_id}/keys", done="Key saved")


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
    return visit.go(f"/accounts/{visit.request.path_params['account_id']}/keys", done="Key revoked")


async def _makers(visit: Visit, account_id: str) -> dict[str, str]:
    """Returns the creator's name by key, without keys of non-members: the account must not see who created these."""
    makers = await visit.console.books.run(commands.KeyMakers(account_id))
    members, _ = await visit.console.books.run(ListPeople(account_id))
    names = {person.email: person.name or person.email for person in members}
    return {key_id: names[maker] for key_id, maker in makers.items() if maker in names}


async def _last_use(visit: Visit, key: KeySnapshot, day: str) -> float | None:
    """Returns when the key was last used on `day`; None if the account sent too many other requests later that day."""
    on = day_named(day)
    search = commands.SearchRequests(key.account_id, on.begins, on.ends, key_ids=(key.key_id,), limit=1)
    found = (await visit.console.books.run(search)).rows
    return found[0].finished_at if found else None


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
    base = f"{visit.origin}/v1"
    return visit.page("key_made.html", 201, key=key, name=made.name, model=model, base=base, old_until=old_until)


async def _terms(visit: Visit, also: Collection[str] = ()) -> dict[str, Any]:
    """Returns the key's terms from the form. The form may name served models, and those in `also`.

    Raises Refused, InvalidAmount.
    """
    form, terms = visit.form, dict[str, Any]()
    if visit.form.get("any_model") == "no" and not visit.lists.get("model"):
        raise Refused(422, "Select at least one model, or allow all models.", "model")
    if (models := visit.lists.get("model")) and visit.form.get("any_model") != "yes":
        if not set(models) <= {*await visit.console.models(), *also}:
            raise Refused(422, "Choose models that are served.", "model")
        terms["models"] = tuple(models)
    if tags := [tag.strip() for tag in form.get("tags", "").split(",") if tag.strip()]:
        terms["tags"] = tags
    if addresses := form.get("addresses", "").replace(",", " ").split():
        terms["addresses"] = addresses
    for name in KEY_LIMITS:
        if text := form.get(name, "").strip():
            if not (text.isascii() and text.isdigit() and len(text) <= 13):
                raise Refused(422, f"{LIMIT_LABELS[name]}: type a whole number.", name)
            terms[name] = int(text)
    if text := form.get("budget", "").strip():
        try:
            budget = parse_amount(text)
        except InvalidAmount as error:
            raise Refused(422, str(error), "budget") from None
        terms |= {"budget": budget, "budget_period": form.get("budget_period", "month")}
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
        raise Refused(422, "Give the expiry as YYYY-MM-DD.", "expires") from None
    return begins.timestamp() + DAY_S
