"""Group commit: settlements that wait at the same time share one transaction, and so one flush to disk.

One thread commits whatever is waiting as soon as it is free; there is no timer, so a lone settlement is not delayed,
and under load the batches grow by themselves while the commit before them runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice

from serve_app.ledger.errors import LedgerUnavailable, SettlementRefused
from serve_app.ledger.messages import Settled, Settlement, SettlementRejected

logger = logging.getLogger(__name__)

Settle = Callable[[Sequence[Settlement]], Sequence[Settled | SettlementRejected]]

FIRST_PAUSE_S = 0.01
LONGEST_PAUSE_S = 0.5


@dataclass(slots=True)
class _Waiting:
    settlement: Settlement
    deadline: float  # monotonic seconds
    future: Future[Settled] = field(default_factory=Future)


class GroupCommitter:
    """Settles through `settle` (such as `Ledger.settle`), at most `max_batch` at once.

    While the database is away, the same settlements are tried again for `give_up_after_s` seconds, counted from their
    submission; then, after the attempt in progress, they fail with LedgerUnavailable. At most `max_waiting` wait.
    """

    def __init__(
        self, settle: Settle, *, max_batch: int = 64, give_up_after_s: float = 5.0, max_waiting: int = 10_000
    ) -> None:
        self._settle = settle
        self._max_batch = max_batch
        self._give_up_after_s = give_up_after_s
        self._max_waiting = max_waiting
        self._waiting: deque[_Waiting] = deque()  # in the order of their deadlines; settled ones leave at the left
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ledger-group-commit", daemon=True)
        self._thread.start()

    def submit(self, settlement: Settlement) -> Future[Settled]:
        """See `submit_all`."""
        [future] = self.submit_all([settlement])
        return future

    def submit_all(self, settlements: Sequence[Settlement]) -> list[Future[Settled]]:
        """Each settlement's result, once it is committed; from any thread. They are committed together if they can be.

        A future cannot be cancelled: a caller that goes away does not undo a usage. It raises SettlementRefused when
        the ledger can never take the settlement, and LedgerUnavailable when the database stayed away: nobody knows
        then whether it was settled, so spool it and settle it again with the same id. Too many waiting, or a closed
        committer, are LedgerUnavailable too.
        """
        deadline = time.monotonic() + self._give_up_after_s
        added = [_Waiting(settlement, deadline) for settlement in settlements]
        for one in added:
            one.future.set_running_or_notify_cancel()
        with self._changed:
            if self._closed:
                refusal = "the committer is closed: spool the settlement"
            elif len(self._waiting) + len(added) > self._max_waiting:
                refusal = f"{len(self._waiting)} settlements are waiting already: spool the settlement"
            else:
                refusal = None
                self._waiting.extend(added)
                self._changed.notify_all()
        if refusal is not None:
            for one in added:
                one.future.set_exception(LedgerUnavailable(refusal))
        return [one.future for one in added]

    @property
    def waiting(self) -> int:
        """How many settlements are not committed yet."""
        return len(self._waiting)

    def close(self, timeout_s: float | None = None) -> bool:
        """Take no more, settle what waits (or let it fail), and stop. False if that took longer than `timeout_s`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                # They stay in the queue until they are settled, so that a failed batch is simply taken again.
                batch = list(islice(self._waiting, self._max_batch))
            if not batch:
                return
            try:
                self._commit(batch)
                pause = FIRST_PAUSE_S
            except LedgerUnavailable as error:
                logger.warning("cannot commit %d settlements, %d waiting: %s", len(batch), self.waiting, error)
                self._give_up(error)
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)

    def _commit(self, batch: Sequence[_Waiting]) -> None:
        try:
            results = self._settle([one.settlement for one in batch])
            if len(results) != len(batch):
                raise RuntimeError(f"{len(results)} results for {len(batch)} settlements")
        except LedgerUnavailable:
            raise
        except Exception as error:
            # One of them upsets the database in a way that nobody foresaw: find it, the others are not to blame.
            if len(batch) > 1:
                logger.exception("a batch of %d settlements failed; settling them one by one", len(batch))
                for one in batch:
                    self._commit([one])
                return
            logger.exception("settlement %r failed", batch[0].settlement)
            self._leave(batch)
            batch[0].future.set_exception(error)
            return
        self._leave(batch)
        for one, result in zip(batch, results, strict=True):
            if isinstance(result, Settled):
                one.future.set_result(result)
            else:
                one.future.set_exception(SettlementRefused(result))

    def _leave(self, batch: Sequence[_Waiting]) -> None:
        with self._changed:
            for _ in batch:
                self._waiting.popleft()

    def _give_up(self, error: LedgerUnavailable) -> None:
        late: list[_Waiting] = []
        with self._changed:
            now = time.monotonic()
            while self._waiting and self._waiting[0].deadline <= now:
                late.append(self._waiting.popleft())
        for one in late:
            one.future.set_exception(LedgerUnavailable(str(error)))
