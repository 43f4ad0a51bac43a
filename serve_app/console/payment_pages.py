"""Adding funds, and receiving the payment provider's reports."""

from __future__ import annotations

import logging

from fastapi.responses import PlainTextResponse, RedirectResponse, Response

from serve_app.console.payments import BadReport, EarlyReport, PaymentError, book
from serve_app.console.web import Refused, Visit
from serve_app.contracts.commands import GetAccount
from serve_app.contracts.errors import AccountNotFound, LedgerError, LedgerUnavailable
from serve_app.contracts.money import parse_amount

logger = logging.getLogger("ray.serve")


async def add_funds(visit: Visit) -> Response:
    provider, account_id = visit.console.payments, visit.request.path_params["account_id"]
    if provider is None:
        raise Refused(404, "This service takes no payments here: ask its operator.")
    account = await visit.console.books.run(GetAccount(account_id))
    amount = parse_amount(visit.form.get("amount", "").strip())
    back = f"{visit.origin}{visit.root}/accounts/{account_id}/billing"
    try:
        return RedirectResponse(await provider.checkout(account_id, amount, account.currency, back), 303)
    except PaymentError as error:
        raise Refused(422, str(error)) from None


async def report(visit: Visit) -> Response:
    """Handles a report that the provider signed.

    The provider repeats it for days after any status but 2xx, so reports about other services get 200.
    """
    provider = visit.console.payments
    if provider is None or visit.request.path_params["provider"] != provider.name:
        return PlainTextResponse("no such provider\n", 404)
    try:
        found = await provider.read(visit.body, visit.request.headers)
        if found is not None:
            await book(visit.console.books, provider, found, visit.console.now())
    except LedgerUnavailable:
        raise
    except AccountNotFound as error:
        # The report is about a different service with the same provider, or an account that a restored ledger lacks. In
        # the second case the log has the report, and a repetition would not help.
        logger.warning("a report of %s is passed over: %s", provider.name, error)
    except (BadReport, LedgerError) as error:
        logger.warning("a report of %s is refused: %s", provider.name, error)
        return PlainTextResponse("refused\n", 400)
    except (EarlyReport, PaymentError) as error:
        logger.warning("a report of %s has to come again: %s", provider.name, error)
        return PlainTextResponse("later\n", 503)
    return PlainTextResponse("ok\n")
