"""`Ledger`: settles usage and runs the commands of `contracts`, one transaction each."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.engine import URL

from serve_app.accounting import (
    accounts,
    alerts,
    api_keys,
    audit_log,
    checkpoints,
    console_sessions,
    funds,
    identities,
    limiter_leases,
    management_keys,
    memberships,
    moved_keys,
    operators,
    people,
    recharge_attempts,
    recharges,
    replies,
    returned_payments,
    sealed_secrets,
    served,
    served_backends,
    served_models,
    served_traffic,
    snapshots,
    statements,
    stuck,
    usage,
)
from serve_app.accounting.currency import claim_currency
from serve_app.accounting.database import Database, Transaction
from serve_app.accounting.settle import settle
from serve_app.contracts import commands, served_commands
from serve_app.contracts import key_secrets as secret_commands
from serve_app.contracts import management as management_commands
from serve_app.contracts import notices as notice_commands
from serve_app.contracts import operators as operator_commands
from serve_app.contracts import payments as payment_commands
from serve_app.contracts import people as people_commands
from serve_app.contracts import recharges as recharge_commands
from serve_app.contracts.books import Refusal, Settled, Settlement, SettlementRejected, StuckSettlement
from serve_app.contracts.commands import Answer, Command
from serve_app.contracts.errors import LedgerUnavailable

logger = logging.getLogger(__name__)

# By the class of the command. Each function takes the command, and the time in Unix seconds.
READS: dict[type[Command[Any]], Callable[[Connection, Any, float], Any]] = {
    commands.GetAccount: snapshots.get_account,
    commands.ShowAccount: usage.show_account,
    commands.ListAccounts: snapshots.list_accounts,
    commands.ListGrants: funds.list_grants,
    commands.ListKeys: snapshots.list_keys,
    commands.FindKeys: snapshots.find_keys,
    commands.ReadChanges: snapshots.read_changes,
    commands.SumUsage: usage.sum_usage,
    commands.SumHours: usage.sum_hours,
    commands.ListUsage: usage.list_usage,
    commands.PricedModels: usage.priced_models,
    commands.ShowStatement: statements.show_statement,
    commands.FindRequest: usage.find_request,
    commands.FindReply: replies.find_reply,
    commands.FindUnsettled: stuck.find_unsettled,
    commands.ListStuck: stuck.list_stuck,
    commands.ListAudit: audit_log.list_audit,
    served_commands.ReadServed: served.read_served,
    served_commands.ListTraffic: served_traffic.list_traffic,
    served_commands.ListPrices: served_models.list_prices,
    people_commands.FindIdentity: identities.find_identity,
    people_commands.FindInvitation: people.find_invitation,
    people_commands.FindPerson: people.find_person,
    people_commands.ListPeople: people.list_people,
    people_commands.FindSession: console_sessions.find_session,
    people_commands.ListSessions: console_sessions.list_sessions,
    management_commands.ListManagementKeys: management_keys.list_management_keys,
    management_commands.FindManagementKey: management_keys.find_management_key,
    notice_commands.ListAlerts: alerts.list_alerts,
    operator_commands.SearchAccounts: snapshots.search_accounts,
    operator_commands.ListPendingCredits: operators.list_pending_credits,
    notice_commands.WatchAlerts: alerts.watch_alerts,
    notice_commands.ListNotices: alerts.list_notices,
    secret_commands.ListUnmoved: moved_keys.list_unmoved,
    secret_commands.ListSealed: sealed_secrets.list_sealed,
    recharge_commands.ShowRecharge: recharges.show_recharge,
    recharge_commands.WatchRecharges: recharge_attempts.watch_recharges,
    recharge_commands.ListDueAttempts: recharge_attempts.list_due_attempts,
}
# Seconds for those that look at many rows. A connection that hangs in one of them is noticed only then.
LONG_READS: dict[type[Command[Any]], float] = {
    commands.ShowAccount: 60.0,
    commands.SumUsage: 60.0,
    commands.ShowStatement: 60.0,
    operator_commands.SearchAccounts: 60.0,
    commands.ListUsage: 60.0,
    commands.ListAudit: 60.0,
    secret_commands.ListUnmoved: 60.0,
}
WRITES: dict[type[Command[Any]], Callable[[Transaction, Any, float], Any]] = {
    commands.CreateAccount: accounts.create_account,
    commands.SetLimits: accounts.set_limits,
    commands.SetActive: accounts.set_active,
    commands.AddCredit: funds.add_credit,
    commands.CorrectBalance: funds.correct_balance,
    commands.TakeBackGrant: funds.take_back_grant,
    commands.ExpireGrants: funds.expire_grants,
    commands.CreateKey: api_keys.create_key,
    commands.UpdateKey: api_keys.update_key,
    commands.RevokeKey: api_keys.revoke_key,
    commands.PruneReplies: replies.prune_replies,
    commands.HoldLease: limiter_leases.hold_lease,
    commands.ReleaseLease: limiter_leases.release_lease,
    commands.PostHolds: limiter_leases.post_holds,
    commands.RecordAudit: audit_log.record_audit,
    commands.RecordPrices: audit_log.record_prices,
    served_commands.SetTraffic: served_traffic.set_traffic,
    served_commands.RollBackTraffic: served_traffic.roll_back_traffic,
    served_commands.DeployBackend: served_backends.deploy_backend,
    served_commands.RetireBackend: served_backends.retire_backend,
    served_commands.CreateModel: served_models.create_model,
    served_commands.UpdateModel: served_models.update_model,
    served_commands.RemoveModel: served_models.remove_model,
    served_commands.SchedulePrice: served_models.schedule_price,
    people_commands.InvitePerson: people.invite_person,
    people_commands.RevokeInvitation: people.revoke_invitation,
    people_commands.AcceptInvitation: people.accept_invitation,
    people_commands.LinkIdentity: identities.link_identity,
    people_commands.UnlinkIdentities: identities.unlink_identities,
    people_commands.JoinAccount: memberships.join_account,
    people_commands.SetMembership: memberships.set_membership,
    people_commands.SuspendPerson: people.suspend_person,
    people_commands.ChangePerson: people.change_person,
    people_commands.OpenSession: console_sessions.open_session,
    people_commands.TouchSession: console_sessions.touch_session,
    people_commands.EndSession: console_sessions.end_session,
    management_commands.CreateManagementKey: management_keys.create_management_key,
    management_commands.RevokeManagementKey: management_keys.revoke_management_key,
    notice_commands.CreateAlert: alerts.create_alert,
    operator_commands.SetOperatorRole: operators.set_operator_role,
    operator_commands.AskCredit: operators.ask_credit,
    operator_commands.DecideCredit: operators.decide_credit,
    payment_commands.ReturnPayment: returned_payments.return_payment,
    recharge_commands.SetRecharge: recharges.set_recharge,
    recharge_commands.AskMethod: recharges.ask_method,
    recharge_commands.SaveMethod: recharges.save_method,
    recharge_commands.ResumeRecharge: recharges.resume_recharge,
    recharge_commands.StopRecharge: recharges.stop_recharge,
    recharge_commands.BeginRecharge: recharge_attempts.begin_recharge,
    recharge_commands.ClaimAttempt: recharge_attempts.claim_attempt,
    recharge_commands.EndAttempt: recharge_attempts.end_attempt,
    recharge_commands.RecordOutcome: recharge_attempts.record_outcome,
    notice_commands.RemoveAlert: alerts.remove_alert,
    notice_commands.RaiseAlarm: alerts.raise_alarm,
    notice_commands.RecordAttempt: alerts.record_attempt,
    secret_commands.MoveKeys: moved_keys.move_keys,
    secret_commands.Reseal: sealed_secrets.reseal,
}
# Several short transactions each.
LONG: dict[type[Command[Any]], Callable[[Database, Any, float], Any]] = {commands.CheckBooks: checkpoints.check_books}


class Ledger:
    """The ledger at a database URL: `sqlite:////path/ledger.db` or `postgresql+psycopg://user@host/name`.

    Calls block, and threads may share a Ledger; from async code call it in a thread. Every call can raise
    LedgerUnavailable. Changes of a command with an `Audit` are on the audit log in the same transaction; what changes
    nothing is not logged.

    The schema is created or upgraded first; without `migrate`, another schema raises SchemaMismatch. `wait_s` bounds
    the wait for another writer, `timeout_s` a whole call (but those of LONG_READS) on PostgreSQL; `now` returns Unix
    seconds. `currency` becomes the ledger's; a ledger of another one raises OtherCurrency. `reply_quota` bounds the
    replies that an account keeps for retries.
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
        self._replies = replies.QuotaKeeper(reply_quota or replies.ReplyQuota())
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
        """Closes the connections; nothing is pending between calls."""
        self._database.close()

    def overdue_s(self) -> float:
        """Seconds by which the slowest call under way is late, which its own bounds should have ended; 0 if none is."""
        return self._database.overdue_s()

    def run(self, command: Command[Answer]) -> Answer:
        """The command's answer. Raises LedgerError as the command says."""
        if isinstance(command, commands.RetryStuck):
            # A transaction for each: one that fails must not undo the others.
            return self._retry_stuck(command)  # type: ignore[return-value]
        if (read := READS.get(type(command))) is not None:
            with self._database.snapshot(LONG_READS.get(type(command))) as connection:
                return read(connection, command, self._now())
        if (steps := LONG.get(type(command))) is not None:
            return steps(self._database, command, self._now())
        write = WRITES[type(command)]
        with self._database.transaction() as transaction:
            return write(transaction, command, self._now())

    def settle(self, settlements: Sequence[Settlement]) -> list[Settled | SettlementRejected]:
        """Charges and records up to 1000 finished requests in one transaction; the answers come in the same order.

        Idempotent by `request_id`, also within the batch: a repetition returns the first charge with `duplicate` set,
        even if its content differs. Balances and versions are those after the whole batch. A settlement that cannot
        be recorded gets SettlementRejected and does not disturb the others.
        """
        if not settlements:
            return []
        with self._database.transaction() as transaction:
            answers = settle(transaction, settlements, self._now())
            if any(settlement.reply is not None for settlement in settlements):
                self._replies.enforce(transaction.connection, settlements)
            return answers

    def keep_stuck(self, refused: Sequence[tuple[Settlement, SettlementRejected]]) -> None:
        """Keeps settlements that could not be settled for an operator; harmless to repeat."""
        with self._database.transaction() as transaction:
            stuck.keep(transaction.connection, refused, self._now())

    def count_stuck(self) -> int:
        """How many settlements are stuck."""
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
                reason = f"the ledger failed on it: {type(error).__name__}"
                answer = SettlementRejected(settlement.request_id, Refusal.FAILED, reason)
            if isinstance(answer, SettlementRejected):
                self.keep_stuck([(settlement, answer)])
                continue
            with self._database.transaction() as transaction:
                stuck.remove(transaction, stuck_id, settlement, command.audit, self._now())
        with self._database.snapshot() as connection:
            return stuck.find_stuck(connection, ids)
