"""Alerts reach a mail server and a webhook over real connections, and are tried again."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from email.message import EmailMessage
from email.parser import BytesParser
from email.policy import default
from pathlib import Path
from typing import Any

import pyotp
import pytest
from aiosmtpd.controller import Controller
from standardwebhooks import Webhook, WebhookVerificationError

from serve_app.console.mailer import Mailer
from serve_app.console.notifier import AGAIN_S, NOT_DELIVERED, Notifier
from serve_app.contracts.notices import CreateAlert, ListNotices
from serve_app.launch.preflight import free_port
from serve_app.settings import MailSettings
from serve_app.storage.sealing import SecretKeys, of_webhooks, seal
from tests.accounting.books import NOON

from .conftest import PASSWORD, House, submit
from .webhook_receiver import Receiver

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as made:
        yield made


@pytest.fixture
def mailbox() -> Iterator[tuple[MailSettings, list[tuple[str, EmailMessage]]]]:
    received: list[tuple[str, EmailMessage]] = []

    class Handler:
        async def handle_DATA(self, _server: Any, _session: Any, envelope: Any) -> str:  # noqa: N802
            message = BytesParser(policy=default).parsebytes(envelope.content)
            received.append((envelope.rcpt_tos[0], message))  # type: ignore[arg-type]
            return "250 OK"

    port = free_port()
    controller = Controller(Handler(), hostname="127.0.0.1", port=port, ready_timeout=60.0)
    controller.start()
    yield MailSettings(host="127.0.0.1", port=port, sender="billing@service.example", starttls=False), received
    controller.stop()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No attempt fails because the machine is slow."""
    for bound in ("notifier.WEBHOOK_S", "notifier.MAIL_S", "mailer.RELAY_S"):
        monkeypatch.setattr(f"serve_app.console.{bound}", 60.0)


def notifier(house: House, mail: MailSettings | None = None, *, private: bool = True) -> Notifier:
    secret_keys = house.console.secret_keys
    mailer = None if mail is None else Mailer(mail, "", house.clock)
    return Notifier(house.console.books, mailer, house.clock, secret_keys=secret_keys, private_webhooks=private)


def alert(house: House, target: str, secret: str = "") -> None:
    """Fires at once: the account has 5."""
    sealed = secret and seal(secret, house.console.secret_keys, of_webhooks(house.account_id))
    house.ledger.run(CreateAlert(house.account_id, "balance", 6 * 10**9, target, sealed))


async def test_a_webhook_gets_one_signed_message(house: House, receiver: Receiver) -> None:
    house.clock.now = time.time()  # who verifies compares it
    alert(house, receiver.url, SECRET)
    told, signed = notifier(house), Webhook(SECRET)
    for _ in range(3):
        await told.turn()
    [(headers, body)] = receiver.came
    document = json.loads(body)
    assert document["type"] == "balance.low"
    assert document["data"]["account_id"] == house.account_id
    assert (document["data"]["value"], document["data"]["threshold"]) == ("5.00", "6.00")
    [notice] = house.ledger.run(ListNotices(house.account_id))
    assert headers["webhook-id"] == notice.notice_id
    assert headers["host"] == receiver.url.split("/")[2]
    assert signed.verify(body, headers) == document
    with pytest.raises(WebhookVerificationError):
        signed.verify(body.replace(b"5.00", b"9.00"), headers)
    with pytest.raises(WebhookVerificationError):
        signed.verify(body, headers | {"webhook-id": "notice_other"})


async def test_a_failed_message_is_tried_again_and_given_up_at_last(house: House, receiver: Receiver) -> None:
    alert(house, receiver.url, SECRET)
    told, receiver.status = notifier(house), 302  # which leads elsewhere, and is not followed
    for wait in AGAIN_S:
        await told.turn()
        [notice] = house.ledger.run(ListNotices(house.account_id))
        assert (notice.next_at, notice.delivered_at) == (house.clock.now + wait, None)
        await told.turn()
        house.clock.now += wait
    await told.turn()
    [notice] = house.ledger.run(ListNotices(house.account_id))
    assert (len(receiver.came), notice.next_at, notice.attempts) == (len(AGAIN_S) + 1, None, len(AGAIN_S) + 1)
    assert "302" in notice.error
    assert len({headers["webhook-id"] for headers, _ in receiver.came}) == 1


