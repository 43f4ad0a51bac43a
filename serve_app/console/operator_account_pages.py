"""Pages for operators about accounts: search, one account with its forms, and its recent errors."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import groupby
from typing import Any, Final
from urllib.parse import urlencode

from fastapi.responses import Response

from serve_app.console.audit_sentences import ids_in, sentence
from serve_app.console.key_names import is_playground, playground_name
from serve_app.console.web import Refused, Visit
from serve_app.contracts import commands, operators
from serve_app.contracts.books import KeySnapshot, UsageRow
from serve_app.contracts.calls import Unavailable
from serve_app.contracts.errors import AccountNotFound, InvalidAmount, LedgerError
from serve_app.contracts.limits import ACCOUNT_LIMITS
from serve_app.contracts.money import parse_amount
from serve_app.contracts.people import ListPeople, Person
from serve_app.contracts.periods import period_at
from serve_app.contracts.recharges import ORDER_S, EndAttempt, ShowRecharge
from serve_app.contracts.units import DAY_S, HOUR_S

PAGE: Final = 50
SPENDING_DAYS: Final = 30
STATES: Final = {"": "Any status", "active": "Active", "suspended": "Suspended"}
SPENDING: Final = {"": "Any", "yes": "Some", "no": "None"}
CREDITS: Final = {"top_up": "Payment", "grant": "Credit"}
ENTRIES: Final = {"top_up": "Payment", "grant": "Credit", "correction": "Correction", "expiry": "Expired credit"}
LABELS: Final = {
    "rpm": "Requests per minute",
    "tpm": "Tokens per minute",
    "concurrency": "Concurrent requests",
    "weight": "Priority under load",
}
SHOWN_ERRORS: Final = 5  # rows
MAX_ERRORS: Final = 200  # that a gateway returns
LIMIT_CODES: Final = ("requests", "tokens", "concurrency")  # of limits that operators set
OF_KEY: Final = "of this API key"  # in the reason, if the limit is the key's
AROUND_S: Final = 600.0  # before and after the time that an operator asks about
_NUMBER: Final = re.compile(r"\d[\d.,]*")
#: What a code means, for requests that were logged without a reason.
CODES: Final = {
    "requests": "More requests per minute than the limit.",
    "tokens": "Too many tokens per minute, or the model is busy.",
    "concurrency": "More requests at once than the limit.",
    "wrong_keys": "Too many requests with wrong API keys.",
    "insufficient_balance": "The account's balance did not cover the request.",
    "budget_exceeded": "The API key's budget was spent.",
    "invalid_api_key": "The API key is revoked or expired, or the account is suspended.",
    "address_not_allowed": "The API key may not be used from this address.",
    "model_not_found": "The model does not exist, or the API key may not use it.",
    "context_length_exceeded": "The prompt is longer than the model's context.",
    "overloaded": "The model had no capacity.",
    "overloaded_error": "The model had no capacity.",
    "server_error": "The service failed.",
    "invalid_format": "The body was not a valid request.",
    "invalid_parameter": "A parameter was out of range.",
}


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
        _errors(visit, wanted, now - DAY_S, now),
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
        errors=None if errors is None else _grouped(errors[::-1])[:SHOWN_ERRORS],
        **_numbers(errors),
        key_names=_key_names(keys, people[0]),
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


async def errors(visit: Visit) -> Response:
    """Shows the requests that were refused or failed: around the time in the query, or in the last 24 hours."""
    run, wanted = visit.console.books.run, visit.request.path_params["id"]
    try:
        shown = await run(commands.GetAccount(wanted))
    except AccountNotFound:
        raise Refused(404, f"There is no account {wanted!r}: search by name or id.") from None
    now, query, problem = visit.console.now(), visit.request.query_params, ""
    typed, code = query.get("at", "").strip(), query.get("code", "")[:100]
    begins, ends = now - DAY_S, now
    if typed:
        try:
            at = datetime.fromisoformat(typed).replace(tzinfo=UTC).timestamp()
            begins, ends = at - AROUND_S, at + AROUND_S
        except ValueError:
            problem = "Give the time as YYYY-MM-DDTHH:MM, in UTC."
    found = await _errors(visit, wanted, begins, ends)
    await run(commands.RecordAudit(visit.audit, "read_refusals", wanted, wanted, {"from": begins, "to": ends}))
    keys = await run(commands.ListKeys(wanted))
    return visit.page(
        "operator_errors.html",
        422 if problem else 200,
        account=shown,
        **_numbers(found),
        groups=None if found is None else _grouped([one for one in found[::-1] if code in ("", one["code"])]),
        counts=_counts(found or ()),
        chart=None if typed or not found else _by_hour(found, begins, ends),
        key_names=_key_names(keys, (await run(ListPeople(wanted)))[0]),
        at=typed,
        code=code,
        begins=begins,
        ends=ends,
        problem=problem,
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


def _key_names(keys: Sequence[KeySnapshot], people: Sequence[Person]) -> dict[str, str]:
    """Returns the names of keys by id. That of a playground names the person."""
    of_playgrounds = {playground_name(one.email): f"Playground ({one.name or one.email})" for one in people}
    return {key.key_id: of_playgrounds.get(key.name, key.name) if is_playground(key) else key.name for key in keys}


async def _status(visit: Visit, account_id: str) -> Any:
    """Returns the account's current limits and holds; None while no limiter answers."""
    try:
        return await visit.console.status_of(account_id)
    except Unavailable:
        return None


