"""The console over a real ledger, mounted as in the service, with a clock of the test's own."""

from __future__ import annotations

import asyncio
import html
import json
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from argon2 import PasswordHasher
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient
from stripe import WebhookSignature

from serve_app.console import passwords
from serve_app.console.app import build_console
from serve_app.console.stripe_payments import Stripe
from serve_app.console.web import Console
from serve_app.contracts import people
from serve_app.contracts.books import Audit
from serve_app.contracts.calls import Unavailable
from serve_app.contracts.commands import Command
from serve_app.contracts.key_format import digest
from serve_app.contracts.limiting import AccountStatus
from serve_app.contracts.operators import SetOperatorRole
from serve_app.storage.sealing import SecretKeys
from tests.accounting.books import NOON, Clock, Ledger

from . import stripe_stand_in
from .stripe_stand_in import HOOK, StandIn

SECRET = b"secret key of the tests"
PASSWORD = "a long enough password"
CSRF = re.compile(r'name="csrf" value="([0-9a-f]{64})"')
CHEAP = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)

#: A script from elsewhere than the console's own files, or one inside the page. Data of charts are no script.
STRAY_SCRIPT = re.compile(
    r'<script(?! src="/console/static/[\w.]+\.js\?v=[0-9a-f]{12}"(?: defer| type="module")?></script>'
    r'| type="application/json" id="[\w-]+">)'
)


def words(page: str) -> str:
    """The text of a page, without its marks."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


class LedgerPort:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def run(self, command: Command[Any]) -> Any:
        return await asyncio.to_thread(self._ledger.run, command)


class House:
    """A console with accounts; `browser()` is one without cookies."""

    def __init__(self, ledger: Ledger, clock: Clock, portal: BlockingPortal) -> None:
        self.ledger, self.clock, self._portal = ledger, clock, portal
        self.live: dict[str, Any] | None
        self.status: AccountStatus | None = None
        self.live = {"open_requests": 2, "held": "0.50", "currency": "EUR", "limiters": [{"admits": True}]}
        self.live |= {"backends": [], "models": [], "accounts": [], "gateways": []}
        #: Answers of a gateway by operation, and the operations that were asked for.
        self.answers: dict[str, dict[str, Any]] = {}
        self.asked: list[tuple[str, dict[str, Any], str]] = []
        self.console = Console(
            LedgerPort(ledger),
            SecretKeys(SECRET),
            self._models,
            self._live,
            self._status_of,
            now=clock,
            administer=self._administer,
        )
        self.pages = build_console(self.console)
        self.app = Starlette(routes=[Mount("/console", self.pages)])
        self.account_id = ledger.create_account("Ada's").account_id
        ledger.credit(self.account_id, 5 * 10**9)

    async def _models(self) -> list[str]:
        return ["svc-chat", "svc-coder"]

    async def _status_of(self, account_id: str) -> AccountStatus:
        if self.status is None:
            raise Unavailable("the limiter is restarting")
        return self.status

    async def _administer(self, operation: str, given: Mapping[str, Any], audit: Audit | None) -> dict[str, Any]:
        self.asked.append((operation, dict(given), "" if audit is None else audit.actor))
        if operation not in self.answers:
            raise Unavailable("no gateway answers")
        return self.answers[operation]

    async def _live(self) -> dict[str, Any]:
        if self.live is None:
            raise Unavailable("the limiter is restarting")
        return self.live

    def browser(self, scheme: str = "http") -> TestClient:
        browser = TestClient(
            self.app, base_url=f"{scheme}://console.test", follow_redirects=False, client=("192.0.2.7", 1)
        )
        browser.portal = self._portal  # or each request would start a thread and a loop
        return browser

    def wait_for(self, work: Callable[[], Awaitable[None]]) -> None:
        """Runs work in the loop of the browsers' requests."""
        self._portal.call(work)

    def invite(self, email: str, role: str = "owner", account_id: str = "") -> str:
        token = f"token-of-{email}"
        wanted = people.InvitePerson(account_id or self.account_id, email, role, digest(token), self.clock.now + 3600)
        self.ledger.run(wanted)
        return f"/console/invitations/{token}"

    def member(self, email: str = "ada@example.org", role: str = "owner", account_id: str = "") -> TestClient:
        """A browser that has accepted an invitation."""
        browser, path = self.browser(), self.invite(email, role, account_id)
        answer = submit(browser, path, path, name="Ada", new_password=PASSWORD)
        assert answer.status_code == 303, answer.text
        return browser


