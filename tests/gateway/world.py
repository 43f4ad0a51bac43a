"""A whole gateway in one process: real ledger, real admission, real HTTP app; a scripted model that says it is one.

Between the parts lie `Wire`s, which do what a network and dying processes do: fail, hang, lose an answer after the
call took effect.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from serve_app.backend.messages import BackendEvent, GenerateCall
from serve_app.engine.request import Delta, Finished, FinishReason, Started
from serve_app.gateway.accounting import AccountingService
from serve_app.gateway.app import build_app
from serve_app.gateway.catalogue import Catalogue
from serve_app.gateway.coalesce import Unavailable
from serve_app.gateway.exchange import Services
from serve_app.gateway.identity import Authenticator
from serve_app.gateway.leases import Leases
from serve_app.gateway.limiter import LimiterService
from serve_app.gateway.operations import Operations
from serve_app.gateway.outbox import Outbox
from serve_app.gateway.ports import BackendUnavailable
from serve_app.gateway.shards import AccountingShards, LimiterShards
from serve_app.gateway.wrong_keys import WrongKeys
from serve_app.ledger import Ledger, LedgerError, keys
from serve_app.ledger.spool import Spool
from serve_app.limits import Admission, Contract
from serve_app.settings import GatewaySettings

OPERATOR = "operator-key-of-the-tests"
SECRET = b"key secret of the tests"
PRICE_IN, PRICE_OUT = 1000, 3000  # nano-units a token
NANO = 10**9
FULL_SETTINGS = {
    "models": {
        name: {"backends": {"fake": 100}, "price": {"input": "1", "cached_input": "0.5", "output": "3"}}
        for name in ("svc-chat", "svc-coder")
    }
}


class Wire:
    """Lets calls through, or breaks them.

    `fail` raises before the call, `lose` after it took effect, `hold` keeps calls waiting until it is set.
    """

    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self._call = call
        self.fail: set[str] = set()
        self.lose: set[str] = set()
        self.hold: dict[str, asyncio.Event] = {}
        self.arrived: dict[str, asyncio.Event] = {}

    def down(self, *names: str) -> None:
        self.fail.update(names or ("*",))

    def up(self) -> None:
        self.fail.clear()
        self.lose.clear()

    def seen(self, name: str) -> asyncio.Event:
        return self.arrived.setdefault(name, asyncio.Event())

    async def __call__(self, names: Iterable[str], *arguments: Any) -> Any:
        given = {*names, "*"}
        for name in given:
            self.seen(name).set()
        for name in given & set(self.hold):
            await self.hold[name].wait()
        if given & self.fail:
            raise Unavailable("the wire is cut")
        answer = await self._call(*arguments)
        if given & self.lose:
            raise Unavailable("the answer was lost")
        return answer


class AccountingWire:
    """AccountingPort, as deployments.ports.AccountingHandle is one."""

    def __init__(self, service: AccountingService) -> None:
        self.settled: list[str] = []
        self.called: list[str] = []  # operations that were asked for
        self.wire_settle = Wire(service.settle)
        self.wire_call = Wire(service.call)

    async def settle(self, settlements: list[Any]) -> Any:
        answers = await self.wire_settle([one.request_id for one in settlements], settlements)
        self.settled += [one.request_id for one in settlements]
        return answers

    async def call(self, operation: str, arguments: dict[str, Any]) -> Any:
        self.called.append(operation)
        answer = await self.wire_call([operation], operation, arguments)
        if isinstance(answer, LedgerError):
            raise answer
        return answer


class LimiterWire:
    """LimiterPort. `service` can be replaced: a limiter that has restarted."""

    def __init__(self, service: LimiterService) -> None:
        self.service = service
        self.asked: list[Any] = []
        self.wire = Wire(self._ask)

    async def _ask(self, asks: list[Any]) -> Any:
        self.asked += asks
        return await self.service.ask(asks)

    async def ask(self, asks: list[Any]) -> Any:
        return await self.wire([type(ask).__name__ for ask in asks], asks)


@dataclass
class Script:
    """What the fake model does with one call: an event, an exception to raise, or an asyncio.Event to wait for."""

    steps: list[Any]
    calls: list[GenerateCall] = field(default_factory=list)
    closed: asyncio.Event = field(default_factory=asyncio.Event)


def says(*pieces: str, prompt: int = 10, reason: FinishReason = FinishReason.STOP) -> list[Any]:
    deltas = [Delta(text, number) for number, text in enumerate(pieces, start=1)]
    return [Started(prompt, 0), *deltas, Finished(reason, prompt, 0, len(pieces))]


class FakeBackends:
    """BackendPort without a model: plays scripts, one a call; the last one again and again."""

    def __init__(self) -> None:
        self.scripts: list[Script] = [Script(says("Hello", " world"))]
        self.calls: list[GenerateCall] = []
        self.running = 0
        self.fingerprints: dict[str, str] = {}
        self.report: dict[str, dict[str, Any]] | None = {"fake": {"status": "RUNNING", "replicas": 1}}

    def play(self, *scripts: list[Any]) -> list[Script]:
        self.scripts = [Script(steps) for steps in scripts]
        return list(self.scripts)

    async def generate(self, backend: str, call: GenerateCall) -> AsyncGenerator[BackendEvent, None]:
        self.calls.append(call)
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        script.calls.append(call)
        self.running += 1
        try:
            for step in script.steps:
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, BaseException):
                    raise step
                else:
                    yield step
        finally:
            self.running -= 1
            script.closed.set()

    async def fingerprint(self, backend: str) -> str:
        if self.report is None or backend not in self.report:
            raise BackendUnavailable("no replica")
        return self.fingerprints.get(backend, "")

    async def status(self) -> dict[str, dict[str, Any]]:
        if self.report is None:
            raise BackendUnavailable("the controller is away")
        return self.report


class Counts:
    """Metrics that remember."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, int]] = []
        self.refusals: list[str] = []
        self.settlements: list[str] = []

    def request(self, model: str, status: int, seconds: float) -> None:
        self.requests.append((model, status))

    def refusal(self, reason: str) -> None:
        self.refusals.append(reason)

    def first_token(self, model: str, seconds: float) -> None: ...

    def tokens(self, model: str, prompt: int, cached: int, completion: int) -> None: ...

    def settlement(self, outcome: str, seconds: float) -> None:
        self.settlements.append(outcome)


