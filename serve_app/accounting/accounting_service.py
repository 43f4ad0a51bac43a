"""The accounting process without Ray: settles usage and maintains the books. All its state is in the database.

Several processes may share one ledger: the database allows one write at a time, and every operation here can be
repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from serve_app.accounting.books_watch import BooksWatch
from serve_app.accounting.ledger import Ledger
from serve_app.accounting.limiter_leases import LeaseWatch
from serve_app.accounting.registry import READS, STEPS
from serve_app.contracts import metrics
from serve_app.contracts.books import Refusal, Settled, Settlement, SettlementRejected
from serve_app.contracts.calls import Coalescer, boottime, detached
from serve_app.contracts.commands import (
    Command,
    ExpireGrants,
    FindKeys,
    FindReply,
    FindResponse,
    FindUnsettled,
    HoldLease,
    PostHolds,
    PricedModels,
    PruneReplies,
    ReadChanges,
    RecordPrices,
    ReleaseLease,
)
from serve_app.contracts.errors import LedgerError, LedgerUnavailable
from serve_app.contracts.metric import Metrics
from serve_app.contracts.money import NANO_PER_UNIT
from serve_app.contracts.ports import SettleAnswer
from serve_app.contracts.served_commands import CreateModel, ReadServed

logger = logging.getLogger("ray.serve")

COMMIT_TIMEOUT_S = 30.0  # longer than the ledger waits for its database
# A call that runs this long after its timeout is stuck. A call that resolves a host name may run half a minute longer
# than its timeout.
STUCK_S = 60.0
COMMIT_STUCK_S = 300.0  # maximum time for one batch, whose settlements may have to be settled one by one
# Clients' requests depend on these commands, so the commands have dedicated threads.
LOOK_UPS = (FindKeys, ReadChanges, ReadServed)
LEASES = (HoldLease, ReleaseLease, PostHolds)  # behind other commands, these could wait until a limiter's lease expires
LONG_READS = (command for command, reading in READS.items() if reading.timeout_s is not None)
SLOW = frozenset((*LONG_READS, *STEPS))  # commands whose duration depends on the amount of data that they read
LANE_WAIT_S = 10.0  # maximum wait for a thread; gateways wait as long for a stored reply
MAX_WAITING = 2000  # maximum waiting commands per lane
UNAVAILABLE_RETRY_S = 0.5  # minimum delay between attempts while the database is unavailable, for all callers together
FOR_REPLICAS = (FindUnsettled,)  # commands that model replicas may run; none of them may move money
TIDY_EVERY_S = 60.0  # maximum delay before an expired grant or an old reply is removed


class Lane:
    """Dedicated threads for one kind of command. Limits how many commands wait for a thread, and for how long.

    While the database hangs, waiting commands must not pile up: their callers give up and retry.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=f"ledger-{name}")
        self._free = asyncio.Semaphore(threads)
        self._waiting = 0

    async def run(self, function: Callable[[Command[Any]], Any], command: Command[Any]) -> Any:
        """Runs the function in a thread of the lane. Raises LedgerUnavailable if none is free in time."""
        if self._waiting >= MAX_WAITING:
            raise LedgerUnavailable(f"{self._waiting} commands are already waiting for the ledger: try again")
        self._waiting += 1
        try:
            async with asyncio.timeout(LANE_WAIT_S):
                await self._free.acquire()
        except TimeoutError:
            raise LedgerUnavailable(f"the ledger was busy for {LANE_WAIT_S:g} s: try again") from None
        finally:
            self._waiting -= 1
        running = asyncio.get_running_loop().run_in_executor(self._threads, function, command)
        running.add_done_callback(self._ended)
        # Shielded: if the caller gives up, the thread stays busy until the function returns.
        return await asyncio.shield(running)

    def _ended(self, running: asyncio.Future[Any]) -> None:
        self._free.release()
        if not running.cancelled():
            running.exception()  # marks the exception as retrieved, because the caller may have given up

    def close(self) -> None:
        self._threads.shutdown(wait=False)


