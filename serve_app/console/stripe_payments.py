"""Stripe: its checkout page, its signed reports, and payments with a card that it has saved.

The account's id is on the payment, so each report about it leads back to the account. Stripe reports at least once and
in any order; references make each booked once.

A card is saved by a checkout in the mode "setup", which takes no money: recharging is turned on without a first
payment, and its amount is that of the settings. A payment with it carries the id of its attempt, by which it is found
again in the list of the customer's payments. (Stripe's search would find it too, but a minute late.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import stripe

from serve_app.console.payments import BadReport, Charge, PaymentError
from serve_app.contracts.money import format_amount
from serve_app.contracts.payments import Paid, Returned, Saved
from serve_app.contracts.recharges import Attempt

#: Nano-units of Stripe's smallest unit, a hundredth, in the currencies that have one.
CENT: Final = 10**7
NO_CENTS: Final = frozenset(
    (
        "BIF", "CLP", "DJF", "GNF", "JPY", "KMF", "KRW", "MGA", "PYG", "RWF", "UGX", "VND", "VUV", "XAF", "XOF", "XPF",
        "BHD", "JOD", "KWD", "OMR", "TND", "ISK", "HUF", "TWD",
    )
)  # fmt: skip
LEAST: Final = 50 * CENT
MOST: Final = 10_000 * 100 * CENT
#: Seconds by which this machine's clock may be ahead of Stripe's.
AHEAD_S: Final = 3600


class Stripe:
    """`key` is the secret key, `webhook_secret` that of the endpoint. `api` replaces Stripe's address, in tests."""

    name = "stripe"
    page = "https://checkout.stripe.com"

    def __init__(self, key: str, webhook_secret: str, api: str | None = None) -> None:
        addresses: Any = {"api": api} if api else None
        self._client = stripe.StripeClient(
            key, base_addresses=addresses, http_client=stripe.HTTPXClient(timeout=20), max_network_retries=2
        )
        self._webhook_secret = webhook_secret

    def check(self, amount: int, currency: str) -> None:
        if currency in NO_CENTS:
            raise PaymentError(f"Payments in {currency} are not offered.")
        if amount % CENT or not LEAST <= amount <= MOST:
            least, most = format_amount(LEAST), format_amount(MOST)
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
            "client_reference_id": account_id,
            "payment_intent_data": {"metadata": {"account_id": account_id}},
            "success_url": back,
            "cancel_url": back,
        }
        return await self._page(params, "The payment can't begin")

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
        return await self._page(params, "No card can be saved")

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
            raise PaymentError(_words(error)) from error
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
        except (stripe.CardError, stripe.InvalidRequestError) as error:
            return Charge("failed", _words(error))
        except stripe.StripeError as error:
            raise PaymentError(_words(error)) from error
        return _charge(payment.to_dict())

    async def forget(self, method: str) -> None:
        try:
            await self._client.v1.payment_methods.detach_async(method)
        except stripe.StripeError as error:
            raise PaymentError(_words(error)) from error

    async def _page(self, params: Any, failure: str) -> str:
        try:
            session = await self._client.v1.checkout.sessions.create_async(params)
        except stripe.StripeError as error:
            raise PaymentError(f"{failure}: {_words(error)}.") from error
        assert session.url is not None
        return session.url

    async def read(self, body: bytes, headers: Mapping[str, str]) -> Paid | Returned | Saved | None:
        try:
            event = self._client.construct_event(body, headers.get("stripe-signature"), self._webhook_secret)
        except (ValueError, stripe.SignatureVerificationError) as error:
            raise BadReport(str(error)) from None
        data: Any = json.loads(body)["data"]  # verified; as plain objects
        found = data["object"]
        try:
            if event.type == "checkout.session.completed" and found.get("mode") == "setup":
                return await self._saved(found)
            if event.type == "payment_intent.succeeded":
                if "attempt_id" not in (found.get("metadata") or {}):
                    return None  # of a checkout, which is reported by itself
                return _paid(found)
            if event.type in ("checkout.session.completed", "checkout.session.async_payment_succeeded"):
                if found["payment_status"] != "paid":
                    return None  # a report follows when it is
                if not isinstance(account_id := found.get("client_reference_id"), str):
                    return None  # of another product of the same company
                amount, currency = found["amount_total"] * CENT, found["currency"].upper()
                return Paid(account_id, amount, currency, _text(found["payment_intent"]))
            if event.type == "charge.refunded":
                before = (data.get("previous_attributes") or {}).get("amount_refunded", 0)
                reference = f"{found['id']} refunded {found['amount_refunded']}"
                amount = (found["amount_refunded"] - before) * CENT
                return _returned(found, amount, reference)
            if event.type == "charge.dispute.created":
                payment: Any = await self._client.v1.payment_intents.retrieve_async(found["payment_intent"])
                amount = found["amount"] * CENT
                return _returned(payment, amount, found["id"], is_chargeback=True)
        except (KeyError, TypeError, AttributeError) as error:
            raise BadReport(f"{event.type} {event.id} is not about a payment of an account: {error}") from None
        except stripe.StripeError as error:
            raise PaymentError(f"Stripe does not answer: {error}") from error
        return None

    async def _saved(self, session: Any) -> Saved | None:
        """None for a session of another product of the same company."""
        metadata = session.get("metadata") or {}
        if "setup_id" not in metadata:
            return None
        setup: Any = await self._client.v1.setup_intents.retrieve_async(_text(session["setup_intent"]))
        ids = (metadata["account_id"], metadata["setup_id"], session["customer"], setup["payment_method"])
        return Saved(*map(_text, ids))


def _charge(payment: Any) -> Charge:
    """What became of an attempt's payment. One that needs its customer has failed: no customer is there."""
    status = payment["status"]
    if status == "succeeded":
        return Charge("succeeded", paid=_paid(payment))
    if status == "processing":
        return Charge("open", "Stripe is still processing the payment.")
    error = payment.get("last_payment_error") or {}
    return Charge("failed", str(error.get("message") or f"Stripe has the payment as {status}."))


def _paid(payment: Any) -> Paid:
    """Of a payment of an attempt."""
    account_id, attempt_id = (_text(payment["metadata"][name]) for name in ("account_id", "attempt_id"))
    amount, currency = payment["amount_received"] * CENT, payment["currency"].upper()
    return Paid(account_id, amount, currency, _text(payment["id"]), attempt_id)


def _words(error: stripe.StripeError) -> str:
    return str(error.user_message or type(error).__name__)


def _returned(payment: Any, amount: int, reference: str, *, is_chargeback: bool = False) -> Returned | None:
    """None for a payment that is not an account's."""
    if "account_id" not in payment["metadata"]:
        return None
    return Returned(_text(payment["metadata"]["account_id"]), amount, reference, is_chargeback)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no id")
    return value
