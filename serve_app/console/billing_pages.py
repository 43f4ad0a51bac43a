"""An account's payments and grants, recharging, and a statement for each month."""

from __future__ import annotations

from typing import Final

from fastapi.responses import Response

from serve_app.console.usage_pages import named_month
from serve_app.console.web import HEADERS, Visit
from serve_app.contracts import commands
from serve_app.contracts.periods import period_at
from serve_app.contracts.recharges import ShowRecharge

MAX_MONTHS: Final = 36
KINDS: Final = {"top_up": "Payment", "grant": "Credit given", "correction": "Correction", "expiry": "Expired credit"}
OUTCOMES: Final = {"open": "not known yet", "succeeded": "paid", "failed": "failed"}


async def billing(visit: Visit) -> Response:
    run, now = visit.console.books.run, visit.console.now()
    account_id = visit.request.path_params["account_id"]
    account = await run(commands.GetAccount(account_id))
    months: list[str] = []
    at = now
    while len(months) < MAX_MONTHS and at >= account.created_at:
        month = period_at("month", at)
        months.append(month.name)
        at = month.begins - 1
    months = months or [period_at("month", now).name]
    provider = visit.console.payments
    recharge, attempts = (None, []) if provider is None else await run(ShowRecharge(account_id))
    page = visit.page(
        "billing.html",
        account=account,
        balance=account.available(now),
        grants=[grant for grant in await run(commands.ListGrants(account_id)) if grant.left],
        statement=await run(commands.ShowStatement(account_id, months[0])),
        months=months,
        kinds=KINDS,
        now=now,
        provider=provider,
        recharge=recharge,
        attempts=attempts,
        outcomes=OUTCOMES,
    )
    if provider is not None:  # browsers apply the page's policy to a form's redirect
        policy = HEADERS["content-security-policy"].replace("form-action 'self'", f"form-action 'self' {provider.page}")
        page.headers["content-security-policy"] = policy
    return page


async def statement(visit: Visit) -> Response:
    run, account_id = visit.console.books.run, visit.request.path_params["account_id"]
    month = named_month(visit, visit.request.path_params["month"])
    account = await run(commands.GetAccount(account_id))
    found = await run(commands.ShowStatement(account_id, month.name))
    return visit.page(
        "statement.html", account=account, statement=found, kinds=KINDS, over=visit.console.now() >= month.ends
    )
