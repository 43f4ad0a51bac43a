"""Stripe: its checkout page, its signed reports, and payments with a saved card.

The account's id is in the metadata of the payment and of its checkout, so each report leads to the account. Only the
holder of a key of this Stripe account can set metadata. A checkout's `client_reference_id` is not trusted, because a
buyer can set it in the URL of a Payment Link. Reports without an account id are about a different product of the same
company and are ignored. Stripe sends each report at least once, in any order. Each report has a reference, under which
it is booked once.

Customers see Stripe's messages about their card. Stripe's other errors are only logged: they can name keys and ids.

A card is saved by a checkout in the mode "setup", which takes no money. Recharging therefore needs no first payment.
A payment with the card has the id of its attempt in its metadata. `find` looks for this id in the list of the
customer's payments, because Stripe's search finds a new payment only after about a minute.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import stripe

from serve_app.console.payments import BadReport, Charge, PaymentError
from serve_app.contracts.money import format_amount
from serve_app.contracts.payments import Paid, Returned, Saved
from serve_app.contracts.recharges import Attempt

logger = logging.getLogger("ray.serve")

#: Nano-units in a hundredth, Stripe's smallest unit in currencies that have hundredths.
CENT: Final = 10**7
NO_CENTS: Final = frozenset(
    (
        "BIF", "CLP", "DJF", "GNF", "JPY", "KMF", "KRW", "MGA", "PYG", "RWF", "UGX", "VND", "VUV", "XAF", "XOF", "XPF",
        "BHD", "JOD", "KWD", "OMR", "TND", "ISK", "HUF", "TWD",
    )
)  # fmt: skip
MIN_AMOUNT: Final = 50 * CENT
MAX_AMOUNT: Final = 10_000 * 100 * CENT
#: Seconds by which this machine's clock may be ahead of Stripe's.
AHEAD_S: Final = 3600
NO_ANSWER: Final = "There is no clear answer from Stripe yet."
TRY_LATER: Final = "Stripe can't take this now: try again later, and tell this service's operator if it goes on."


class Stripe:
    """`key` is the secret key, `webhook_secret` the endpoint's secret. `api` replaces Stripe's URL in tests."""

    name = "stripe"
    page = "https://checkout.stripe.com"
    min_amount = MIN_AMOUNT

    def __init__(self, key: str, webhook_secret: str, api: str | None = None) -> None:
        addresses: Any = {"api": api} if api else None
        self._client = stripe.StripeClient(
            key, base_addresses=addresses, http_client=stripe.HTTPXClient(timeout=20), max_network_retries=2
        )
        self._webhook_secret = webhook_secret

    def check(self, amount: int, currency: str) -> None:
        if currency in NO_CENTS:
            raise PaymentError(f"Payments in {currency} are not offered.")
        if amount % CENT or not MIN_AMOUNT <= amount <= MAX_AMOUNT:
            least, most = format_amount(MIN_AMOUNT), format_amount(MAX_AMOUNT)
            raise PaymentError(f"Give an amount from {least} to {most}, with two decimals at most.")

    async def checkout(self, account_id: str, amount: int, currency: str, back: str) -> str:
        self.check(amount, currency)
        item = {
            "quantity": 1,
            "price_data": {
                "currency": currency.lower(),
                "unit_amount": amount // CENT,
                "product_data": {"name": f"Credit for {account_id}"},
            },
        }
        params: Any = {
            "mode": "payment",
            "line_items": [item],
            "client_reference_id": account_id,  # shown in Stripe's dashboard
            "metadata": {"account_id": account_id},
            "payment_intent_data": {"metadata": {"account_id": account_id}},
            "success_url": back,
            "cancel_url": back,
        }
        return await self._page(params)

    async def save_method(self, account_id: str, setup_id: str, customer: str | None, currency: str, back: str) -> str:
        params: Any = {
            "mode": "setup",
            "currency": currency.lower(),
            "allowed_payment_method_types": ["card"],
            "client_reference_id": account_id,
            "metadata": {"account_id": account_id, "setup_id": setup_id},
            "success_url": back,
            "cancel_url": back,
        }
        params |= {"customer_creation": "always"} if customer is None else {"customer": customer}
        return await self._page(params)

    async def find(self, attempt: Attempt) -> Charge | None:
        params: Any = {
            "customer": attempt.customer,
            "created": {"gte": int(attempt.created_at) - AHEAD_S},
            "limit": 100,
        }
        try:
            page = await self._client.v1.payment_intents.list_async(params)
            async for payment in page.auto_paging_iter():
                found = payment.to_dict()
                if (found.get("metadata") or {}).get("attempt_id") == attempt.attempt_id:
                    return _charge(found)
        except stripe.StripeError as error:
            raise _logged(error) from error
        return None

    async def charge(self, attempt: Attempt) -> Charge:
        params: Any = {
            "amount": attempt.amount // CENT,
            "currency": attempt.currency.lower(),
            "customer": attempt.customer,
            "payment_method": attempt.method,
            "allowed_payment_method_types": ["card"],
            "confirm": True,
            "off_session": True,
            "description": f"Credit for {attempt.account_id}",
            "metadata": {"account_id": attempt.account_id, "attempt_id": attempt.attempt_id},
        }
        options: Any = {"idempotency_key": attempt.attempt_id}
        try:
            payment = await self._client.v1.payment_intents.create_async(params, options)
        except stripe.CardError as error:
            return Charge("failed", error.user_message or "The card was refused.")
        except stripe.StripeError as error:  # retried: an invalid request may be the operator's mistake
            raise _logged(error) from error
        return _charge(payment.to_dict())

    async def forget(self, method: str) -> None:
        try:
            await self._client.v1.payment_methods.detach_async(method)
        except stripe.StripeError as error:
            raise _logged(error) from error

    async def _page(self, params: Any) -> str:
        try:
            session = await self._client.v1.checkout.sessions.create_async(params)
        except stripe.StripeError as error:
            raise _logged(error, TRY_LATER) from error
        assert session.url is not None
        return session.url

    async def read(self, body: bytes, headers: Mapping[str, str]) -> Paid | Returned | Saved | None:
        try:
            event = self._client.construct_event(body, headers.get("stripe-signature"), self._webhook_secret)
        except (ValueError, stripe.SignatureVerificationError) as error:
            raise BadReport(str(error)) from None
        data: Any = json.loads(body)["data"]  # verified above; parsed here into plain objects
        try:
            found = await self._read(event.type, data)
        except (KeyError, TypeError, AttributeError) as error:
            raise BadReport(f"{event.type} {event.id} is not about a payment of an account: {error}") from None
        except stripe.StripeError as error:
            raise _logged(error) from error
        return replace(found, reported_at=float(event.created)) if isinstance(found, Returned) else found

    async def _read(self, kind: str, data: Any) -> Paid | Returned | Saved | None:
        found = data["object"]
        match kind:
            case "checkout.session.completed" | "checkout.session.async_payment_succeeded":
                return await (self._saved(found) if found.get("mode") == "setup" else self._bought(found))
            case "payment_intent.succeeded":
                # A payment without an attempt belongs to a checkout, which has a separate report.
                return _paid(found) if {"account_id", "attempt_id"} <= _metadata(found).keys() else None
            case "charge.refunded":
                return _refunded(found, data.get("previous_attributes") or {})
            case "charge.dispute.created":
                return None if _moves_nothing(found) else await self._disputed(found)
            case "charge.dispute.funds_withdrawn":
                return await self._disputed(found)
            case "charge.dispute.funds_reinstated":
                return await self._reinstated(found)
        return None

    async def _bought(self, session: Any) -> Paid | None:
        if session.get("mode") != "payment" or session["payment_status"] != "paid" or not session["payment_intent"]:
            return None  # if it is ours, a report follows when it is paid
        metadata = _metadata(session)
        if "account_id" not in metadata and session.get("client_reference_id"):
            metadata = await self._metadata_of_payment(session)  # earlier releases set `account_id` only on the payment
        if "account_id" not in metadata:
            return None
        amount, currency = session["amount_total"] * CENT, session["currency"].upper()
        return Paid(_text(metadata["account_id"]), amount, currency, _text(session["payment_intent"]))

    async def _disputed(self, dispute: Any) -> Returned | None:
        """Returns the same chargeback for both reports of a dispute. The first report debits and suspends the account.

        When Stripe reports a chargeback, it has already withdrawn the money, so the account need not stay open until
        the second report. If an inquiry becomes a chargeback later, only the second report is booked. If Stripe
        withdraws the money of a dispute again after giving it back, that is a separate chargeback.
        """
        metadata = await self._metadata_of_payment(dispute)
        if "account_id" not in metadata:
            return None
        number, again, back = _moved(dispute)
        # The report of a withdrawal shows an earlier reinstatement, but perhaps not yet the withdrawal itself.
        number, again = (number + 1, 0) if back else (number, again)
        cents = dispute["amount"] if number == 1 or not again else again
        reference, account_id = _numbered(_text(dispute["id"]), number), _text(metadata["account_id"])
        return Returned(account_id, cents * CENT, reference, _text(dispute["payment_intent"]), "chargeback")

    async def _reinstated(self, dispute: Any) -> Returned | None:
        """Returns the reinstatement of a dispute.

        Its amount is the whole disputed amount if the dispute was won and had one withdrawal. Otherwise, it is the
        amount that Stripe gave back since the latest withdrawal; if that is unknown, the disputed amount of a won
        dispute. After a lost dispute, Stripe gives money back if it had withdrawn the whole payment although a part
        was already refunded. The reinstatement reverses the latest withdrawal.
        """
        metadata = await self._metadata_of_payment(dispute)
        if "account_id" not in metadata:
            return None
        number, _, back = _moved(dispute)
        cents = back.get(dispute["currency"], 0)
        if dispute["status"] == "won" and (number == 1 or not cents):
            cents = dispute["amount"]
        if not cents:
            told = "%s: the reinstated amount is unknown or in another currency: correct the balance by hand"
            logger.warning(told, dispute["id"])
            return None
        withdrawal, account_id = _text(dispute["id"]), _text(metadata["account_id"])
        reference = _numbered(f"{withdrawal} reinstated", number)
        return Returned(account_id, cents * CENT, reference, _numbered(withdrawal, number), "reinstatement")

    async def _metadata_of_payment(self, found: Any) -> Any:
        """Returns the metadata of the payment of a checkout or dispute; empty without a payment."""
        if not found.get("payment_intent"):
            return {}
        payment = await self._client.v1.payment_intents.retrieve_async(_text(found["payment_intent"]))
        return _metadata(payment.to_dict())

    async def _saved(self, session: Any) -> Saved | None:
        metadata = _metadata(session)
        if not {"account_id", "setup_id"} <= metadata.keys():
            return None
        setup: Any = await self._client.v1.setup_intents.retrieve_async(_text(session["setup_intent"]))
        ids = (metadata["account_id"], metadata["setup_id"], session["customer"], setup["payment_method"])
        return Saved(*map(_text, ids))


def _charge(payment: Any) -> Charge:
    """Returns the state of an attempt's payment. A payment that needs an action of the customer counts as failed."""
    status = payment["status"]
    if status == "succeeded":
        return Charge("succeeded", paid=_paid(payment))
    if status == "processing":
        return Charge("open", "Stripe is still processing the payment.")
    error = payment.get("last_payment_error") or {}
    if error.get("type") == "card_error" and error.get("message"):
        return Charge("failed", str(error["message"]))
    return Charge("failed", f"Stripe has the payment as {status}.")


