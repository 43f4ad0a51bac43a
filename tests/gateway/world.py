"""A whole gateway in one process: real ledger, real admission, real HTTP app; a scripted model that says it is one.

Between the parts lie `Wire`s, which do what a network and dying processes do: fail, hang, lose an answer after the
call took effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.accounting.accounting_service import AccountingService
from serve_app.admin.endpoint import AdminServices
from serve_app.admin.routes import admin_router
from serve_app.contracts import metrics
from serve_app.contracts.accounting_shards import AccountingShards
from serve_app.contracts.calls import Unavailable
from serve_app.contracts.commands import Command
from serve_app.contracts.errors import LedgerError
from serve_app.contracts.generation import (
    BackendEvent,
    Delta,
    Finished,
    FinishReason,
    GenerateCall,
    Rejected,
    Rejection,
    Started,
    TokenizeCall,
    Tokenized,
)
from serve_app.contracts.limits import Contract
from serve_app.contracts.metric import Metric
from serve_app.contracts.ports import BackendUnavailable
from serve_app.gateway.app import build_app
from serve_app.gateway.authentication import Authenticator
from serve_app.gateway.backends import Catalogue
from serve_app.gateway.limiter_client import LimiterClient
from serve_app.gateway.observer import Observer
from serve_app.gateway.query_rates import QueryRates
from serve_app.gateway.record import RequestRecord
from serve_app.gateway.services import Services
from serve_app.gateway.settlements import Settlements
from serve_app.gateway.wrong_keys import WrongKeys
from serve_app.limiter.admission import Admission
from serve_app.limiter.limiter_service import LimiterService
from serve_app.settings import GatewaySettings, IdentifierSettings
from serve_app.storage.sealing import SecretKeys
from serve_app.storage.spool import Spool
from tests.accounting.books import Ledger
from tests.gateway import quick_ledger
from tests.gateway.quick_ledger import NANO, SECRET

PATIENT_S = 60.0  # for timeouts that no test waits for: a slow machine does not reach them
OPERATOR = "operator-key-of-the-tests"
FORMER_OPERATOR = "operator-key-of-last-year"  # valid too, as while a key is replaced
PRICE_IN, PRICE_OUT = 1000, 3000  # nano-units a token
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
        self.called: list[str] = []  # the operations that were called
        self.wire_settle = Wire(service.settle)
        self.wire_call = Wire(service.run)

    async def settle(self, settlements: list[Any]) -> Any:
        answers = await self.wire_settle([one.request_id for one in settlements], settlements)
        self.settled += [one.request_id for one in settlements]
        return answers

    async def run(self, command: Command[Any]) -> Any:
        name = type(command).__name__
        self.called.append(name)
        answer = await self.wire_call([name], command)
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
    """Steps of the fake model in one call: an event, an exception to raise, or an asyncio.Event to wait for."""

    steps: list[Any]
    begun: int = 0  # steps; what was said before the last of these has been taken
    calls: list[GenerateCall] = field(default_factory=list)
    closed: asyncio.Event = field(default_factory=asyncio.Event)


def says(*pieces: str, prompt: int = 10, reason: FinishReason = FinishReason.STOP) -> list[Any]:
    deltas = [Delta(text, number) for number, text in enumerate(pieces, start=1)]
    return [Started(prompt, 0), *deltas, Finished(reason, prompt, 0, len(pieces))]


def taking(
    generate: Callable[[str, GenerateCall], AsyncGenerator[BackendEvent, None]],
) -> Callable[[str, GenerateCall, Callable[[BackendEvent], None]], Awaitable[None]]:
    """BackendPort.generate, by a generator of the events."""

    async def generate_and_take(backend: str, call: GenerateCall, take: Callable[[BackendEvent], None]) -> None:
        async with contextlib.aclosing(generate(backend, call)) as events:
            async for event in events:
                take(event)

    return generate_and_take


class FakeBackends:
    """BackendPort without a model: plays scripts, one a call; the last one again and again."""

    def __init__(self) -> None:
        self.scripts: list[Script] = [Script(says("Hello", " world"))]
        self.calls: list[GenerateCall] = []
        self.token_calls: list[tuple[str, TokenizeCall]] = []
        self.tokenized: Tokenized | Rejected | BaseException | asyncio.Event | None = None  # in place of an answer
        self.running = 0
        self.fingerprints: dict[str, str] = {}
        self.report: dict[str, dict[str, Any]] | None = {"fake": {"status": "RUNNING", "replicas": 1}}

    def play(self, *scripts: list[Any]) -> list[Script]:
        self.scripts = [Script(steps) for steps in scripts]
        return list(self.scripts)

    async def generate(self, backend: str, call: GenerateCall, take: Callable[[BackendEvent], None]) -> None:
        self.calls.append(call)
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        script.calls.append(call)
        self.running += 1
        try:
            for step in script.steps:
                script.begun += 1
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, BaseException):
                    raise step
                else:
                    take(step)
        finally:
            self.running -= 1
            script.closed.set()

    async def tokenize(self, backend: str, call: TokenizeCall) -> Tokenized | Rejected:
        """A token is a character."""
        self.token_calls.append((backend, call))
        answer = self.tokenized
        if isinstance(answer, asyncio.Event):
            await answer.wait()
        elif isinstance(answer, BaseException):
            raise answer
        elif answer is not None:
            return answer
        if call.token_ids is not None:
            greatest = sys.maxunicode
            for token in call.token_ids:
                if not 0 <= token <= greatest:
                    message = f"{token} is not a token of the model: ids are from 0 to {greatest}"
                    return Rejected(Rejection.INVALID, message=message, param="tokens")
            text = "".join(map(chr, call.token_ids))
            return Tokenized(len(call.token_ids), text=text.encode(errors="replace").decode())  # as tokenizers do
        text = call.text if call.text is not None else "".join(message["content"] for message in call.messages)
        ids = tuple(map(ord, text))
        return (
            Tokenized(len(ids)) if call.only_count else Tokenized(len(ids), ids, tuple(text) if call.with_names else ())
        )

    async def fingerprint(self, backend: str) -> str:
        if self.report is None or backend not in self.report:
            raise BackendUnavailable("no replica")
        return self.fingerprints.get(backend, "")

    async def status(self) -> dict[str, dict[str, Any]]:
        if self.report is None:
            raise BackendUnavailable("the controller is away")
        return self.report


class Counts:
    """Metrics that record every value."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, int]] = []
        self.refusals: list[str] = []
        self.settlements: list[str] = []
        self.reruns: list[str] = []  # the backends that lost a replica
        self.first_tokens = 0
        self.doors: list[str] = []

    def add(self, counter: Metric, value: float, *labels: str) -> None:
        assert len(labels) == len(counter.labels)
        if counter is metrics.REQUESTS:
            self.requests.append((labels[0], int(labels[2])))
        elif counter is metrics.REFUSALS:
            self.refusals.append(labels[1])
        elif counter is metrics.SETTLEMENTS:
            self.settlements.append(labels[0])
        elif counter is metrics.DOOR_REQUESTS:
            self.doors += labels
        elif counter is metrics.RERUNS:
            self.reruns.append(labels[1])

    def observe(self, histogram: Metric, value: float, *labels: str) -> None:
        assert len(labels) == len(histogram.labels)
        self.first_tokens += histogram is metrics.FIRST_TOKEN_SECONDS

    def set(self, gauge: Metric, value: float, *labels: str) -> None: ...

    def export_zeros(self, declared: object, served: object = ()) -> None: ...


