"""Watches the accounts' alerts, and sends notices by e-mail or signed webhook.

A notice is sent at least once. A webhook's `webhook-id` is that of the notice, so that a receiver can pass over one
that comes twice (Standard Webhooks). After a failure it is tried again, at growing intervals, for about a day.
"""

from __future__ import annotations

import asyncio
import json
import logging
import smtplib
from collections.abc import Callable
from datetime import UTC, datetime
from email.message import EmailMessage
from email.utils import format_datetime, make_msgid
from typing import Final

import httpx
from standardwebhooks import Webhook

from serve_app.contracts.calls import Unavailable
from serve_app.contracts.errors import LedgerError
from serve_app.contracts.key_format import KeySecrets
from serve_app.contracts.money import format_amount
from serve_app.contracts.notices import ListNotices, Notice, RaiseAlarm, RecordAttempt, WatchAlerts
from serve_app.contracts.ports import BooksPort
from serve_app.contracts.sealed import of_webhooks, unseal
from serve_app.settings import MailSettings
from serve_app.webhook_address import BadAddress, pinned

logger = logging.getLogger("ray.serve")

EVERY_S: Final = 5.0
TIMEOUT_S: Final = 15.0
AT_ONCE: Final = 8
#: Seconds until the next attempt, after each that failed.
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
PAUSED: Final = "recharge.paused"
PAUSED_WORDS: Final = (
    "Recharging is paused, and the balance is {value} {currency}: {detail} Resume it on the page Billing, or add funds."
)


class Notifier:
    """`private_webhooks` allows addresses that are not public, and http: where all accounts are one's own."""

    def __init__(
        self,
        books: BooksPort,
        mail: MailSettings | None,
        now: Callable[[], float],
        *,
        key_secrets: KeySecrets,
        password: str = "",
        private_webhooks: bool = False,
    ) -> None:
        self._books = books
        self._mail = mail
        self._now = now
        self._key_secrets = key_secrets
        self._password = password
        self._private = private_webhooks

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            try:
                await self.turn()
            except (Unavailable, LedgerError) as error:
                logger.warning("alerts wait for the ledger: %s", error)
            except Exception:
                logger.exception("a turn of the alerts failed")
            await asyncio.sleep(EVERY_S)

    async def turn(self) -> None:
        """Looks at all alerts once, and sends what is due."""
        after: str | None = ""
        while after is not None:
            alarms, after = await self._books.run(WatchAlerts(after))
            for alarm in alarms:
                await self._books.run(RaiseAlarm(alarm))
        due = await self._books.run(ListNotices())
        slots = asyncio.Semaphore(AT_ONCE)

        async def tell(notice: Notice) -> None:
            async with slots:
                await self._tell(notice)

        await asyncio.gather(*map(tell, due))

    async def _tell(self, notice: Notice) -> None:
        try:
            if "://" in notice.target:
                await self._post(notice)
            else:
                await asyncio.to_thread(self._send, notice)
            error = ""
        except (httpx.HTTPError, BadAddress, OSError, smtplib.SMTPException, ValueError) as failure:
            error = f"{type(failure).__name__}: {failure}"
            logger.warning("notice %s was not delivered: %s", notice.notice_id, error)
        again = self._now() + AGAIN_S[notice.attempts] if error and notice.attempts < len(AGAIN_S) else None
        await self._books.run(RecordAttempt(notice.notice_id, error, again))

    async def _post(self, notice: Notice) -> None:
        secret = unseal(notice.secret, self._key_secrets, of_webhooks(notice.account_id))
        body = json.dumps(document(notice), separators=(",", ":"))
        at = datetime.fromtimestamp(self._now(), UTC)
        headers = {
            "content-type": "application/json",
            "webhook-id": notice.notice_id,
            "webhook-timestamp": str(int(at.timestamp())),
            "webhook-signature": Webhook(secret).sign(notice.notice_id, at, body),
        }
        address = await pinned(notice.target, private=self._private)
        async with httpx.AsyncClient(timeout=TIMEOUT_S, follow_redirects=False, trust_env=False) as http:
            request = http.build_request(
                "POST", address.url, content=body, headers=headers | address.headers, extensions=address.extensions
            )
            answer = await http.send(request, stream=True)  # what it says is not read
            await answer.aclose()
        if not answer.is_success:
            raise ValueError(f"the webhook answered {answer.status_code}")

    def _send(self, notice: Notice) -> None:
        if self._mail is None:
            raise ValueError("this service has no settings for e-mail")
        message = EmailMessage()
        message["Subject"] = f"{notice.account_name}: {type_of(notice).replace('.', ' ')}"
        message["From"], message["To"] = self._mail.sender, notice.target
        message["Date"] = format_datetime(datetime.fromtimestamp(notice.created_at, UTC))
        message["Message-ID"] = make_msgid(notice.notice_id, self._mail.sender.rpartition("@")[2])
        message.set_content(f"{words(notice)}\n\nAccount: {notice.account_name}, {notice.account_id}\n")
        with smtplib.SMTP(self._mail.host, self._mail.port, timeout=TIMEOUT_S) as server:
            if self._mail.starttls:
                server.starttls()
            if self._mail.user:
                server.login(self._mail.user, self._password)
            server.send_message(message)


def type_of(notice: Notice) -> str:
    return PAUSED if notice.detail else TYPES[notice.kind]


def words(notice: Notice) -> str:
    """One sentence, and why recharging is paused."""
    amounts = {"value": format_amount(notice.value), "threshold": format_amount(notice.threshold)}
    said = PAUSED_WORDS if notice.detail else WORDS[notice.kind]
    return said.format(**amounts, currency=notice.currency, detail=notice.detail)


def document(notice: Notice) -> dict[str, object]:
    """The body of a webhook's message."""
    at = datetime.fromtimestamp(notice.created_at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
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
