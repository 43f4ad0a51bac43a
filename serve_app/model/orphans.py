"""Settles replies whose gateway has died, in this process or after it.

A gateway that is alive settles within milliseconds, and the first settlement of a request id counts. So this process
waits, asks the ledger what it still lacks, and settles only that. The holds of a gateway that was killed outlive the
delay, so the account cannot have spent the money in the meantime.

With a spool nothing of this is lost with the process: what a reply used is written before its last event leaves. The
write survives the death of this process and of all others at the same moment; it is flushed twice a second, because
the client's last chunk waits for a settlement that the gateway has made durable, not for this one. The spools of dead
processes in the same folder are adopted.

While the ledger is away, a gateway that is alive keeps its settlement, which is the better one, in a spool of its own.
When the ledger is back that spool is replayed first: what waits here waits again for as long as it had to wait.
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

TRIES = 360  # six minutes: accounting or its database may be restarting too
RETRY_S = 1.0
TICK_S = 0.5  # between two flushes
LATE_S = 0.5  # an answer that takes longer has waited for an accounting process
ASK_TIMEOUT_S = 10.0
DRAIN_S = 5.0  # then what is left stays in the spool
MAX_WAIT_S = 900.0  # for spools of gateways, after an outage of any length
MAX_SEEN = 10_000  # replies of which more is known than their usage

Settle = Callable[[list[Settlement]], Awaitable[Sequence[SettleAnswer]]]
Unsettled = Callable[[tuple[str, ...]], Awaitable[Collection[str]]]


@dataclass(frozen=True, slots=True)
class Seen:
    """What a replica knows of a reply beside its usage, for the log. Seconds; None: it was not reached.

    Without a collector of traces no call names its trace.
    """

    replica: str
    trace_id: str | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None


class _NotYet(Exception):
    """What the ledger lacks is not due."""


class Orphans:
    """The settlements that are due. `settle` is AccountingPort's; `unsettled` returns the ids that the ledger lacks.

    Without a spool only cut streams are settled, from memory. `settled` gets what was settled here first, and what this
    process has seen of it. `clock` returns Unix seconds. A settlement is due after `delay_s`, or as the last call says.
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
        self._seen: dict[str, Seen] = {}  # by request id: of what waits
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: asyncio.Task[None] | None = None
        self._delay_s = delay_s  # then as the last call says
        self._is_away = False
        self._back_at = clock()  # since when the ledger has answered, as far as this process knows

    def start(self) -> None:
        """Flushes the spool and settles what is due in it, from here on."""
        self._running = asyncio.get_running_loop().create_task(self._run(), context=contextvars.Context())

    def write_ahead(self, call: GenerateCall, finished: Finished, started_at: float, seen: Seen | None = None) -> bool:
        """Keeps what a finished reply has used until the ledger has it, also if this process dies at once.

        False where it is not kept: there is no spool, or it is full. `started_at` is Unix time.
        """
        if self.spool is None or finished.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return False
        self._note(call, seen)
        return self._keep(self.spool, _settlement(call, finished, started_at, self._clock()), call.settle_after_s)

    def settle_later(self, call: GenerateCall, produced: Finished, started_at: float, seen: Seen | None = None) -> None:
        """Settle what a cut call has produced, `call.settle_after_s` seconds from now. `started_at` is Unix time."""
        self._note(call, seen)
        settlement = _settlement(call, produced, started_at, self._clock())
        if self.spool is not None and self._keep(self.spool, settlement, call.settle_after_s):
            return
        # A context of its own: the call that ends here is being cancelled, and its child calls with it.
        task = asyncio.get_running_loop().create_task(
            self._settle_after(call.settle_after_s, settlement), context=contextvars.Context()
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settle_due(self) -> None:
        """Settles what is due in the spool, and what dead processes have left in theirs.

        An error of the ledger is logged once for an outage: the rest waits for the next call.
        """
        if self.spool is not None:
            await asyncio.to_thread(self.spool.adopt_orphans)
            if self.spool.waiting:
                await self._replay(self.spool, self._is_due)

    async def drain(self) -> None:
        """Settles what is left. What the ledger does not take in time stays in the spool for another process."""
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self.spool is None:
            return
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
        deadline = time.monotonic() + DRAIN_S
        while self.spool.waiting and time.monotonic() < deadline:
            # What the ledger has is done, due or not.
            await self._replay(self.spool, None)
            if self.spool.waiting:
                await asyncio.sleep(0.1)
        await asyncio.to_thread(self.spool.flush)
        await asyncio.to_thread(self.spool.close)

    def _note(self, call: GenerateCall, seen: Seen | None) -> None:
        if seen is not None:
            self._seen[call.request_id] = seen
            if len(self._seen) > MAX_SEEN:  # the ledger has been away for long
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
                logger.exception("the spool of this replica could not be worked on")

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
                if not self._is_away:
                    logger.warning("%d settlements wait for the ledger: %r", spool.waiting, error)
                self._is_away = True

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
        if self._is_away or self._clock() - asked_at > LATE_S:
            self._is_away = False
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
        logger.error("the usage of a cut stream could not be settled: %r", settlement, exc_info=failure)


def orphan_line(settlement: Settlement, seen: Seen | None, process: str) -> dict[str, Any]:
    """The log line of a request whose gateway is gone; `process` has settled it, and is most often its replica.

    `seen` is None where the replica is gone as well.
    """
    one, seen = settlement, seen or Seen("")
    return {
        "time": utc_text(one.started_at, "milliseconds"),
        "event": "settled for a gateway that is gone",
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
        outcome=Outcome.CANCELLED,
        started_at=started_at,
        finished_at=now,
        epoch=bill.epoch,
    )