class World:
    """One gateway over one ledger; another one over the same ledger, and limiters, with `beside`."""

    def __init__(
        self,
        folder: Path,
        ledger: Path,
        *,
        limiter_shards: int = 1,
        accounting_shards: int = 1,
        beside: World | None = None,
        limiters: list[LimiterService] | None = None,
        **settings: Any,
    ) -> None:
        # Long, so that a busy machine changes nothing: tests of what a timeout does set it.
        timeouts = {"admit_timeout_s": 30.0, "settle_timeout_s": 30.0, "queue_timeout_s": 60.0}
        defaults = {**timeouts, "keep_alive_s": 60.0, "early_reply_s": 60.0}
        self.settings = GatewaySettings.model_validate({**FULL_SETTINGS, **defaults, **settings})
        self.folder = folder
        self.beside = beside
        self.is_dead = False
        self.later_s = 0.0  # how far the limiter's calendar has run ahead
        self.passed_s = 0.0  # how far the clock of the limiter's leases and rates has
        self.ledger = beside.ledger if beside else Ledger(f"sqlite:///{ledger}")
        self.services_of_accounting = (
            beside.services_of_accounting
            if beside
            else [AccountingService(self.ledger, give_up_after_s=0.2) for _ in range(accounting_shards)]
        )
        self.accounting_service = self.services_of_accounting[0]
        self.accountings = [AccountingWire(service) for service in self.services_of_accounting]
        self.accounting = self.accountings[0]
        ledger_port = AccountingShards(self.accountings)
        if limiters is None and beside:
            limiters = [wire.service for wire in beside.limiters]
        elif limiters is None:
            limiters = [self.new_limiter(shards=limiter_shards) for _ in range(limiter_shards)]
        self.limiters = [LimiterWire(one) for one in limiters]
        self.limiter = self.limiters[0]
        self.backends, self.metrics = FakeBackends(), Counts()
        catalogue = Catalogue(self.settings, random.Random(7))
        self.name = "gateway-2" if beside else "gateway-1"
        self.spool = Spool(folder / "spool", self.name, max_bytes=self.settings.spool_max_bytes)
        self.leases = LimiterShards(
            [Leases(wire, self.name, admit_timeout_s=self.settings.admit_timeout_s) for wire in self.limiters],
            ledger_port,
        )
        self.outbox = Outbox(
            ledger_port, self.spool, self.metrics, self.leases, settle_timeout_s=self.settings.settle_timeout_s
        )
        self.services = Services(
            self.settings, catalogue, self.leases, self.outbox, self.backends, self.metrics, orphan_delay_s=0.05
        )
        self.now = 0.0  # of the clock that wrong keys are counted by
        self.authenticator = Authenticator(
            self.leases,
            key_secret=SECRET,
            operator_key=OPERATOR,
            trusted_proxies=self.settings.trusted_proxies,
            wrong_keys=WrongKeys(lambda: self.now),
        )
        self.operations = Operations(
            ledger_port, self.leases, self.backends, catalogue, key_secret=SECRET, currency="USD"
        )
        self.account_id, self.key = "", ""
        self._app: FastAPI | None = None

    def new_limiter(self, recovery_s: float = 0.0, lease_s: float = 10.0, shards: int | None = None) -> LimiterService:
        contract = Contract(rpm=1000, tpm=10**6, concurrency=8)
        admission = Admission(
            self.clock,
            random.Random(7),
            contract,
            lease_s=lease_s,
            recovery_s=recovery_s,
            wall=lambda: time.time() + self.later_s,
        )
        return LimiterService(
            admission, self.accounting, lookup_wait_s=30, shards=shards or len(self.limiters), clock=self.clock
        )

    def clock(self) -> float:
        """Of the limiter, in seconds."""
        return time.monotonic() + self.passed_s

    async def start(self) -> None:
        if self.beside is not None:
            self.account_id, self.key = self.beside.account_id, self.beside.key
            return
        for limiter in self.limiters:
            await limiter.service.follow()
        self.account_id, self.key = self.new_account()

    async def stop(self) -> None:
        for limiter in self.limiters:
            limiter.service.stop()
        wires = [limiter.wire for limiter in self.limiters]
        for accounting in self.accountings:
            wires += [accounting.wire_settle, accounting.wire_call]
        for wire in wires:
            wire.up()
            for gate in wire.hold.values():
                gate.set()
        if not self.is_dead:
            await self._end()
        if self.beside is None:
            await self.accounting_service.close()

    async def die(self) -> None:
        """What the others see of a gateway's death: it says nothing any more, and its spool is nobody's."""
        for wire in [limiter.wire for limiter in self.limiters] + [one.wire_settle for one in self.accountings]:
            wire.down()
        self.is_dead = True
        await self._end()

    async def _end(self) -> None:
        await self.leases.stop()
        await self.outbox.stop()
        await asyncio.to_thread(self.spool.close)

    def app(self) -> FastAPI:
        """One for all requests, as in a gateway's process: building it takes longer than most of them."""
        if self._app is None:
            self._app = build_app(self.services, self.authenticator, self.operations)
        return self._app

    def new_account(self, credit: int = NANO, **limits: int) -> tuple[str, str]:
        account = self.ledger.create_account("Ada")
        if credit:
            self.ledger.credit(account.account_id, credit)
        if limits:
            self.ledger.set_limits(account.account_id, **limits)
        key = keys.new_key()
        self.ledger.create_key(account.account_id, "main", keys.digest(key, SECRET), keys.hint(key))
        return account.account_id, key

    @property
    def balance(self) -> int:
        return self.ledger.get_account(self.account_id).balance

    @property
    def spent(self) -> int:
        return NANO - self.balance

    @property
    def recorded(self) -> int:
        """Requests in the ledger."""
        return self.ledger.account_totals(self.account_id).requests

    @property
    def held(self) -> int:
        return sum(limiter.service.admission.held(self.account_id) for limiter in self.limiters)

    @property
    def open_requests(self) -> int:
        return sum(limiter.service.admission.open_requests(self.account_id) for limiter in self.limiters)

    @property
    def is_idle(self) -> bool:
        """Nothing is held, no slot is taken, nothing runs."""
        return not (self.held or self.open_requests or self.backends.running or self.leases.open_requests)

    def books_balance(self) -> bool:
        report = self.ledger.check()
        return report.ok


async def until(look: Callable[[], Any], timeout_s: float = 30.0) -> None:
    """Waits for something that background tasks are about to do."""
    async with asyncio.timeout(timeout_s):
        while not look():
            await asyncio.sleep(0.002)


async def settled(world: World, *, requests: int, spent: int) -> None:
    """The books say so, and nothing of the request is left anywhere."""
    await until(lambda: world.is_idle and world.recorded == requests)
    assert world.spent == spent
    assert world.books_balance()


def price(prompt: int, completion: int) -> int:
    return prompt * PRICE_IN + completion * PRICE_OUT
