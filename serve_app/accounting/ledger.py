"""`Ledger`: settles usage and runs the commands of `contracts`, one transaction each."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from sqlalchemy.engine import URL

from serve_app.accounting import (  # noqa: F401  each module registers the commands that it runs
    accounts,
    alerts,
    api_keys,
    audit_log,
    billing_details,
    checkpoints,
    console_sessions,
    funds,
    identities,
    limiter_leases,
    management_keys,
    memberships,
    notes,
    operators,
    people,
    recent_requests,
    recharge_attempts,
    recharges,
    replies,
    returned_payments,
    sealed_secrets,
    served,
    served_backends,
    served_models,
    served_traffic,
    service_view,
    sign_in,
    sign_up,
    snapshots,
    statements,
    stored_responses,
    stuck,
    usage,
)
from serve_app.accounting.currency import claim_currency
from serve_app.accounting.database import Database
from serve_app.accounting.registry import READS, STEPS, WRITES
from serve_app.accounting.schema import responses
from serve_app.accounting.settle import settle
from serve_app.contracts import commands
from serve_app.contracts.books import Refusal, Settled, Settlement, SettlementRejected, StuckSettlement
from serve_app.contracts.commands import Answer, Command
from serve_app.contracts.errors import LedgerUnavailable

logger = logging.getLogger(__name__)


class Ledger:
    """The ledger at a database URL: `sqlite:////path/ledger.db` or `postgresql+psycopg://user@host/name`.

    Calls block, and threads may share a Ledger. From async code, call it in a thread. Every call can raise
    LedgerUnavailable. A command with an `Audit` records its changes in the audit log in the same transaction. A command
    that changes nothing is not recorded.

    Creates or upgrades the schema first; without `migrate`, an unsuitable schema raises SchemaMismatch. `wait_s` limits
    the wait for another writer. `timeout_s` limits a whole call on PostgreSQL, except for reads of many rows.
    `now` returns Unix seconds. `currency` is set if the ledger has none; a different one raises OtherCurrency.
    `reply_quota` limits the replies that an account keeps for retries and, separately, its stored responses.
    """

    def __init__(
        self,
        url: str | URL,
        *,
        wait_s: float = 5.0,
        timeout_s: float = 10.0,
        now: Callable[[], float] = time.time,
        currency: str | None = None,
        reply_quota: replies.ReplyQuota | None = None,
        migrate: bool = True,
    ) -> None:
        quota = reply_quota or replies.ReplyQuota()
        self._replies = replies.QuotaKeeper(quota)
        self._responses = replies.QuotaKeeper(quota, responses, "response_id")
        self._database = Database(url, wait_s=wait_s, timeout_s=timeout_s)
        self._now = now
        try:
            if migrate:
                self._database.migrate()
            else:
                self._database.expect_head()
            if currency is not None:
                with self._database.transaction() as transaction:
                    claim_currency(transaction, currency)
        except BaseException:
            self._database.close()
            raise

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections. Nothing is pending between calls."""
        self._database.close()

    def overdue_s(self) -> float:
        """Seconds by which the slowest running call is past its deadline; 0 if none is."""
        return self._database.overdue_s()

    def run(self, command: Command[Answer]) -> Answer:
        """Returns the command's answer. Raises the LedgerErrors that the command documents."""
        if isinstance(command, commands.RetryStuck):
            # One transaction for each settlement: a failure must not undo the others.
            return self._retry_stuck(command)  # type: ignore[return-value]
        if (reading := READS.get(type(command))) is not None:
            with self._database.snapshot(reading.timeout_s) as connection:
                return reading.run(connection, command, self._now())
        if (steps := STEPS.get(type(command))) is not None:
            return steps(self._database, command, self._now())
        write = WRITES[type(command)]
        with self._database.transaction() as transaction:
            answer: Answer = write(transaction, command, self._now())
            if isinstance(command, commands.BeginResponse | commands.EndResponse):
                written = [(command.account_id, len(command.response.body))]
                self._responses.enforce(transaction.connection, written)
            return answer

    def settle(self, settlements: Sequence[Settlement]) -> list[Settled | SettlementRejected]:
        """Charges and records up to 1000 finished requests in one transaction. Returns the answers in the same order.

        Idempotent by `request_id`, also within the batch: a repetition returns the first charge with `duplicate` set,
        even if its content differs. Balances and versions are those after the whole batch. A settlement that cannot be
        recorded gets SettlementRejected and does not affect the others.
        """
        if not settlements:
            return []
        with self._database.transaction() as transaction:
            answers = settle(transaction, settlements, self._now())
            if any(settlement.reply is not None for settlement in settlements):
                self._replies.enforce(transaction.connection, replies.kept_replies(settlements))
            if any(settlement.response is not None for settlement in settlements):
                self._responses.enforce(transaction.connection, stored_responses.kept_responses(settlements))
            return answers

    def keep_stuck(self, refused: Sequence[tuple[Settlement, SettlementRejected]]) -> None:
        """Stores settlements that could not be settled, so that an operator can decide about them.

        Harmless to repeat.
        """
        with self._database.transaction() as transaction:
            stuck.keep(transaction.connection, refused, self._now())

    def count_stuck(self) -> int:
        """Returns the number of stuck settlements."""
        with self._database.snapshot() as connection:
            return stuck.count_stuck(connection)

    def _retry_stuck(self, command: commands.RetryStuck) -> list[StuckSettlement]:
        ids = command.stuck_ids[: commands.MAX_RETRIED]
        for stuck_id in ids:
            with self._database.snapshot() as connection:
                settlement = stuck.read(connection, stuck_id)
            if settlement is None:
                continue
            try:
                [answer] = self.settle([settlement])
            except LedgerUnavailable:
                raise
            except Exception as error:
                logger.exception("settlement %r is still stuck", settlement)
                reason = f"unexpected error in the ledger: {type(error).__name__}"
                answer = SettlementRejected(settlement.request_id, Refusal.FAILED, reason)
            if isinstance(answer, SettlementRejected):
                self.keep_stuck([(settlement, answer)])
                continue
            with self._database.transaction() as transaction:
                stuck.remove(transaction, stuck_id, settlement, command.audit, self._now())
        with self._database.snapshot() as connection:
            return stuck.find_stuck(connection, ids)