async def test_an_e_mail_says_what_has_happened(house: House, mailbox: Any) -> None:
    settings, received = mailbox
    alert(house, "ada@example.org")
    await notifier(house, settings).turn()
    [(to, message)] = received
    assert (to, message["From"]) == ("ada@example.org", "billing@service.example")
    assert message["Subject"] == "Ada's: balance low"
    assert "The balance is 5.00 USD, below 6.00." in message.get_content()
    assert house.account_id in message.get_content()


async def test_one_that_can_not_be_told_does_not_keep_the_others(house: House, receiver: Receiver) -> None:
    for target in ("ada@example.org", "http://localhost:1/", "http://no.such.machine.invalid/", receiver.url):
        alert(house, target, SECRET)
    await notifier(house).turn()
    notices = house.ledger.run(ListNotices(house.account_id))
    assert {notice.target for notice in notices if notice.delivered_at} == {receiver.url}
    assert all(notice.error for notice in notices if not notice.delivered_at)


def test_secrets_are_not_readable_in_the_database(house: House, receiver: Receiver, tmp_path: Path) -> None:
    house.console.private_webhooks = True
    browser, path = house.member(), f"/console/accounts/{house.account_id}/alerts"
    made = submit(browser, path, path, kind="day", threshold="6", target=receiver.url).text
    webhook = re.search(r"whsec_([A-Za-z0-9+/=]+)", made)
    assert webhook is not None
    totp = pyotp.random_base32()
    fields = {"secret": totp, "code": pyotp.TOTP(totp).at(house.clock.now), "password": PASSWORD}
    assert submit(browser, "/console/profile", "/console/profile/codes", **fields).status_code == 200
    stored = b"".join(one.read_bytes() for one in tmp_path.glob("ledger.db*"))
    assert receiver.url.encode() in stored
    assert not any(secret.encode() in stored for secret in (webhook[1], totp))


async def test_a_webhook_whose_secret_does_not_open_is_told_on_the_page(
    house: House, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    strange = seal(SECRET, SecretKeys(b"another secret key"), of_webhooks(house.account_id))
    house.ledger.run(CreateAlert(house.account_id, "balance", 6 * 10**9, receiver.url, strange))
    await notifier(house).turn()
    assert receiver.came == []
    [notice] = house.ledger.run(ListNotices(house.account_id))
    assert notice.error == NOT_DELIVERED
    assert "SERVE_APP_SECRET_KEY" in caplog.text


def test_the_page_shows_a_secret_once_and_what_was_told(house: House, receiver: Receiver) -> None:
    house.console.private_webhooks = True
    browser, path = house.member(role="billing"), f"/console/accounts/{house.account_id}/alerts"
    made = submit(browser, path, path, kind="balance", threshold="6", target=receiver.url)
    assert made.status_code == 201
    assert "whsec_" in made.text
    secret = re.search(r"whsec_[A-Za-z0-9+/=]+", made.text)
    assert secret is not None
    house.clock.now = time.time()  # who verifies compares it
    asyncio.run(notifier(house).turn())
    [(headers, body)] = receiver.came
    assert Webhook(secret[0]).verify(body, headers)["type"] == "balance.low"
    delivered, house.clock.now = time.gmtime(house.clock.now), NOON
    page = browser.get(path).text
    assert "whsec_" not in page
    assert "The balance is 5.00 USD, below 6.00." in page
    assert "Delivered" in page
    assert time.strftime(f'title="{delivered.tm_mday} %b %Y, %H:%M:', delivered) in page
    [remove] = {part for part in page.split('"') if part.endswith("/remove")}
    assert submit(browser, path, remove).status_code == 303
    assert "No alerts yet" in browser.get(path).text
    assert submit(browser, path, path, kind="day", threshold="1", target="ada@example.org").status_code == 422
    house.console.has_mail, house.console.private_webhooks = True, False
    assert submit(browser, path, path, kind="day", threshold="1", target="ada@example.org").status_code == 303
    for wrong in ({"threshold": "0"}, {"threshold": "x"}, {"kind": "x"}, {"target": "x"}, {"target": receiver.url}):
        fields = {"kind": "day", "threshold": "1", "target": "ada@example.org", **wrong}
        assert submit(browser, path, path, **fields).status_code == 422, wrong
