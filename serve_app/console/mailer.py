"""Sends e-mail through the service's relay. A relay that hangs delays no page and no other work."""

from __future__ import annotations

import asyncio
import logging
import smtplib
import ssl
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from email.message import EmailMessage
from email.utils import format_datetime, make_msgid
from typing import Final

from serve_app.settings import MailSettings

logger = logging.getLogger("ray.serve")

RELAY_S: Final = 15.0  # timeout of each answer of the mail relay
MAILS_AT_ONCE: Final = 8
MAX_WAITING: Final = 100  # maximum unsent mails in the background


class Mailer:
    """Sends mail. `now` returns seconds since 1970."""

    def __init__(self, settings: MailSettings, password: str, now: Callable[[], float]) -> None:
        self._settings, self._password, self._now = settings, password, now
        # A separate pool: a relay that hangs keeps its threads even after a timeout, and must not take the threads of
        # other work.
        self._threads = ThreadPoolExecutor(MAILS_AT_ONCE, "mail")
        self._tasks: set[asyncio.Task[None]] = set()

    async def send(
        self, to: str, subject: str, text: str, message_id: str | None = None, at: float | None = None
    ) -> None:
        """Sends a mail with this id and date. Raises OSError and smtplib.SMTPException."""
        loop, date = asyncio.get_running_loop(), self._now() if at is None else at
        await loop.run_in_executor(self._threads, self._send, to, subject, text, message_id, date)

    def later(self, work: Awaitable[None]) -> bool:
        """Runs work that sends a mail in the background. A failure is logged. Returns False if too many mails wait."""
        if len(self._tasks) >= MAX_WAITING:
            if asyncio.iscoroutine(work):
                work.close()
            return False
        task = asyncio.create_task(_logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def drain(self) -> None:
        """Waits for the work in the background."""
        while self._tasks:
            await asyncio.gather(*self._tasks)

    def _send(self, to: str, subject: str, text: str, message_id: str | None, at: float) -> None:
        settings, message = self._settings, EmailMessage()
        message["Subject"], message["From"], message["To"] = subject, settings.sender, to
        message["Date"] = format_datetime(datetime.fromtimestamp(at, UTC))
        message["Message-ID"] = make_msgid(message_id, settings.sender.rpartition("@")[2])
        message.set_content(text)
        with smtplib.SMTP(settings.host, settings.port, timeout=RELAY_S) as server:
            if settings.starttls:
                server.starttls(context=ssl.create_default_context())
            if settings.user:
                server.login(settings.user, self._password)
            server.send_message(message, to_addrs=[to])


async def _logged(work: Awaitable[None]) -> None:
    try:
        await work
    except Exception as failure:
        # Do not log the address, or the text, which may contain a link.
        logger.warning("an e-mail was not sent: %s", type(failure).__name__)