def operator(house: House, role: str | None, email: str) -> TestClient:
    """A browser of an operator who has signed in."""
    staff = house.ledger.create_account("Staff").account_id
    house.member(email, account_id=staff)
    house.ledger.run(SetOperatorRole(email, role, staff))
    browser = house.browser()
    answer = submit(browser, "/console/sign-in", "/console/sign-in", email=email, password=PASSWORD)
    assert answer.status_code == 303
    return browser


def submit(browser: TestClient, page: str, action: str, **fields: Any) -> httpx.Response:
    """Opens a page, and posts a form with its token."""
    found = CSRF.search(browser.get(page).text)
    assert found is not None
    return browser.post(action, data={"csrf": found[1], **fields})


def cells(page: str, name: str) -> list[str]:
    """The texts of the cells beside the one with this text, in the first row of a table that has it."""
    for row in re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL):
        texts = [re.sub(r"<[^>]*>", "", cell).strip() for cell in re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)]
        if texts and texts[0] == name:
            return [html.unescape(text) for text in texts[1:]]
    raise AssertionError(f"no row of {name}")


def chart(page: str, name: str) -> Any:
    """The data of a chart."""
    found = re.search(rf'<script type="application/json" id="{name}-data">(.*?)</script>', page)
    assert found is not None
    return json.loads(found[1])


def send(house: House, body: str, *, secret: str = stripe_stand_in.SECRET, at: float | None = None) -> httpx.Response:
    """Sends a report, signed as Stripe signs it."""
    signature = WebhookSignature.generate_signature_header(body, secret, int(at or time.time()))
    return house.browser().post(HOOK, content=body, headers={"stripe-signature": signature})


def balance(house: House) -> str:
    return f"{house.ledger.get_account(house.account_id).balance / 10**9:.2f}"


@pytest.fixture(scope="session")
def empty_ledger(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a ledger that has its schema and nothing else."""
    path = tmp_path_factory.mktemp("template") / "ledger.db"
    Ledger(f"sqlite:///{path}").close()
    return path.read_bytes()


@pytest.fixture(scope="session")
def portal() -> Iterator[BlockingPortal]:
    """The loop in which all browsers send their requests."""
    with start_blocking_portal() as portal:
        yield portal


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No provider is away because the machine is slow."""
    monkeypatch.setattr("serve_app.console.openid.TIMEOUT_S", 60.0)


@pytest.fixture(autouse=True)
def cheap_passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hash of the service takes longer than a page."""
    monkeypatch.setattr(passwords, "_HASHER", CHEAP)
    monkeypatch.setattr(passwords, "_NOBODYS", CHEAP.hash("the password of nobody"))


@pytest.fixture
def house(tmp_path: Path, empty_ledger: bytes, portal: BlockingPortal) -> Iterator[House]:
    clock = Clock(NOON)
    (tmp_path / "ledger.db").write_bytes(empty_ledger)
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}", now=clock, migrate=False) as ledger:
        yield House(ledger, clock, portal)


@pytest.fixture
def api(house: House) -> Iterator[StandIn]:
    """Stripe, with which the house's accounts pay."""
    made = StandIn(house.account_id, house.clock)
    house.console.payments = Stripe("sk_test_1", stripe_stand_in.SECRET, made.url)
    yield made
    made.close()