def _paid(payment: Any) -> Paid:
    """Returns the payment of an attempt."""
    account_id, attempt_id = (_text(payment["metadata"][name]) for name in ("account_id", "attempt_id"))
    amount, currency = payment["amount_received"] * CENT, payment["currency"].upper()
    return Paid(account_id, amount, currency, _text(payment["id"]), attempt_id, float(payment["created"]))


def _refunded(charge: Any, before: Any) -> Returned | None:
    metadata = _metadata(charge)  # Stripe copies it from the payment
    if "account_id" not in metadata or not charge.get("payment_intent"):
        return None
    total = charge["amount_refunded"]
    amount = (total - before.get("amount_refunded", 0)) * CENT
    reference = f"{_text(charge['id'])} refunded {total}"
    return Returned(_text(metadata["account_id"]), amount, reference, _text(charge["payment_intent"]))


def _moves_nothing(dispute: Any) -> bool:
    """Whether the dispute moves no money: it is an inquiry, or was prevented by a refund, which has its own report."""
    status = _text(dispute["status"])
    return status.startswith("warning_") or status == "prevented"


def _moved(dispute: Any) -> tuple[int, int, dict[str, int]]:
    """Returns the number of a dispute's withdrawals (at least 1), the last one's amount, and what was reinstated since.

    The last withdrawal's amount is in cents; 0 if it is unknown or in another currency. The reinstated amounts are
    cents by currency.
    """
    number, taken, back = 0, 0, dict[str, int]()
    for one in dispute.get("balance_transactions") or []:
        if one["amount"] < 0:
            number, back = number + 1, {}
            taken = -one["amount"] if one["currency"] == dispute["currency"] else 0
        else:
            back[one["currency"]] = back.get(one["currency"], 0) + one["amount"]
    return max(1, number), taken, back


def _numbered(reference: str, number: int) -> str:
    return reference if number == 1 else f"{reference} {number}"


def _metadata(found: Any) -> Any:
    return found.get("metadata") or {}


def _logged(error: stripe.StripeError, told: str = NO_ANSWER) -> PaymentError:
    logger.warning("Stripe refuses a request or does not answer: %s: %s", type(error).__name__, error)
    return PaymentError(told)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no id")
    return value