class AccountingService:
    """Settles usage and runs account operations on one ledger."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        tidy_every_s: float = TIDY_EVERY_S,
        check_every_s: float = 0.0,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = boottime,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._ledger = ledger
        self._clock = clock
        self._wall = wall
        self._tidy_every_s = tidy_every_s
        self._metrics = metrics
        self._leases = LeaseWatch(clock)
        self._closing = asyncio.Event()
        self._tidying: asyncio.Task[None] | None = None
        self._checking: asyncio.Task[None] | None = None
        self._watch = BooksWatch(self.run, metrics, check_every_s) if metrics is not None and check_every_s else None
        self._open: set[asyncio.Future[Any]] = set()  # pending answers
        # A separate thread: clients wait for their settlements, so these must not queue behind other callers' reads.
        self._committing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger-commit")
        self._committing_since: float | None = None
        self._commits: Coalescer[Settlement, SettleAnswer] = Coalescer(
            self._commit_in_thread, timeout_s=COMMIT_TIMEOUT_S
        )
        # Separate lanes: exports and their database connections must not delay key look-ups, the feed of revocations,
        # or a revocation itself.
        self._look_ups, self._reads, self._writes = Lane("look-ups", 4), Lane("reads", 4), Lane("writes", 2)
        self._lease_turns = Lane("leases", 1)
        # Commands that account holders can make slow: long queries, and stored replies of a megabyte.
        self._long_reads, self._replies = Lane("long-reads", 4), Lane("replies", 2)

    def start(self) -> None:
        """Starts the periodic removal of expired grants and old replies, and the checks of the books."""
        self._tidying = detached(self._tidy_forever())
        if self._watch is not None:
            self._checking = detached(self._watch.check_forever())

    async def answer(self, message: list[Settlement] | Command[Any]) -> Any:
        """Settles a list of settlements, or runs a command."""
        return await (self.settle(message) if isinstance(message, list) else self.run(message))

    async def answer_replica(self, message: list[Settlement] | Command[Any]) -> Any:
        """Answers a model replica: settles interrupted calls, which store no reply, or runs a command of FOR_REPLICAS.

        Raises PermissionError for anything else.
        """
        if isinstance(message, list):
            allowed = all(type(one) is Settlement and one.reply is None and one.response is None for one in message)
        else:
            allowed = type(message) in FOR_REPLICAS
        if allowed:
            return await self.answer(message)
        raise PermissionError(
            f"a replica may only settle interrupted calls and run FOR_REPLICAS commands: {message!r}"[:300]
        )

    async def settle(self, settlements: list[Settlement]) -> list[SettleAnswer]:
        """Commits the settlements before it returns. Settlements that wait at the same time are committed together.

        A settlement is committed even if its caller gives up. If an answer is LedgerUnavailable, it is unknown whether
        that settlement was committed: repeat it with the same id.
        """
        answers = asyncio.gather(*map(self._commits.submit, settlements), return_exceptions=True)
        self._open.add(answers)
        answers.add_done_callback(self._open.discard)
        return [
            LedgerUnavailable(str(answer)) if isinstance(answer, BaseException) else answer
            for answer in await asyncio.shield(answers)
        ]

    async def _commit_in_thread(self, settlements: list[Settlement]) -> list[SettleAnswer]:
        loop = asyncio.get_running_loop()
        answers = await loop.run_in_executor(self._committing, self._commit_timed, settlements)
        self._count(settlements, answers)
        unavailable = next((answer for answer in answers if isinstance(answer, LedgerUnavailable)), None)
        if unavailable is not None:
            # Fail all waiting settlements now, not batch by batch. Their callers still have them and retry.
            self._commits.fail_waiting(str(unavailable))
            await asyncio.sleep(UNAVAILABLE_RETRY_S)
        return answers

    def _commit_timed(self, settlements: Sequence[Settlement]) -> list[SettleAnswer]:
        self._committing_since = self._clock()
        try:
            return self._commit(settlements)
        finally:
            self._committing_since = None

    def _count(self, settlements: Sequence[Settlement], answers: Sequence[SettleAnswer]) -> None:
        """Exports the metrics of new settlements: lag, revenue, and charges that no balance covered."""
        if self._metrics is None:
            return
        now = self._wall()
        for settlement, answer in zip(settlements, answers, strict=True):
            if not isinstance(answer, Settled) or answer.duplicate:
                continue
            self._metrics.observe(metrics.LEDGER_LAG, max(0.0, now - settlement.finished_at))
            if answer.charged:
                self._metrics.add(metrics.REVENUE, answer.charged / NANO_PER_UNIT, settlement.model)
            if answer.uncollected:
                self._metrics.add(metrics.UNCOLLECTED, answer.uncollected / NANO_PER_UNIT)

    def _commit(self, settlements: Sequence[Settlement]) -> list[SettleAnswer]:
        try:
            answers: list[Settled | SettlementRejected] = self._ledger.settle(settlements)
        except LedgerUnavailable as error:
            logger.warning("cannot commit %d settlements: %s", len(settlements), error)
            return [error] * len(settlements)
        except Exception as error:
            # Usually, a single settlement of the batch causes the error. Settling one by one commits the others.
            if len(settlements) > 1:
                logger.exception("a batch of %d settlements failed; settling them one by one", len(settlements))
                return [answer for settlement in settlements for answer in self._commit([settlement])]
            logger.exception("settlement %r failed", settlements[0])
            reason = f"unexpected error in the ledger: {type(error).__name__}"
            answers = [SettlementRejected(settlements[0].request_id, Refusal.FAILED, reason)]
        refused = [pair for pair in zip(settlements, answers, strict=True) if isinstance(pair[1], SettlementRejected)]
        if not refused:
            return [*answers]
        kept = self._store_rejected(refused)  # type: ignore[arg-type]
        return [kept.pop(0) if isinstance(answer, SettlementRejected) else answer for answer in answers]

    def _store_rejected(self, refused: Sequence[tuple[Settlement, SettlementRejected]]) -> list[SettleAnswer]:
        """Stores rejected settlements so that an operator can decide about them. Returns their answers."""
        try:
            self._ledger.keep_stuck(refused)
        except LedgerUnavailable as error:
            return [error] * len(refused)
        except Exception:
            if len(refused) > 1:
                return [answer for one in refused for answer in self._store_rejected([one])]
            # An operator can still find this usage in the log.
            logger.critical("the ledger can neither settle nor store %r", refused[0][0], exc_info=True)
            return [refused[0][1]]
        return [replace(rejected, kept=True) for _, rejected in refused]

    async def run(self, command: Command[Any]) -> Any:
        """Returns the command's answer or its LedgerError.

        Errors are returned, because a raised error may reach the calling process wrapped in another type.
        """
        if isinstance(command, HoldLease):
            command = self._leases.with_over(command)
        try:
            answer = await self._lane(command).run(self._ledger.run, command)
        except LedgerError as error:
            return error
        if isinstance(command, HoldLease):
            self._leases.look(command, answer)
        if isinstance(command, RecordPrices | CreateModel) and self._metrics is not None:
            models = command.prices if isinstance(command, RecordPrices) else [command.identifier]
            self._metrics.export_zeros([metrics.REVENUE], [{"model": model} for model in models])
        return answer

    def _lane(self, command: Command[Any]) -> Lane:
        if isinstance(command, LOOK_UPS):
            return self._look_ups
        if isinstance(command, LEASES):
            return self._lease_turns
        if isinstance(command, FindReply | FindResponse):
            return self._replies
        if type(command) in SLOW:
            return self._long_reads
        return self._reads if type(command) in READS else self._writes

    def check_health(self) -> None:
        """Raises RuntimeError if this process must be replaced.

        An unavailable or hanging database is no reason to replace the process, because every call to the database has
        a timeout. A call that still runs long after its timeout is stuck in this process.
        """
        if (overdue_s := self._ledger.overdue_s()) > STUCK_S:
            raise RuntimeError(f"a call to the ledger's database should have ended {overdue_s:.0f} s ago")
        since = self._committing_since
        if since is not None and (stuck_s := self._clock() - since) > COMMIT_STUCK_S:
            raise RuntimeError(f"the commit thread has worked on one batch of settlements for {stuck_s:.0f} s")
        if self._tidying is not None and self._tidying.done() and not self._closing.is_set():
            raise RuntimeError("the ledger's cleanup task has stopped")

    async def close(self) -> None:
        """Commits waiting settlements, and ends the tasks that `start` began."""
        self._closing.set()
        if self._checking is not None:
            self._checking.cancel()
        if self._tidying is not None:
            await asyncio.wait([self._tidying])
        while self._open:
            await asyncio.wait(self._open)
        await asyncio.to_thread(self._ledger.close)
        self._committing.shutdown(wait=False)
        lanes = (self._look_ups, self._reads, self._writes, self._lease_turns, self._long_reads, self._replies)
        for lane in lanes:
            lane.close()

    async def _tidy_forever(self) -> None:
        while True:
            await self._report()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._tidy_every_s):
                    await self._closing.wait()
                    return
            await self._tidy(ExpireGrants())
            await self._tidy(PruneReplies())

    async def _report(self) -> None:
        if self._metrics is None:
            return
        try:
            self._metrics.set(metrics.STUCK, await asyncio.to_thread(self._ledger.count_stuck))
            models = await self._reads.run(self._ledger.run, PricedModels())
            # Without zeros, a new process, or a shard to which no gateway reports prices, has no revenue series.
            self._metrics.export_zeros([metrics.REVENUE], [{"model": model} for model in models])
        except Exception as error:
            logger.warning("stuck settlements and models could not be counted: %s", error)

    async def _tidy(self, command: Command[int]) -> None:
        """Repeats a command that removes a limited number of rows, so that settlements can run between the calls."""
        try:
            removed = 1
            while removed and not self._closing.is_set():
                removed = await self._writes.run(self._ledger.run, command)
        except LedgerUnavailable as error:
            logger.warning("the ledger could not be tidied, next try in %g s: %s", self._tidy_every_s, error)
        except Exception:
            logger.exception("the ledger could not be tidied, next try in %g s", self._tidy_every_s)
