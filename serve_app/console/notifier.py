"""Watches the accounts' alerts and sends notices by e-mail or signed webhook.

A notice is sent at least once. A webhook's `webhook-id` is the notice's id, with which a receiver can skip duplicates
(Standard Webhooks). After any failure, a notice is retried with growing backoff for about 32 hours. All due notices are
sent concurrently, each with a timeout, so slow receivers delay a turn by at most half a minute.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

import httpx
from standardwebhooks import Webhook

from serve_app.console.mailer import Mailer
from serve_app.contracts.calls import repeat
from serve_app.contracts.money import format_amount
from serve_app.contracts.notices import ListNotices, Notice, RaiseAlarm, RecordAttempt, WatchAlerts, is_webhook
from serve_app.contracts.ports import BooksPort
from serve_app.contracts.units import utc_text
from serve_app.storage.sealing import SecretKeys, of_webhooks, unseal
from serve_app.webhook_address import BadAddress, pinned

logger = logging.getLogger("ray.serve")

EVERY_S: Final = 5.0
WEBHOOK_S: Final = 15.0  # maximum time for a request, up to the response's headers
MAIL_S: Final = 30.0  # maximum time for an e-mail, including its wait for a thread
#: Seconds until the next attempt, after each failed attempt.
AGAIN_S: Final = (5.0, 300.0, 1800.0, 7200.0, 18_000.0, 36_000.0, 50_400.0)
TYPES: Final = {
    "balance": "balance.low",
    "day": "spending.day",
    "month": "spending.month",
    "unusual": "spending.unusual",
}
WORDS: Final = {
    "balance": "The balance is {value} {currency}, below {threshold}.",
    "day": "Today's spending is {value} {currency} and has reached {threshold}.",
    "month": "This month's spending is {value} {currency} and has reached {threshold}.",
    "unusual": "Today's spending is {value} {currency}: three times what was usual in the last seven days, or more.",
}
#: Shown to the account's members instead of the reason, which can name internal hosts. The log has the reason.
NOT_DELIVERED: Final = "not delivered: the address could not be reached, or did not take the message in time"
PAUSED: Final = "recharge.paused"
PAUSED_WORDS: Final = (
    "Recharging is paused, and the balance is {value} {currency}: {detail} Resume it on the page Billing, or add funds."
)


class BadAnswer(Exception):
    """The webhook refused the message. The text is for the account's holder."""


class Notifier:
    """Sends notices. `private_webhooks` allows http and non-public addresses, for services without outside accounts."""

    def __init__(
        self,
        books: BooksPort,
        mailer: Mailer | None,
        now: Callable[[], float],
        *,
        secret_keys: SecretKeys,
        private_webhooks: bool = False,
    ) -> None:
        self._books = books
        self._mailer = mailer
        self._now = now
        self._secret_keys = secret_keys
        self._private = private_webhooks

    async def run(self) -> None:
        """Runs until it is cancelled."""
        await repeat(self.turn, EVERY_S, "alerts could not be checked or sent")

    async def turn(self) -> None:
        """Checks all alerts once and sends the notices that are due."""
        after: str | None = ""
        while after is not None:
            alarms, after = await self._books.run(WatchAlerts(after))
            for alarm in alarms:
                await self._books.run(RaiseAlarm(alarm))
        due = await self._books.run(ListNotices())
        # Wait for all, even after an error of the ledger. Else, the next turn would resend notices that are being sent.
        for outcome in await asyncio.gather(*map(self._tell, due), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def _tell(self, notice: Notice) -> None:
        bound, error = WEBHOOK_S if is_webhook(notice.target) else MAIL_S, ""
        try:
            async with asyncio.timeout(bound):
                if is_webhook(notice.target):
                    await self._post(notice)
                else:
                    await self._send(notice)
        # Record any failure: a notice without a recorded attempt would stay due, ahead of later ones.
        except Exception as failure:
            error = str(failure) if isinstance(failure, BadAnswer | BadAddress) else NOT_DELIVERED
            reason = str(failure) or f"not done within {bound:g} s"
            logger.warning("notice %s was not delivered: %s: %s", notice.notice_id, type(failure).__name__, reason)
        again = self._now() + AGAIN_S[notice.attempts] if error and notice.attempts < len(AGAIN_S) else None
        await self._books.run(RecordAttempt(notice.notice_id, error, again))

    async def _post(self, notice: Notice) -> None:
        secret = unseal(notice.secret, self._secret_keys, of_webhooks(notice.account_id))
        body = json.dumps(document(notice), separators=(",", ":"))
        at = datetime.fromtimestamp(self._now(), UTC)
        headers = {
            "content-type": "application/json",
            "webhook-id": notice.notice_id,
            "webhook-timestamp": str(int(at.timestamp())),
            "webhook-signature": Webhook(secret).sign(notice.notice_id, at, body),
        }
        address = await pinned(notice.target, private=self._private)
        async with httpx.AsyncClient(timeout=None, follow_redirects=False, trust_env=False) as http:
            request = http.build_request(
                "POST", address.url, content=body, headers=headers | address.headers, extensions=address.extensions
            )
            answer = await http.send(request, stream=True)  # the response's body is not read
            await answer.aclose()
        if not answer.is_success:
            raise BadAnswer(f"the webhook answered {answer.status_code}")

    async def _send(self, notice: Notice) -> None:
        if self._mailer is None:
            raise ValueError("this service has no settings for e-mail")
        subject = f"{notice.account_name}: {type_of(notice).replace('.', ' ')}"
        text = f"{words(notice)}\n\nAccount: {notice.account_name}, {notice.account_id}\n"
        await self._mailer.send(notice.target, subject, text, notice.notice_id, notice.created_at)


def type_of(notice: Notice) -> str:
    return PAUSED if notice.detail else TYPES[notice.kind]


def words(notice: Notice) -> str:
    """Returns one sentence, and the reason if recharging is paused."""
    amounts = {"value": format_amount(notice.value), "threshold": format_amount(notice.threshold)}
    said = PAUSED_WORDS if notice.detail else WORDS[notice.kind]
    return said.format(**amounts, currency=notice.currency, detail=notice.detail)


def document(notice: Notice) -> dict[str, object]:
    """Returns the body of a webhook's message."""
    at = utc_text(notice.created_at)
    return {
        "type": type_of(notice),
        "timestamp": at,
        "data": {
            "account_id": notice.account_id,
            "currency": notice.currency,
            "value": format_amount(notice.value),
            "threshold": format_amount(notice.threshold),
            "message": words(notice),
        },
    }