_admin: ContextVar[AdminServices] = ContextVar("_admin")


class _AdminOfTheApp:
    """The AdminServices of the app that a request came to."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_admin.get(), name)


@cache
def _admin_router() -> APIRouter:
    """One for all worlds: FastAPI takes longer to make its routes than a request takes."""
    return admin_router(_AdminOfTheApp())  # type: ignore[arg-type]


class _WithAdmin:
    """Tells the shared routes which app a request came to."""

    def __init__(self, app: ASGIApp, admin: AdminServices) -> None:
        self._app, self._services = app, admin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        token = _admin.set(self._services)
        try:
            await self._app(scope, receive, send)
        finally:
            _admin.reset(token)


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
        secret_keys: SecretKeys | None = None,
        name: str = "",
        **settings: Any,
    ) -> None:
        timeouts = ("admit_timeout_s", "settle_timeout_s", "queue_timeout_s", "keep_alive_s", "early_reply_s")
        defaults = {**dict.fromkeys(timeouts, PATIENT_S), "queries_per_minute": 10**6}
        self.settings = GatewaySettings.model_validate({**FULL_SETTINGS, **defaults, **settings})
        self.folder = folder
        self.secret_keys = secret_keys or SecretKeys(SECRET)
        self.beside = beside
        self.is_dead = False
        self.later_s = 0.0  # how far the limiter's wall clock is ahead
        self.passed_s = 0.0  # on the clock of the limiter's leases and rates, which only the test advances
        self._template = None if beside or ledger.exists() else quick_ledger.template()
        if beside:
            self.ledger = beside.ledger
        else:
            self.ledger = quick_ledger.open_new(ledger) if self._template else Ledger(f"sqlite:///{ledger}")
        self.services_of_accounting = (
            beside.services_of_accounting
            if beside
            else [AccountingService(self.ledger) for _ in range(accounting_shards)]
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
        self.records: list[RequestRecord] = []  # of the requests that have ended
        catalogue = Catalogue(self.settings)
        self.name = name or ("gateway-2" if beside else "gateway-1")
        self.spool = Spool(folder / "spool", self.name, max_bytes=self.settings.spool_max_bytes)
        self.limiter_client = LimiterClient(
            self.limiters, self.name, ledger_port, admit_timeout_s=self.settings.admit_timeout_s
        )
        for shard in self.limiter_client._shards:
            shard._asks.timeout_s = shard._look_ups.timeout_s = PATIENT_S
        self.settlements = Settlements(
            ledger_port,
            self.spool,
            self.metrics,
            self.limiter_client,
            settle_timeout_s=self.settings.settle_timeout_s,
        )
        self.services = Services(
            self.settings,
            catalogue,
            self.limiter_client,
            self.settlements,
            self.backends,
            Observer(self.metrics, self.targets, self.records.append),
            orphan_delay_s=0.05,
        )
        self.now = 0.0  # of the clock that wrong keys are counted by
        self.authenticator = Authenticator(
            self.limiter_client,
            operator_keys=[OPERATOR, FORMER_OPERATOR],
            trusted_proxies=self.settings.trusted_proxies,
            wrong_keys=WrongKeys(lambda: self.now),
        )
        self.authenticator.beat_s = 0.001
        self.admin = AdminServices(
            self.authenticator,
            ledger_port,
            self.limiter_client,
            self.backends,
            self.backends.status,
            catalogue=lambda: self.services.catalogue,
            secret_keys=self.secret_keys,
            queries=QueryRates(self.settings.queries_per_minute, self.clock),
            patience_s=PATIENT_S,
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
            admission, self.accounting, lookup_wait_s=PATIENT_S, shards=shards or len(self.limiters), clock=self.clock
        )

    def targets(self, model: str) -> IdentifierSettings:
        return self.services.catalogue[model]

    def clock(self) -> float:
        """Returns the limiter's time in seconds."""
        return 1000.0 + self.passed_s

    async def start(self) -> None:
        if self.beside is not None:
            self.account_id, self.key = self.beside.account_id, self.beside.key
            return
        for limiter in self.limiters:
            await limiter.service.follow()
        if self._template is not None:
            self.account_id, self.key = self._template.account_id, self._template.key
        else:
            self.account_id, self.key = self.new_account()

    async def stop(self) -> None:
        for limiter in self.limiters:
            for task in limiter.service._tasks:
                task.cancel()
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
        """A gateway's death, as other processes see it: it sends nothing more, and its spool has no owner."""
        for wire in [limiter.wire for limiter in self.limiters] + [one.wire_settle for one in self.accountings]:
            wire.down()
        self.is_dead = True
        await self._end()

    async def _end(self) -> None:
        await self.limiter_client.stop()
        await self.settlements.stop()
        await asyncio.to_thread(self.spool.close)

    def app(self) -> FastAPI:
        """One app for all requests, as in a gateway's process: building it takes longer than most requests."""
        if self._app is None:
            self._app = build_app(self.services, self.authenticator, [_admin_router()])
            self._app.add_middleware(_WithAdmin, admin=self.admin)
        return self._app

    def new_account(self, credit: int = NANO, **limits: int) -> tuple[str, str]:
        return quick_ledger.new_account(self.ledger, credit, **limits)

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
    def charged(self) -> int:
        """Returns the amount charged for the requests in the ledger."""
        return self.ledger.account_totals(self.account_id).charged

    @property
    def held(self) -> int:
        return sum(limiter.service.admission.status(self.account_id).held for limiter in self.limiters)

    @property
    def open_requests(self) -> int:
        return sum(limiter.service.admission.status(self.account_id).open_requests for limiter in self.limiters)

    @property
    def is_idle(self) -> bool:
        """Nothing is held, no slot is taken, nothing runs."""
        return not (self.held or self.open_requests or self.backends.running or self.limiter_client.open_requests)

    def books_balance(self) -> bool:
        """The whole check of the ledger, which takes longer than most tests."""
        return self.ledger.check().ok


async def until(look: Callable[[], Any], timeout_s: float = PATIENT_S) -> None:
    """Waits for something that background tasks are about to do."""
    async with asyncio.timeout(timeout_s):
        while not look():
            await asyncio.sleep(0.002)


async def settled(world: World, *, requests: int, spent: int) -> None:
    """Checks usage and balance, and that no hold, slot or running generation of the request is left."""
    await until(lambda: world.is_idle and world.recorded == requests)
    assert world.spent == world.charged == spent


def price(prompt: int, completion: int) -> int:
    return prompt * PRICE_IN + completion * PRICE_OUT
