"""Pages for operators: accounts, credits that two operators approve, the audit log, and the ledger."""

from __future__ import annotations

import secrets
from typing import Final

from fastapi.responses import Response

from serve_app.console.web import Refused, Visit
from serve_app.contracts import commands, operators
from serve_app.contracts.calls import Unavailable
from serve_app.contracts.limits import ACCOUNT_LIMITS
from serve_app.contracts.money import format_amount, parse_amount
from serve_app.contracts.recharges import ORDER_S, EndAttempt, ShowRecharge

MAX_ACCOUNTS_FOUND: Final = 100
PAGE: Final = 100
CREDITS: Final = {"top_up": "paid", "grant": "given"}


async def accounts(visit: Visit) -> Response:
    text = visit.request.query_params.get("search", "")[:100]
    found = await visit.console.books.run(operators.SearchAccounts(text, MAX_ACCOUNTS_FOUND))
    return visit.page(
        "operator_accounts.html", accounts=found, search=text, most=MAX_ACCOUNTS_FOUND, now=visit.console.now()
    )


async def account(visit: Visit) -> Response:
    run, wanted = visit.console.books.run, visit.request.path_params["id"]
    shown, usage = await run(commands.ShowAccount(wanted))
    return visit.page(
        "operator_account.html",
        account=shown,
        balance=shown.available(visit.console.now()),
        usage=usage,
        keys=await run(commands.ListKeys(wanted)),
        limits=[(name, shown.limits.get(name)) for name in ACCOUNT_LIMITS],
        credits=CREDITS,
        alone=visit.console.credit_alone,
        log=await run(commands.ListAudit(wanted, limit=20)),
        unknown=[one for one in (await run(ShowRecharge(wanted)))[1] if one.state == "open"],
        overdue=visit.console.now() - ORDER_S,
    )


async def set_limits(visit: Visit) -> Response:
    wanted, changes = visit.request.path_params["id"], dict[str, int | None]()
    for name in ACCOUNT_LIMITS:
        text = visit.form.get(name, "").strip()
        if text and not (text.isascii() and text.isdigit() and len(text) <= 13):
            raise Refused(422, f"{name} must be a whole number.")
        changes[name] = int(text) if text else None
    await visit.console.books.run(commands.SetLimits(wanted, changes, visit.audit))
    return visit.go(f"/operator/accounts/{wanted}")


async def set_active(visit: Visit) -> Response:
    wanted = visit.request.path_params["id"]
    await visit.console.books.run(commands.SetActive(wanted, visit.form.get("active") == "yes", visit.audit))
    return visit.go(f"/operator/accounts/{wanted}")


async def credit(visit: Visit) -> Response:
    """Books the credit at once, or asks the other operators if it is above the limit of a single operator."""
    console, wanted, kind = visit.console, visit.request.path_params["id"], visit.form.get("kind", "")
    amount, memo = parse_amount(visit.form.get("amount", "").strip()), visit.form.get("memo", "").strip()
    if kind not in CREDITS or not memo:
        raise Refused(422, "Choose a kind, and enter the reason for the credit.")
    once = visit.form.get("once", "") or secrets.token_hex(16)  # a form that is sent twice credits once
    command = operators.AskCredit(wanted, amount, kind, memo, visit.audit, console.credit_alone, once)  # type: ignore[arg-type]
    asked = await console.books.run(command)
    return visit.go(f"/operator/accounts/{wanted}" if asked.booked else "/operator/credits")


async def end_attempt(visit: Visit) -> Response:
    wanted, attempt_id = visit.request.path_params["id"], visit.request.path_params["attempt_id"]
    await visit.console.books.run(EndAttempt(wanted, attempt_id, visit.audit))
    return visit.go(f"/operator/accounts/{wanted}")


async def pending(visit: Visit) -> Response:
    found = await visit.console.books.run(operators.ListPendingCredits())
    alone = format_amount(visit.console.credit_alone)
    return visit.page("operator_credits.html", pending=found, kinds=CREDITS, alone=alone)


async def approve(visit: Visit) -> Response:
    return await _decide(visit, approved=True)


async def reject(visit: Visit) -> Response:
    return await _decide(visit, approved=False)


async def _decide(visit: Visit, *, approved: bool) -> Response:
    command = operators.DecideCredit(visit.request.path_params["pending_id"], approved, visit.audit)
    if not await visit.console.books.run(command):
        raise Refused(409, "This credit has already been approved or rejected.")
    return visit.go("/operator/credits")


async def audit(visit: Visit) -> Response:
    query = visit.request.query_params
    after = query.get("after", "")
    if after and not (after.isascii() and after.isdigit() and len(after) < 19):
        raise Refused(404, "There is no such page.")
    wanted = commands.ListAudit(query.get("account") or None, int(after) if after else None, PAGE)
    found = await visit.console.books.run(wanted)
    last = found[-1].audit_id if len(found) == PAGE else None
    return visit.page("operator_audit.html", log=found, last=last, account=query.get("account", ""))


async def books(visit: Visit) -> Response:
    """Checks the changes since the last full check, and lists settlements that are not booked yet."""
    report = await visit.console.books.run(commands.CheckBooks())
    stuck = await visit.console.books.run(commands.ListStuck())
    try:
        gateways = (await visit.console.live())["gateways"]
    except Unavailable:
        gateways = None
    return visit.page("operator_books.html", report=report, stuck=stuck, gateways=gateways)
