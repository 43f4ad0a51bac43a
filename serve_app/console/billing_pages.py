"""An account's payments and grants, recharging, its details for invoices, and a statement for each month."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final

from fastapi.responses import Response

from serve_app.console.usage_pages import named_month
from serve_app.console.web import HEADERS, Refused, Visit
from serve_app.contracts import commands
from serve_app.contracts.billing import (
    BillingDetails,
    FindPayment,
    ListPayments,
    ReadBillingDetails,
    SetBillingDetails,
)
from serve_app.contracts.books import AccountSnapshot, Statement
from serve_app.contracts.money import listing_places, summing_places
from serve_app.contracts.periods import period_at
from serve_app.contracts.recharges import ShowRecharge
from serve_app.contracts.units import DAY_S
from serve_app.storage.pdf_documents import KINDS, Customer, invoice_number, invoice_pdf, statement_pdf

MAX_MONTHS: Final = 36
LATEST: Final = 5  # transactions on the billing page
AMOUNTS: Final = ("25.00", "50.00", "100.00", "250.00")  # proposed payments
PACE_DAYS: Final = 7  # completed UTC days, with the day of creation, whose average spending the forecast assumes
OUTCOMES: Final = {"open": "in progress", "succeeded": "paid", "failed": "failed"}


@dataclass(frozen=True, slots=True)
class Forecast:
    """A month's expected spending (nano-units): spending so far, and the average of the last full days for the rest."""

    spent: int  # spent so far in the month
    a_day: int
    days: int  # number of full days in the average
    total: int


async def billing(visit: Visit) -> Response:
    run, now = visit.console.books.run, visit.console.now()
    account_id = visit.request.path_params["account_id"]
    account = await run(commands.GetAccount(account_id))
    months = await _months(visit, account)
    shown = _shown(await run(commands.ShowStatement(account_id, next(iter(months)))))
    provider = visit.console.payments
    recharge, attempts = (None, []) if provider is None else await run(ShowRecharge(account_id))
    page = visit.page(
        "billing.html",
        account=account,
        balance=account.available(now),
        grants=[grant for grant in await run(commands.ListGrants(account_id)) if grant.left],
        **shown | {"movements": shown["movements"][: -LATEST - 1 : -1]},
        count=len(shown["movements"]),
        months=months,
        amounts=AMOUNTS,
        kinds=KINDS,
        now=now,
        forecast=await forecast_of(visit, account),
        details=await run(ReadBillingDetails(account_id)),
        payments=await run(ListPayments(account_id)),
        provider=provider,
        recharge=recharge,
        attempts=attempts,
        outcomes=OUTCOMES,
    )
    if provider is not None:  # the form redirects to the provider's page; browsers apply `form-action` to that, too
        policy = HEADERS["content-security-policy"].replace("form-action 'self'", f"form-action 'self' {provider.page}")
        page.headers["content-security-policy"] = policy
    return page


async def statement(visit: Visit) -> Response:
    run, account_id = visit.console.books.run, visit.request.path_params["account_id"]
    month = named_month(visit, visit.request.path_params["month"])
    account = await run(commands.GetAccount(account_id))
    found = await run(commands.ShowStatement(account_id, month.name))
    over = visit.console.now() >= month.ends
    return visit.page("statement.html", account=account, **_shown(found), kinds=KINDS, over=over)


async def statement_file(visit: Visit) -> Response:
    run = visit.console.books.run
    month = named_month(visit, visit.request.path_params["month"])
    customer = await _customer(visit)
    found = await run(commands.ShowStatement(customer.account_id, month.name))
    made = await asyncio.to_thread(statement_pdf, visit.console.seller, customer, found, visit.console.now())
    return _file(made, f"statement-{month.name}.pdf")


async def invoice(visit: Visit) -> Response:
    number = visit.request.path_params["entry_id"]
    customer = await _customer(visit)
    payment = None
    if number.isascii() and number.isdigit() and len(number) <= 18:
        payment = await visit.console.books.run(FindPayment(customer.account_id, int(number)))
    if payment is None:
        raise Refused(404, "This account has no such payment.")
    made = await asyncio.to_thread(invoice_pdf, visit.console.seller, customer, payment)
    return _file(made, f"invoice-{invoice_number(payment)}.pdf")


async def details(visit: Visit) -> Response:
    account_id = visit.request.path_params["account_id"]
    account = await visit.console.books.run(commands.GetAccount(account_id))
    known = await visit.console.books.run(ReadBillingDetails(account_id))
    billing = f"/accounts/{account_id}/billing"
    return visit.page("billing_details.html", section=billing, account=account, details=known)


async def set_details(visit: Visit) -> Response:
    account_id, form = visit.request.path_params["account_id"], visit.form
    given = BillingDetails(*(form.get(name, "") for name in ("company", "address", "tax_id", "email")))
    await visit.console.books.run(SetBillingDetails(account_id, given, visit.audit))
    return visit.go(f"/accounts/{account_id}/billing", done="Billing details saved")


def _shown(statement: Statement) -> dict[str, Any]:
    """Returns a statement's values for its page. With `places` decimals, the rounded rows add up."""
    rows = [statement.opening, *(one.amount for one in statement.movements), *(-row.charged for row in statement.usage)]
    return {
        "statement": statement,
        "movements": [*statement.movements, *statement.usage],
        "places": summing_places(rows),
        "listing_places": listing_places(rows[1:]),
    }


async def _months(visit: Visit, account: AccountSnapshot) -> dict[str, int]:
    """Returns the months with a statement, newest first, with the nano-units charged in each."""
    now = visit.console.now()
    months = {period_at("month", now).name: 0}
    at = period_at("month", now).begins - 1
    while len(months) < MAX_MONTHS and at >= account.created_at:
        month = period_at("month", at)
        months[month.name] = 0
        at = month.begins - 1
    first = f"{min(months)}-01"
    by_day = commands.SumUsage(account.account_id, day_from=first, group_by=("day",))
    for row in await visit.console.books.run(by_day):
        name = (row.day or "")[:7]
        if name in months:
            months[name] += row.charged
    return months


async def _customer(visit: Visit) -> Customer:
    run, account_id = visit.console.books.run, visit.request.path_params["account_id"]
    account = await run(commands.GetAccount(account_id))
    return Customer(account_id, account.name, account.currency, await run(ReadBillingDetails(account_id)))


async def forecast_of(visit: Visit, account: AccountSnapshot) -> Forecast | None:
    """Returns the month's forecast; None on the UTC day on which the account was created."""
    run, now = visit.console.books.run, visit.console.now()
    month, today = period_at("month", now), period_at("day", now)
    days = min(PACE_DAYS, int((today.begins - period_at("day", account.created_at).begins) // DAY_S))
    if days < 1:
        return None
    first = min(month.begins, today.begins - days * DAY_S)
    by_day = commands.SumUsage(account.account_id, day_from=period_at("day", first).name, group_by=("day",))
    charged = {row.day or "": row.charged for row in await run(by_day)}
    since = period_at("day", today.begins - days * DAY_S).name
    a_day = sum(nano for day, nano in charged.items() if since <= day < today.name) // days
    spent = sum(nano for day, nano in charged.items() if day.startswith(month.name))
    left = int((month.ends - now) * 1000)
    return Forecast(spent, a_day, days, spent + a_day * left // int(DAY_S * 1000))


def _file(content: bytes, name: str) -> Response:
    headers = {"content-disposition": f'attachment; filename="{name}"', "cache-control": "no-store"}
    return Response(content, media_type="application/pdf", headers=headers)
