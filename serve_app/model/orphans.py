"""Settles replies whose gateway has died. The replica does this, or the process that adopts the replica's spool.

A live gateway settles within milliseconds, and only the first settlement of a request id counts. This process therefore
waits, asks the ledger which settlements are missing, and settles only those. The holds of a killed gateway outlive
this wait, so the account cannot have spent the money in the meantime.

With a spool, no usage is lost if this process dies: a reply's usage is written to the spool before its last event is
sent. It survives even the death of all processes at the same moment. The spool is flushed to disk twice a second. This
is enough, because the client's last chunk waits for the gateway's durable settlement, not for this one. Each process
also adopts the spools that dead processes have left in the same folder.

While the ledger is unavailable, a live gateway keeps its settlements in its own spool. They take precedence, so they
must be replayed first when the ledger is back. After an outage, a settlement here therefore waits once more: for as
long as it has already waited, but at most MAX_WAIT_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.contracts.books import Outcome, Settled, Settlement, SettlementRejected
from serve_app.contracts.errors import LedgerUnavailable, SpoolFull
from serve_app.contracts.generation import Finished, FinishReason, GenerateCall
from serve_app.contracts.money import format_amount
from serve_app.contracts.ports import SettleAnswer
from serve_app.contracts.units import utc_text
from serve_app.storage.spool import Spool

logger = logging.getLogger("ray.serve")

TRIES = 360  # one per second for six minutes, because accounting or its database may be restarting
RETRY_S = 1.0
TICK_S = 0.5  # seconds between two flushes
LATE_S = 0.5  # if an answer takes longer, the ledger counts as unavailable until the answer arrives
ASK_TIMEOUT_S = 10.0
DRAIN_S = 5.0  # maximum seconds to settle at shutdown; the rest stays in the spool
MAX_WAIT_S = 900.0  # maximum wait for the gateways' spools after an outage
MAX_SEEN = 10_000  # maximum number of replies whose timings are kept for the log

Settle = Callable[[list[Settlement]], Awaitable[Sequence[SettleAnswer]]]
Unsettled = Callable[[tuple[str, ...]], Awaitable[Collection[str]]]


@dataclass(frozen=True, slots=True)
class Seen:
    """A reply's replica, trace id and durations, for the log. A duration is None if the phase was not reached.

    The trace id is None if there is no trace collector.
    """

    replica: str
    trace_id: str | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None


class _NotYet(Exception):
    """The settlements that the ledger lacks are not due yet."""


class Orphans:
    """The pending settlements. `settle` is AccountingPort's method; `unsettled` returns the ids that the ledger lacks.

    Without a spool, only interrupted streams are settled, from memory. `settled` is called with each settlement that
    the ledger did not have yet. `clock` returns Unix seconds. A settlement is due `delay_s` after the reply's end. Each
    new reply replaces `delay_s` with its call's `settle_after_s`.
    """

    def __init__(
        self,
        settle: Settle,
        spool: Spool | None = None,
        unsettled: Unsettled | None = None,
        *,
        settled: Callable[[Settlement, Seen | None], None] = lambda _, __: None,
        clock: Callable[[], float] = time.time,
        delay_s: float = 2.0,
    ) -> None:
        self._settle = settle
        self._settled = settled
        self.spool = spool
        self._unsettled = unsettled
        self._clock = clock
        self._seen: dict[str, Seen] = {}  # of pending settlements, by request id, for the log
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: asyncio.Task[None] | None = None
        self._delay_s = delay_s
        self._ledger_is_unavailable = False
        self._back_at = clock()  # when the ledger last became available, as far as this process knows

    def start(self) -> None:
        """Starts to flush the spool and to settle its due settlements."""
        self._running = asyncio.get_running_loop().create_task(self._run(), context=contextvars.Context())

    def write_ahead(self, call: GenerateCall, finished: Finished, started_at: float, seen: Seen | None = None) -> bool:
        """Keeps a finished reply's usage until the ledger has it, even if this process dies at once.

        Returns False if the usage is not kept: there is no spool, the spool is full, or the reply was aborted or has
        failed. `started_at` is Unix time.
        """
        if self.spool is None or finished.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return False
        self._note(call, seen)
        return self._keep(self.spool, _settlement(call, finished, started_at, self._clock()), call.settle_after_s)

    def settle_later(self, call: GenerateCall, produced: Finished, started_at: float, seen: Seen | None = None) -> None:
        """Settles an interrupted call's output, `call.settle_after_s` seconds from now. `started_at` is Unix time."""
        self._note(call, seen)
        settlement = _settlement(call, produced, started_at, self._clock())
        if self.spool is not None and self._keep(self.spool, settlement, call.settle_after_s):
            return
        # The task has a separate context: this call is being cancelled, which also cancels calls made in its context.
        task = asyncio.get_running_loop().create_task(
            self._settle_after(call.settle_after_s, settlement), context=contextvars.Context()
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settle_due(self) -> None:
        """Adopts the spools of dead processes and settles all due settlements.

        Logs a ledger error once per outage. The remaining settlements wait for the next call.
        """
        if self.spool is not None:
            await asyncio.to_thread(self.spool.adopt_orphans)
            if self.spool.waiting:
                await self._replay(self.spool, self._is_due)

    async def drain(self) -> None:
        """Settles the remaining replies. After DRAIN_S, the rest stays in the spool for another process."""
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self.spool is None:
            return
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
        deadline = time.monotonic() + DRAIN_S
        while self.spool.waiting and time.monotonic() < deadline:
            # None: also settlements that are not due. If the ledger already has them, they need not wait.
            await self._replay(self.spool, None)
            if self.spool.waiting:
                await asyncio.sleep(0.1)
        await asyncio.to_thread(self.spool.flush)
        await asyncio.to_thread(self.spool.close)

    def _note(self, call: GenerateCall, seen: Seen | None) -> None:
        if seen is not None:
            self._seen[call.request_id] = seen
            if len(self._seen) > MAX_SEEN:  # the ledger has been unavailable for a long time
                del self._seen[next(iter(self._seen))]

    def _keep(self, spool: Spool, settlement: Settlement, delay_s: float) -> bool:
        self._delay_s = delay_s
        try:
            spool.append(settlement)
        except SpoolFull as error:
            logger.error("%s; %r is only in memory until it is settled", error, settlement)
            return False
        return True

    async def _run(self) -> None:
        assert self.spool is not None
        while True:
            await asyncio.sleep(TICK_S)
            try:
                await asyncio.to_thread(self.spool.flush)
                await self.settle_due()
            except Exception:
                logger.exception("this replica's spool could not be flushed or settled")

    async def _replay(self, spool: Spool, is_due: Callable[[Settlement], bool] | None) -> None:
        loop = asyncio.get_running_loop()

        def settle(batch: Sequence[Settlement]) -> Sequence[Settled | SettlementRejected]:
            return asyncio.run_coroutine_threadsafe(self._settle_batch(list(batch)), loop).result()

        with contextlib.suppress(_NotYet):
            try:
                await asyncio.to_thread(spool.replay, settle, is_due)
            except _NotYet:
                raise
            except Exception as error:
                if not self._ledger_is_unavailable:
                    logger.warning("%d settlements wait for the ledger: %r", spool.waiting, error)
                self._ledger_is_unavailable = True

    def _is_due(self, settlement: Settlement) -> bool:
        due_at = settlement.finished_at + self._delay_s
        if settlement.finished_at < self._back_at:
            missed_s = self._back_at - settlement.finished_at
            due_at = max(due_at, self._back_at + max(self._delay_s, min(missed_s, MAX_WAIT_S)))
        return self._clock() >= due_at

    async def _settle_batch(self, batch: list[Settlement]) -> Sequence[Settled | SettlementRejected]:
        assert self._unsettled is not None
        asked_at = self._clock()
        async with asyncio.timeout(ASK_TIMEOUT_S):
            missing = set(await self._unsettled(tuple(settlement.request_id for settlement in batch)))
        if self._ledger_is_unavailable or self._clock() - asked_at > LATE_S:
            self._ledger_is_unavailable = False
            self._back_at = self._clock()
        wanted = [settlement for settlement in batch if settlement.request_id in missing]
        if not all(map(self._is_due, wanted)):
            raise _NotYet
        answers: dict[str, Settled | SettlementRejected] = {}
        if wanted:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                for answer in await self._settle(wanted):
                    if isinstance(answer, LedgerUnavailable):
                        raise answer
                    answers[answer.request_id] = answer
            for settlement in wanted:
                self._report(settlement, answers.get(settlement.request_id))
        for settlement in batch:
            self._seen.pop(settlement.request_id, None)
        return [
            answers.get(settlement.request_id) or Settled(settlement.request_id, 0, 0, 0, duplicate=True)
            for settlement in batch
        ]

    def _report(self, settlement: Settlement, answer: Settled | SettlementRejected | None) -> None:
        if isinstance(answer, Settled) and not answer.duplicate:
            self._settled(settlement, self._seen.get(settlement.request_id))

    async def _settle_after(self, delay_s: float, settlement: Settlement) -> None:
        try:
            await self._settle_from_memory(delay_s, settlement)
        finally:
            self._seen.pop(settlement.request_id, None)

    async def _settle_from_memory(self, delay_s: float, settlement: Settlement) -> None:
        await asyncio.sleep(delay_s)
        failure: Exception | None = None
        for _ in range(TRIES):
            try:
                [answer] = await self._settle([settlement])
            except Exception as error:
                failure = error
            else:
                if isinstance(answer, Settled):
                    self._report(settlement, answer)
                    return
                if isinstance(answer, SettlementRejected):
                    logger.error("the ledger refuses %r: %s", settlement, answer.message)
                    return
                failure = answer
            await asyncio.sleep(RETRY_S)
        logger.error("the usage of an interrupted stream could not be settled: %r", settlement, exc_info=failure)


def orphan_line(settlement: Settlement, seen: Seen | None, process: str) -> dict[str, Any]:
    """Returns the log line of a request whose gateway has died.

    `process` is the process that has settled the request, usually the replica. `seen` is None if the replica has died
    as well.
    """
    one, seen = settlement, seen or Seen("")
    return {
        "time": utc_text(one.started_at, "milliseconds"),
        "event": "settled for a gateway that has died",
        "settled_by": process,
        "request_id": one.request_id,
        "trace_id": seen.trace_id,
        "account": one.account_id,
        "key": one.key_id,
        "model": one.model,
        "backend": one.backend,
        "replica": seen.replica or None,
        "outcome": one.outcome.value,
        "prompt_tokens": one.prompt_tokens,
        "cached_tokens": one.cached_tokens,
        "completion_tokens": one.completion_tokens,
        "price": format_amount(one.cost),
        "queue_ms": _ms(seen.queue_s),
        "prefill_ms": _ms(seen.prefill_s),
        "decode_ms": _ms(seen.decode_s),
        "total_ms": _ms(one.finished_at - one.started_at),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def _settlement(call: GenerateCall, produced: Finished, started_at: float, now: float) -> Settlement:
    bill = call.bill
    # A cancelled request without output tokens is free, unless `echo` has already returned the prompt.
    is_free = not produced.completion_tokens and (call.raw is None or not call.raw.echo)
    return Settlement(
        request_id=call.request_id,
        account_id=bill.account_id,
        key_id=bill.key_id,
        model=bill.model,
        backend=bill.backend,
        price=bill.price,
        prompt_tokens=produced.prompt_tokens,
        cached_tokens=produced.cached_tokens,
        completion_tokens=produced.completion_tokens,
        outcome=Outcome.CANCELLED if produced.completion_tokens or is_free else Outcome.COMPLETED,
        started_at=started_at,
        finished_at=now,
        epoch=bill.epoch,
    )