async def _errors(visit: Visit, account_id: str, begins: float, ends: float) -> list[dict[str, Any]] | None:
    """Returns the requests that were answered with an error, oldest first; None while no gateway answers."""
    given = {"account_id": account_id, "since": begins, "until": ends}
    try:
        found = await visit.console.administer_or_refuse("refusals", given)
    except (Refused, Unavailable):
        return None
    return [_error(line) for line in found["lines"]]


def _error(line: Mapping[str, Any]) -> dict[str, Any]:
    code = str(line.get("code") or "")
    model = None if line.get("model") in (None, "none") else line["model"]
    what = CODES.get(code)
    if code == "model_not_found":  # the log names only models that exist
        what = f"The API key may not use {model}." if model else "There is no model of this name."
    reason = str(line.get("reason") or what or code)
    status = line.get("status")
    return {
        "at": datetime.fromisoformat(str(line["time"])).timestamp(),
        "status": status,
        "is_refused": isinstance(status, int) and 400 <= status < 500,
        "code": code,
        "reason": reason,
        "why": what or reason,
        "model": model,
        "key": line.get("key"),
        "request_id": line.get("request_id"),
    }


def _numbers(errors: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    """Returns how many requests were refused and how many failed; None while no gateway answers."""
    if errors is None:
        return {"refused": None, "failures": None, "errors_are_all": True}
    refused = sum(one["is_refused"] for one in errors)
    return {"refused": refused, "failures": len(errors) - refused, "errors_are_all": len(errors) < MAX_ERRORS}


def _counts(errors: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns each reason with its number of errors, most frequent first, and whether a higher limit would help."""
    counts = Counter((one["status"], one["code"], one["why"]) for one in errors)
    of_account = {one["code"] for one in errors if one["code"] in LIMIT_CODES and OF_KEY not in one["reason"]}
    return [
        {"status": status, "code": code, "why": why, "number": number, "is_limit": code in of_account}
        for (status, code, why), number in counts.most_common()
    ]


def _grouped(errors: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Returns neighbours that differ only in numbers, such as the seconds to wait, as one group."""

    def alike(one: Mapping[str, Any]) -> tuple[Any, ...]:
        return one["status"], one["code"], _NUMBER.sub("#", one["reason"]), one["model"], one["key"]

    return [list(group) for _, group in groupby(errors, alike)]


def _by_hour(errors: Sequence[Mapping[str, Any]], begins: float, ends: float) -> dict[str, Any]:
    """Returns a chart of the errors in each hour (UTC), a series for each reason."""
    hours = range(int(begins // HOUR_S), int(ends // HOUR_S) + 1)
    counts = Counter((one["why"], int(one["at"] // HOUR_S)) for one in errors)
    names = [name for name, _ in Counter(one["why"] for one in errors).most_common()]
    return {
        "labels": [datetime.fromtimestamp(hour * HOUR_S, UTC).strftime("%Y-%m-%dT%H") for hour in hours],
        "series": [{"name": name.rstrip("."), "values": [counts[name, hour] for hour in hours]} for name in names],
        "type": "bar",
        "stacked": True,
    }


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
