"""Stripe: its checkout page, and its signed reports.

The account's id is on the payment, so each report about it leads back to the account. Stripe reports at least once and
in any order; references make each booked once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import stripe

from serve_app.console.payments import BadReport, PaymentError
from serve_app.contracts.money import format_amount
from serve_app.contracts.payments import Paid, Returned

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

    async def checkout(self, account_id: str, amount: int, currency: str, back: str) -> str:
        if currency in NO_CENTS:
            raise PaymentError(f"Payments in {currency} are not offered.")
        if amount % CENT or not LEAST <= amount <= MOST:
            least, most = format_amount(LEAST), format_amount(MOST)
            raise PaymentError(f"Give an amount from {least} to {most}, with two decimals at most.")
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
        try:
            session = await self._client.v1.checkout.sessions.create_async(params)
        except stripe.StripeError as error:
            raise PaymentError(f"The payment can't begin: {error.user_message or type(error).__name__}.") from error
        assert session.url is not None
        return session.url

    async def read(self, body: bytes, headers: Mapping[str, str]) -> Paid | Returned | None:
        try:
            event = self._client.construct_event(body, headers.get("stripe-signature"), self._webhook_secret)
        except (ValueError, stripe.SignatureVerificationError) as error:
            raise BadReport(str(error)) from None
        data: Any = json.loads(body)["data"]  # verified; as plain objects
        found = data["object"]
        try:
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


def _returned(payment: Any, amount: int, reference: str, *, is_chargeback: bool = False) -> Returned | None:
    """None for a payment that is not an account's."""
    if "account_id" not in payment["metadata"]:
        return None
    return Returned(_text(payment["metadata"]["account_id"]), amount, reference, is_chargeback)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no id")
    return value
