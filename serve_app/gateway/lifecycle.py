"""Runs a gateway's background work: follows the ledger's models and traffic weights, and ejects failing backends.

Each gateway decides by itself which backends it uses. A rollback changes the weights for all gateways, so it is written
to the ledger: the first gateway does this, and the others find it done.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from serve_app.contracts import metrics
from serve_app.contracts.books import Audit
from serve_app.contracts.calls import Unavailable, application_of, detached, repeat
from serve_app.contracts.errors import LedgerError, LedgerUnavailable
from serve_app.contracts.metric import Metrics
from serve_app.contracts.ports import ApplicationsPort, BackendUnavailable, BooksPort
from serve_app.contracts.served import raised
from serve_app.contracts.served_commands import ReadServed, RollBackTraffic
from serve_app.gateway.backend_applications import Applications
from serve_app.gateway.backend_health import BackendHealth, Ejection, Verdict
from serve_app.gateway.backends import NOTHING, Availability, Catalogue
from serve_app.gateway.record import RequestRecord
from serve_app.gateway.services import Services

logger = logging.getLogger("ray.serve")

READ_S: Final = 0.5  # between two reads of the ledger's models and weights
LOOK_S: Final = 0.25  # between two judgements of the requests and backends
STATUS_S: Final = 1.0  # between two reads of Serve's status
FIRST_READ_S: Final = 10.0  # maximum wait for the ledger's weights at startup
TIMEOUT_S: Final = 5.0  # per call to the ledger or to Serve


class Lifecycle:
    """Keeps the catalogue of `services` and its availability up to date.

    Without `applications` nothing is deployed. `changed` is called with each new catalogue. `clock` is the clock of the
    requests' phases, in seconds.
    """

    def __init__(
        self,
        services: Services,
        books: BooksPort,
        applications: ApplicationsPort | None,
        counted: Metrics,
        changed: Callable[[Catalogue], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._services = services
        self._books = books
        self._applications = None if applications is None else Applications(applications, clock)
        self._counted = counted
        self._changed = changed
        self._clock = clock
        self._served = NOTHING
        self._availability = Availability()
        self._health = BackendHealth(clock)
        self._status: Mapping[str, Mapping[str, Any]] | None = None  # None: not known yet
        self._judged: set[str] = set()  # running requests that have a verdict
        self._down: dict[str, set[str]] = {}  # by identifier: backends that do not run while another one does
        self._exported: dict[tuple[str, str], bool] = {}  # (identifier, backend) -> value of BACKEND_EJECTED
        self._ledger_is_unavailable = False
        self._has_read = False
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Starts the background work, once the ledger's weights are known or after FIRST_READ_S without an answer."""
        try:
            async with asyncio.timeout(FIRST_READ_S):
                await _retry_until_done(self.read)
        except TimeoutError:
            logger.warning("the ledger does not answer: identifiers and prices are unknown until it does")
        await self.read_status()
        for step, every_s in ((self.read, READ_S), (self.read_status, STATUS_S), (self.look, LOOK_S)):
            self._tasks.append(
                detached(repeat(step, every_s, "a step of the gateway's background work failed"), endless=True)
            )

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    def rebuild(self) -> None:
        """Builds a new catalogue from the current settings and the ledger's state."""
        catalogue = Catalogue(self._services.settings, self._served, self._availability, is_known=self._has_read)
        self._services.catalogue = catalogue
        self._health.keep({(name, backend) for name in catalogue.identifiers for backend in catalogue.behind(name)})
        self._refresh()
        self._changed(catalogue)

    async def read(self) -> bool:
        """Reads the ledger's changes. Returns False if the ledger is unavailable; the known state then stays in use."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                served = await self._books.run(ReadServed(self._served.version if self._has_read else -1))
        except (Unavailable, LedgerUnavailable, TimeoutError) as error:
            if not self._ledger_is_unavailable:
                logger.warning("cannot read models and weights from the ledger, and keep the known ones: %s", error)
            self._ledger_is_unavailable = True
            return False
        self._ledger_is_unavailable = False
        if served is not None:
            self._has_read, self._served = True, served
            self.rebuild()
        return True

    async def status(self) -> dict[str, dict[str, Any]]:
        """Returns Serve's status (see BackendPort) and routes requests by it from now on. Raises BackendUnavailable."""
        self._status = status = await self._services.backends.status()
        self._refresh()
        return status

    async def read_status(self) -> None:
        """Asks Serve which backends run, and starts or stops backends to match the ledger."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                status = await self.status()
        except (BackendUnavailable, TimeoutError):
            return  # the known status stays in use
        if self._applications is not None and self._has_read:
            self._applications.follow(self._served.backends, status)

    async def look(self) -> None:
        """Judges the running and the finished requests, and ejects backends or brings them back accordingly."""
        self._judge_requests()
        ejections: list[Ejection] = []
        catalogue = self._services.catalogue
        for identifier in catalogue.identifiers:
            ejections += self._health.judge(identifier, self._could_reply(catalogue, identifier))
        probes = self._availability.probes | self._health.due_probes()
        self._availability.probes = {key: probes[key] for key in probes.keys() & self._health.ejected}
        self._refresh()
        self._move_waiting()
        for one in ejections:
            logger.error("%s: the backend %s is ejected: %s", one.identifier, one.backend, one.reason)
            self._counted.add(metrics.BACKEND_EJECTIONS, 1, one.identifier, one.backend)
            detached(self._roll_back(one), endless=True)

    def _judge_requests(self) -> None:
        """Records one verdict on each request, as soon as it is certain. A later bad verdict replaces it."""
        for record in list(self._services.calls):
            verdict = self._verdict(record)
            is_new = verdict is not None and (record.request_id not in self._judged or verdict is not Verdict.GOOD)
            if verdict is not None and is_new:
                self._health.note((record.model, record.backend), record.request_id, record.account_id, verdict)
                self._judged.add(record.request_id)
            if record.phases.ended_at is not None or record.phases.failed:
                self._services.calls.discard(record)
                self._judged.discard(record.request_id)

    def _move_waiting(self) -> None:
        """Ends calls that wait for a backend that does not run: their requests run again on another backend."""
        for record in self._services.calls:
            leave = record.leave if record.phases.started_at is None else None
            if leave is not None and record.backend in self._down.get(record.model, ()):
                record.leave = None
                leave()

    def _verdict(self, record: RequestRecord) -> Verdict | None:
        """Returns the verdict, or None while it is open or if the client ended the request too early for one."""
        phases = record.phases
        if phases.failed:
            return Verdict.FAILED
        if phases.called_at is None or record.model not in self._services.catalogue:
            return None
        target = self._services.catalogue[record.model]
        first = phases.first_at
        waited = (first or phases.ended_at or self._clock()) - phases.called_at
        if waited > target.first_token_target_s:
            return Verdict.LATE
        if first is None:
            return None
        per_token_s = phases.per_token_s if phases.ended_at is not None else None
        return Verdict.LATE if (per_token_s or 0.0) > target.output_token_target_s else Verdict.GOOD

    def _could_reply(self, catalogue: Catalogue, identifier: str) -> set[str]:
        """Returns the backends that run, and that have a weight now or would have one after a rollback."""
        before = self._served.before.get(identifier)
        names = {*catalogue.behind(identifier), *(before.weights if before is not None else ())}
        return {name for name in names if self._is_ready(name)}

    def _is_ready(self, backend: str) -> bool:
        return self._status is None or is_ready(self._status.get(application_of(backend)))

    def _refresh(self) -> None:
        """Stops using backends that do not run or are ejected, unless no other backend remains."""
        catalogue, ejected, out = self._services.catalogue, self._health.ejected, {}
        for identifier in catalogue.identifiers:
            names = set(catalogue.behind(identifier))
            down = {name for name in names if not self._is_ready(name)}
            self._down[identifier] = down if names - down else set()
            bad = {name for name in names if (identifier, name) in ejected}
            for left_out in (down | bad, down):
                if names - left_out:
                    out[identifier] = frozenset(left_out)
                    break
        self._availability.out, self._availability.ejected = out, ejected
        probes = self._availability.probes
        self._availability.probes = {key: probes[key] for key in probes if self._is_ready(key[1])}
        served = {(name, backend) for name in catalogue.identifiers for backend in catalogue.behind(name)}
        for key in served | self._exported.keys():
            if self._exported.get(key) != (is_out := key in ejected):
                self._counted.set(metrics.BACKEND_EJECTED, float(is_out), *key)
                self._exported[key] = is_out

    async def _roll_back(self, ejection: Ejection) -> None:
        """Undoes, for all gateways, the roll-out that raised the backend's share.

        Retries while the ledger is unavailable, as long as the backend is ejected.
        """
        await _retry_until_done(lambda: self._try_roll_back(ejection))

    async def _try_roll_back(self, ejection: Ejection) -> bool:
        """Tries the rollback once. Returns False if it must be retried."""
        identifier, backend = ejection.identifier, ejection.backend
        if (identifier, backend) not in self._health.ejected:
            return True
        traffic, before = self._served.traffic.get(identifier), self._served.before.get(identifier)
        if traffic is None or before is None or backend not in raised(traffic.weights, before.weights):
            return True
        if not any(self._is_ready(name) for name in before.weights if name != backend):
            return True
        command = RollBackTraffic(identifier, traffic.version, f"rule: {backend}: {ejection.reason}", Audit("rule"))
        try:
            async with asyncio.timeout(TIMEOUT_S):
                restored = await self._books.run(command)
        except (Unavailable, LedgerUnavailable, TimeoutError):
            return False
        except LedgerError as error:
            # The traffic was changed meanwhile, or cannot be restored. The backend stays ejected until probes succeed.
            logger.error("%s: the traffic was not rolled back: %s", identifier, error)
            return True
        logger.error("%s: rolled back to version %d: %s", identifier, restored.version, command.reason)
        return True


def is_ready(status: Mapping[str, Any] | None) -> bool:
    """Returns whether an application can take requests: a replica runs, or it has scaled to zero."""
    return status is not None and (status["replicas"] > 0 or status["status"] == "RUNNING")


async def _retry_until_done(step: Callable[[], Awaitable[bool]]) -> None:
    while True:
        if await step():
            return
        await asyncio.sleep(READ_S)
