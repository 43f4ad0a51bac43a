"""Recharging on the Billing page: its settings, its payment method, turning it on and off."""

from __future__ import annotations

from fastapi.responses import RedirectResponse, Response

from serve_app.console.payments import PaymentError, PaymentProvider, forget
from serve_app.console.web import Refused, Visit
from serve_app.contracts.commands import GetAccount
from serve_app.contracts.money import parse_amount
from serve_app.contracts.recharges import AskMethod, ResumeRecharge, SetRecharge, StopRecharge


async def change(visit: Visit) -> Response:
    """Saves the settings. Without a payment method, leads to the provider's page to save one."""
    provider, account_id = _provider(visit), visit.request.path_params["account_id"]
    run, fields = visit.console.books.run, ("threshold", "amount", "monthly_cap")
    threshold, amount, cap = (parse_amount(visit.form.get(name, "").strip()) for name in fields)
    account = await run(GetAccount(account_id))
    try:
        provider.check(amount, account.currency)
    except PaymentError as error:
        raise Refused(422, str(error)) from None
    recharge = await run(SetRecharge(account_id, threshold, amount, cap, visit.audit))
    if recharge.method is not None and recharge.provider == provider.name:
        return _back(visit)
    return await save_method(visit)


async def save_method(visit: Visit) -> Response:
    provider, account_id = _provider(visit), visit.request.path_params["account_id"]
    run = visit.console.books.run
    account = await run(GetAccount(account_id))
    recharge = await run(AskMethod(account_id, visit.audit))
    assert recharge.setup_id is not None
    customer = recharge.customer if recharge.provider == provider.name else None
    back = f"{visit.origin}{visit.root}/accounts/{account_id}/billing"
    try:
        page = await provider.save_method(account_id, recharge.setup_id, customer, account.currency, back)
    except PaymentError as error:
        raise Refused(422, str(error)) from None
    return RedirectResponse(page, 303)


async def resume(visit: Visit) -> Response:
    await visit.console.books.run(ResumeRecharge(visit.request.path_params["account_id"], visit.audit))
    return _back(visit)


async def stop(visit: Visit) -> Response:
    method = await visit.console.books.run(StopRecharge(visit.request.path_params["account_id"], visit.audit))
    if visit.console.payments is not None:
        await forget(visit.console.payments, method)
    return _back(visit)


def _provider(visit: Visit) -> PaymentProvider:
    if visit.console.payments is None:
        raise Refused(404, "This service takes no payments here: ask its operator.")
    return visit.console.payments


def _back(visit: Visit) -> Response:
    return visit.go(f"/accounts/{visit.request.path_params['account_id']}/billing")
