"""Pages for operators about accounts: search, one account with its forms, and its recent errors."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final
from urllib.parse import urlencode

from fastapi.responses import Response

from serve_app.console import error_pages
from serve_app.console.audit_sentences import ids_in, sentence
from serve_app.console.key_names import is_playground
from serve_app.console.web import Refused, Visit
from serve_app.contracts import commands, operators
from serve_app.contracts.books import UsageRow
from serve_app.contracts.calls import Unavailable
from serve_app.contracts.errors import AccountNotFound, InvalidAmount, LedgerError
from serve_app.contracts.limits import ACCOUNT_LIMITS
from serve_app.contracts.money import parse_amount
from serve_app.contracts.people import ListPeople
from serve_app.contracts.periods import period_at
from serve_app.contracts.recharges import ORDER_S, EndAttempt, ShowRecharge
from serve_app.contracts.units import DAY_S

PAGE: Final = 50
SPENDING_DAYS: Final = 30
STATES: Final = {"": "Any status", "active": "Active", "suspended": "Suspended"}
SPENDING: Final = {"": "Any amount", "yes": "More than zero", "no": "Nothing"}
CREDITS: Final = {"top_up": "Payment", "grant": "Credit"}
ENTRIES: Final = {"top_up": "Payment", "grant": "Credit", "correction": "Correction", "expiry": "Expired credit"}
LABELS: Final = {
    "rpm": "Requests per minute",
    "tpm": "Tokens per minute",
    "concurrency": "Concurrent requests",
    "weight": "Weight in the queue",
}
SHOWN_ERRORS: Final = 5  # rows


async def accounts(visit: Visit) -> Response:
    query, error = visit.request.query_params, ""
    text, state, spending = query.get("search", "")[:100], query.get("state", ""), query.get("spending", "")
    below, typed = None, query.get("below", "").strip()
    if typed:
        try:
            below = parse_amount(typed)
        except InvalidAmount as problem:
            error = str(problem)
    since = period_at("day", visit.console.now() - (SPENDING_DAYS - 1) * DAY_S).name
    order = query.get("order", "")
    order = order if order in operators.ORDERS else ""
    page = await visit.console.books.run(
        operators.SearchAccounts(
            text,
            PAGE,
            {"active": True, "suspended": False}.get(state),
            below,
            since,
            {"yes": True, "no": False}.get(spending),
            query.get("after") or None,
            order or operators.ORDERS[0],
        )
    )
    today = period_at("day", visit.console.now()).name
    ids = tuple(one.account.account_id for one in page.rows)
    used_today = await visit.console.books.run(operators.SumAccountDays(ids, today, today)) if ids else []
    chosen = {"search": text, "state": state, "below": typed, "spending": spending, "order": order}
    given = {name: value for name, value in chosen.items() if value}
    return visit.page(
        "operator_accounts.html",
        accounts=page.rows,
        spent_today={row.account_id: row.charged for row in used_today},
        chosen=chosen,
        is_filtered=any(value for name, value in given.items() if name != "order"),
        orders=[(one, one.capitalize()) for one in operators.ORDERS],
        states=STATES,
        spendings=SPENDING,
        problem=error,
        next=None if page.next is None else "?" + urlencode(given | {"after": page.next}),
    )


async def account(visit: Visit, failed: str = "", error: Refused | LedgerError | None = None) -> Response:
    """Shows an account. `failed` is the form, or the field, whose `error` the page shows."""
    console, wanted = visit.console, visit.request.path_params["id"]
    run, now = console.books.run, visit.console.now()
    try:
        shown, usage = await run(commands.ShowAccount(wanted))
    except AccountNotFound:
        raise Refused(404, f"There is no account {wanted!r}: search by name or id.") from None
    today = period_at("day", now).name
    since = period_at("day", now - (SPENDING_DAYS - 1) * DAY_S).name
    days, keys, people, entries, notes, log, recharge, status, errors, used = await asyncio.gather(
        run(operators.SumAccountDays((wanted,), since, today)),
        run(commands.ListKeys(wanted)),
        run(ListPeople(wanted)),
        run(operators.ListEntries(wanted, 10)),
        run(operators.ListNotes(wanted)),
        run(commands.ListAudit(wanted, limit=50)),
        run(ShowRecharge(wanted)),
        _status(visit, wanted),
        error_pages.read(visit, wanted, now - DAY_S, now),
        run(commands.SumUsage(wanted, day_from=since, day_to=today, group_by=("key", "day"))),
    )
    await run(commands.RecordAudit(visit.audit, "read_account", wanted, wanted))
    changes = [one for one in log if not one.action.startswith("read_")][:10]
    names = await run(operators.NameSubjects(ids_in(changes)))
    return visit.page(
        "operator_account.html",
        200 if error is None else getattr(error, "status", 422),
        account=shown,
        balance=shown.available(now),
        usage=usage,
        days=days,
        spent=sum(row.charged for row in days),
        spent_today=sum(row.charged for row in days if row.day == today),
        keys=sorted(keys, key=is_playground),
        key_use=_use(used),
        people=people[0],
        invitations=people[1],
        entries=entries,
        entry_kinds=ENTRIES,
        notes=notes,
        limits=[(name, LABELS.get(name, name), shown.limits.get(name)) for name in ACCOUNT_LIMITS],
        current=status,
        errors=None if errors is None else error_pages.grouped(errors[::-1])[:SHOWN_ERRORS],
        **error_pages.numbers(errors),
        key_names=error_pages.key_names(keys, people[0]),
        labels=LABELS,
        credits=CREDITS,
        alone=console.credit_alone,
        changes=[(one.at, sentence(one, names, shown.currency)) for one in changes],
        unknown=[one for one in recharge[1] if one.state == "open"],
        overdue=now - ORDER_S,
        failed=failed,
        problem="" if error is None else str(error),
        form=visit.form,
        section="/operator/accounts",
    )


def _use(rows: Sequence[UsageRow]) -> dict[str, UsageRow]:
    """Returns the sum of each key's charges, with the last day of its use."""
    uses: dict[str, UsageRow] = {}
    for row in rows:
        before = uses.get(row.key_id or "")
        charged = row.charged + (before.charged if before else 0)
        uses[row.key_id or ""] = replace(row, charged=charged, day=max(row.day or "", (before and before.day) or ""))
    return uses


