"""A turn ends within its bound and records each attempt, whatever receivers do and whatever fails."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.handlers import Sink

from serve_app.certificates import make_authority, make_certificate
from serve_app.console import mailer, notifier
from serve_app.console.mailer import Mailer
from serve_app.console.notifier import NOT_DELIVERED, Notifier
from serve_app.contracts.calls import Unavailable
from serve_app.contracts.commands import Command
from serve_app.contracts.notices import ListNotices, Notice, RecordAttempt, WatchAlerts
from serve_app.launch.preflight import free_port
from serve_app.settings import MailSettings
from serve_app.storage.sealing import SecretKeys, of_webhooks, seal
from serve_app.webhook_address import UNUSABLE
from tests.accounting.books import NOON

from .webhook_receiver import Receiver

KEYS = SecretKeys(b"secret key")
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
PATIENCE_S = 60.0

Connected = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Due:
    """The books, as far as a notifier sees them: notices that are due, and the attempts that it records."""

    def __init__(self, *targets: str, secret: str = SECRET) -> None:
        self.notices = [notice(str(number), target, secret) for number, target in enumerate(targets)]
        self.recorded: dict[str, RecordAttempt] = {}
        self.away = ""  # the notice whose attempt is not recorded, because the ledger is away

    async def run(self, command: Command[Any]) -> Any:
        match command:
            case WatchAlerts():
                return [], None
            case ListNotices():
                return self.notices
            case RecordAttempt(notice_id) if notice_id == self.away:
                raise Unavailable("the ledger is restarting")
            case RecordAttempt(notice_id):
                self.recorded[notice_id] = command

    def errors(self) -> list[str]:
        return [self.recorded[one.notice_id].error for one in self.notices]


def notice(notice_id: str, target: str, secret: str) -> Notice:
    sealed = secret and seal(secret, KEYS, of_webhooks("acct_1"))
    return Notice(notice_id, "acct_1", "Ada's", "USD", "day", 1, 1, target, NOON, 0, NOON, None, "", sealed)


def sender(due: Due, mail: MailSettings | None = None) -> Notifier:
    sends = None if mail is None else Mailer(mail, "", lambda: NOON)
    return Notifier(due, sends, lambda: NOON, secret_keys=KEYS, private_webhooks=True)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No attempt fails because the machine is slow. Tests of a bound set it."""
    for module, bound in ((notifier, "WEBHOOK_S"), (notifier, "MAIL_S"), (mailer, "RELAY_S")):
        monkeypatch.setattr(module, bound, PATIENCE_S)


@contextlib.asynccontextmanager
async def listening(connected: Connected) -> AsyncIterator[int]:
    """The port of a server whose connections have ended with this."""
    tasks: list[asyncio.Task[Any]] = []

    async def until_it_ends(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.current_task())  # type: ignore[arg-type]
        with contextlib.suppress(ConnectionError):
            await connected(reader, writer)
        writer.close()

    async with await asyncio.start_server(until_it_ends, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]
        await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)


async def test_a_webhook_that_answers_byte_by_byte_does_not_hold_the_turn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nx: ")
        while True:  # until the notifier hangs up
            writer.write(b"a")
            await writer.drain()
            await asyncio.sleep(0.01)

    monkeypatch.setattr(notifier, "WEBHOOK_S", 0.5)
    async with listening(drip) as port:
        due = Due(f"http://127.0.0.1:{port}/")
        await asyncio.wait_for(sender(due).turn(), PATIENCE_S)
    assert due.errors() == [NOT_DELIVERED]
    assert "TimeoutError: not done within 0.5 s" in caplog.text
    assert due.recorded["0"].next_at == NOON + notifier.AGAIN_S[0]


async def test_a_mail_relay_that_says_nothing_holds_neither_turn_nor_webhooks(monkeypatch: pytest.MonkeyPatch) -> None:
    hang_up = asyncio.Event()

    async def say_nothing(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await hang_up.wait()

    monkeypatch.setattr(notifier, "MAIL_S", 0.2)
    with Receiver() as receiver:
        async with listening(say_nothing) as port:
            mail = MailSettings(host="127.0.0.1", port=port, sender="billing@service.example", starttls=False)
            due = Due(*(["ada@example.org"] * mailer.MAILS_AT_ONCE * 2), receiver.url)
            await asyncio.wait_for(sender(due, mail).turn(), PATIENCE_S)
            hang_up.set()
    *mails, webhook = due.errors()
    assert set(mails) == {NOT_DELIVERED}
    assert webhook == ""


@pytest.mark.parametrize(
    "target", ["a@[", "x://y@z", "(" * 400 + "@b.c", "http://y@z", "https://xn--zz--/", "", "a\0@b"]
)
async def test_an_attempt_is_recorded_whatever_fails(target: str) -> None:
    mail = MailSettings(host="127.0.0.1", port=1, sender="billing@service.example", starttls=False)
    with Receiver() as receiver:
        due = Due(target, receiver.url)
        due.notices[0] = notice("0", target, "")  # as a person's address has none
        await sender(due, mail).turn()
    poisoned, other = due.errors()
    assert poisoned
    assert other == ""
    assert due.recorded["0"].next_at == NOON + notifier.AGAIN_S[0]


async def test_a_turn_that_the_ledger_fails_ends_when_all_is_sent() -> None:
    due = Due("ada@example.org", "ben@example.org")
    answered = due.run

    async def run(command: Command[Any]) -> Any:
        if isinstance(command, RecordAttempt) and command.notice_id != due.away:
            for _ in range(5):  # rounds of the loop, after the other has failed
                await asyncio.sleep(0)
        return await answered(command)

    due.away, due.run = "0", run  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        await sender(due).turn()
    assert list(due.recorded) == ["1"]


@pytest.mark.parametrize("trusted", [True, False])
async def test_a_relay_gets_a_message_only_with_a_certificate_that_is_trusted(
    trusted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    authority = make_authority("a test", datetime.now(UTC))
    signed = make_certificate(authority, ["127.0.0.1"], datetime.now(UTC))
    relay, trust = tmp_path / "relay.pem", tmp_path / "authority.pem"
    relay.write_bytes(signed.certificate_pem + signed.key_pem)
    trust.write_bytes(authority.certificate_pem)
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(trust))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(relay)
    port = free_port()
    controller = Controller(
        Sink(), hostname="127.0.0.1", port=port, tls_context=context, require_starttls=True, ready_timeout=PATIENCE_S
    )
    controller.start()
    try:
        due = Due("ada@example.org")
        await sender(due, MailSettings(host="127.0.0.1", port=port, sender="billing@service.example")).turn()
    finally:
        controller.stop()
    [error] = due.errors()
    assert error == ("" if trusted else NOT_DELIVERED)
    assert ("certificate verify failed" in caplog.text) is not trusted


async def test_what_a_notice_failed_by_names_nothing_of_the_services_own_network(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Only the log says what a name leads to, and which relay or port refused."""
    mail = MailSettings(host="127.0.0.1", port=1, sender="billing@service.example", starttls=False)
    due = Due("https://localhost/", "https://host.that.is.nowhere.invalid/", "ada@example.org")
    told = Notifier(due, Mailer(mail, "", lambda: NOON), lambda: NOON, secret_keys=KEYS)
    await told.turn()
    assert due.errors() == [UNUSABLE, UNUSABLE, NOT_DELIVERED]
    assert "127.0.0.1, which is not public" in caplog.text
    assert "Connection refused" in caplog.text