async def _status(visit: Visit, account_id: str) -> Any:
    """Returns the account's current limits and holds; None while no limiter answers."""
    try:
        return await visit.console.status_of(account_id)
    except Unavailable:
        return None


async def set_limits(visit: Visit) -> Response:
    changes = dict[str, int | None]()
    for name in ACCOUNT_LIMITS:
        text = visit.form.get(name, "").strip().replace(",", "")
        if text and not (text.isascii() and text.isdigit() and len(text) <= 13):
            return await account(visit, name, Refused(422, f"{LABELS.get(name, name)} must be a whole number."))
        changes[name] = int(text) if text else None
    command = commands.SetLimits(visit.request.path_params["id"], changes, visit.audit)
    return await _done(visit, "limits", command, "Limits changed")


async def set_active(visit: Visit) -> Response:
    is_active = visit.form.get("active") == "yes"
    command = commands.SetActive(visit.request.path_params["id"], is_active, visit.audit)
    return await _done(visit, "active", command, "Account reactivated" if is_active else "Account suspended")


async def credit(visit: Visit) -> Response:
    """Books the credit immediately. Above the limit of a single operator, requests another operator's approval."""
    console, wanted, kind = visit.console, visit.request.path_params["id"], visit.form.get("kind", "")
    memo = visit.form.get("memo", "").strip()
    once = visit.form.get("once", "") or secrets.token_hex(16)  # a form that is sent twice credits once
    try:
        if kind not in CREDITS or not memo:
            raise Refused(422, "Choose a kind, and enter the reason for the credit.")
        amount = parse_amount(visit.form.get("amount", "").strip())
        command = operators.AskCredit(wanted, amount, kind, memo, visit.audit, console.credit_alone, once)  # type: ignore[arg-type]
        asked = await console.books.run(command)
    except (Refused, LedgerError) as error:
        return await account(visit, "credit", error)
    if asked.booked:
        return visit.go(f"/operator/accounts/{wanted}", done="Credit booked")
    return visit.go("/operator/credits", done="Credit requested: another operator must approve it")


async def add_note(visit: Visit) -> Response:
    wanted, text = visit.request.path_params["id"], visit.form.get("text", "")
    command = operators.AddNote(wanted, text, visit.audit, visit.form.get("once", ""))
    return await _done(visit, "note", command, "Note added")


async def end_attempt(visit: Visit) -> Response:
    wanted, attempt_id = visit.request.path_params["id"], visit.request.path_params["attempt_id"]
    await visit.console.books.run(EndAttempt(wanted, attempt_id, visit.audit))
    return visit.go(f"/operator/accounts/{wanted}", done="Recharge attempt ended")


async def _done(visit: Visit, form: str, command: commands.Command[Any], done: str) -> Response:
    """Runs a form's command. Shows an error on the form's page."""
    try:
        await visit.console.books.run(command)
    except AccountNotFound as error:
        raise Refused(422, str(error)) from None
    except LedgerError as error:
        return await account(visit, form, error)
    return visit.go(f"/operator/accounts/{visit.request.path_params['id']}", done=done)
