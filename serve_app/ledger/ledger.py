"""`Ledger`: all that the rest of the service asks of the ledger, one transaction a call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from sqlalchemy.engine import URL

from serve_app.ledger import accounts, api_keys, audit_log, check, grants, replies, settle, snapshots, take_back, usage
from serve_app.ledger.accounts import UNSET, CreditKind, Limit, Unset
from serve_app.ledger.check import CheckReport
from serve_app.ledger.database import Database
from serve_app.ledger.messages import (
    AccountSnapshot,
    Audit,
    AuditRecord,
    BudgetPeriod,
    Changes,
    GrantSnapshot,
    KeySnapshot,
    Settled,
    Settlement,
    SettlementRejected,
    StoredReply,
    UsagePage,
    UsageRow,
)
from serve_app.ledger.usage import Group


class Ledger:
    """The ledger at a database URL: `sqlite:////path/ledger.db` or `postgresql+psycopg://user@host/name`.

    Calls block, and threads may share a Ledger; from async code call it in a thread. Amounts are nano-units. Every
    method can raise LedgerUnavailable; a write that did so may have happened, and is repeated with the same id.

    Changes that an operator asks for take an `Audit`, and are on the audit log in the same transaction. What changes
    nothing is not logged.

    `migrate` creates or upgrades the schema first. `wait_s` bounds the wait for another writer; `now` gives Unix
    seconds.
    """

    def __init__(
        self, url: str | URL, *, migrate: bool = True, wait_s: float = 10.0, now: Callable[[], float] = time.time
    ) -> None:
        self._database = Database(url, wait_s=wait_s)
        self._now = now
        if migrate:
            try:
                self._database.migrate()
            except BaseException:
                self._database.close()
                raise

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; nothing is pending between calls."""
        self._database.close()

    # Accounts

    def create_account(
        self, name: str, *, currency: str = "USD", idempotency_key: str | None = None, audit: Audit | None = None
    ) -> AccountSnapshot:
        """A new, empty account; names need not be unique. The same idempotency key answers the same account.

        Raises InvalidValue, and Conflict when the idempotency key has created an account of another name.
        """
        with self._database.write() as transaction:
            return accounts.create_account(
                transaction, name, currency=currency, idempotency_key=idempotency_key, audit=audit, now=self._now()
            )

    def get_account(self, account_id: str) -> AccountSnapshot:
        """Raises AccountNotFound."""
        with self._database.read() as connection:
            return snapshots.get_account(connection, account_id)

    def list_accounts(self, after: str | None = None, limit: int = 100) -> list[AccountSnapshot]:
        """Up to `limit` accounts, oldest first, from the one behind account `after` on. Raises AccountNotFound."""
        with self._database.read() as connection:
            return snapshots.list_accounts(connection, after, limit)

    def set_limits(
        self,
        account_id: str,
        *,
        rpm: Limit = UNSET,
        tpm: Limit = UNSET,
        concurrency: Limit = UNSET,
        weight: Limit = UNSET,
        audit: Audit | None = None,
    ) -> AccountSnapshot:
        """Requests and tokens per minute, requests at once, and the weight of the account's share under pressure.

        None takes the service's default, UNSET leaves a limit as it is.

        Raises AccountNotFound, InvalidValue.
        """
        with self._database.write() as transaction:
            given = {"rpm": rpm, "tpm": tpm, "concurrency": concurrency, "weight": weight}
            return accounts.set_limits(transaction, account_id, given, audit=audit, now=self._now())

    def set_active(self, account_id: str, active: bool, *, audit: Audit | None = None) -> AccountSnapshot:
        """Let an account send requests, or stop it; running requests are still settled. Raises AccountNotFound."""
        with self._database.write() as transaction:
            return accounts.set_active(transaction, account_id, active, audit=audit, now=self._now())

    def credit(
        self,
        account_id: str,
        amount_nano: int,
        kind: CreditKind = "top_up",
        idempotency_key: str | None = None,
        memo: str = "",
        *,
        expires_at: float | None = None,
        audit: Audit | None = None,
    ) -> AccountSnapshot:
        """Add paid ("top_up") or given ("grant") money. The same idempotency key on the same account adds it once.

        A grant with `expires_at` (Unix seconds) pays for requests that start before then; what is left of it is taken
        off the books an hour later, by `expire_grants`.

        Raises AccountNotFound, InvalidAmount, InvalidValue (also for an expiry that is past, or of a top-up), and
        Conflict when the idempotency key was used for another amount, kind or expiry.
        """
        with self._database.write() as transaction:
            return accounts.credit(
                transaction,
                account_id,
                amount_nano,
                kind=kind,
                idempotency_key=idempotency_key,
                memo=memo,
                expires_at=expires_at,
                audit=audit,
                now=self._now(),
            )

    def grants(self, account_id: str) -> list[GrantSnapshot]:
        """All grants, oldest first, spent and expired ones included. Raises AccountNotFound."""
        with self._database.read() as connection:
            snapshots.get_account(connection, account_id)
            return grants.list_grants(connection, account_id)

    def expire_grants(self, limit: int = 500) -> int:
        """Take what is left of grants off the books that expired an hour ago or longer; how many grants that were.

        At most `limit` at once: call again while it answers that many. Processes may do this at the same time.
        """
        with self._database.write() as transaction:
            return grants.expire_grants(transaction, limit, now=self._now())

    def correct(
        self,
        account_id: str,
        amount_nano: int,
        *,
        memo: str,
        idempotency_key: str | None = None,
        audit: Audit | None = None,
    ) -> AccountSnapshot:
        """Add to the top-ups, or take from them if negative, to right a mistake that `memo` names.

        Raises AccountNotFound, InvalidAmount, InvalidValue, Conflict, and InsufficientBalance when less is left.
        """
        with self._database.write() as transaction:
            return accounts.correct(
                transaction,
                account_id,
                amount_nano,
                idempotency_key=idempotency_key,
                memo=memo,
                audit=audit,
                now=self._now(),
            )

    def take_back(
        self,
        account_id: str,
        grant_id: int,
        *,
        memo: str,
        idempotency_key: str | None = None,
        audit: Audit | None = None,
    ) -> AccountSnapshot:
        """Take all that is left of a grant that was a mistake, which `memo` names; a request that runs and counted on
        it is paid from what else there is.

        Raises AccountNotFound, GrantNotFound, InvalidValue, Conflict, and InsufficientBalance when nothing is left.
        """
        with self._database.write() as transaction:
            return take_back.take_back(
                transaction,
                account_id,
                grant_id,
                idempotency_key=idempotency_key,
                memo=memo,
                audit=audit,
                now=self._now(),
            )

    # Keys

    def create_key(
        self,
        account_id: str,
        name: str,
        digest: str,
        hint: str,
        *,
        models: Sequence[str] | None = None,
        rpm: int | None = None,
        tpm: int | None = None,
        concurrency: int | None = None,
        budget: int | None = None,
        budget_period: BudgetPeriod | None = None,
        expires_at: float | None = None,
        audit: Audit | None = None,
    ) -> KeySnapshot:
        """Store a key by its `keys.digest` and `keys.hint`; the same digest and name again answer the same key.

        The models it may use (None: all), limits of its own beside the account's, a budget in nano-units per UTC
        `budget_period`, and the Unix time from which on it is refused.

        Raises AccountNotFound, InvalidValue, Conflict.
        """
        limits = {
            "models": models,
            "rpm": rpm,
            "tpm": tpm,
            "concurrency": concurrency,
            "budget": budget,
            "budget_period": budget_period,
            "expires_at": expires_at,
        }
        with self._database.write() as transaction:
            return api_keys.create_key(
                transaction, account_id, name, digest, hint, limits, audit=audit, now=self._now()
            )

    def list_keys(self, account_id: str) -> list[KeySnapshot]:
        """Oldest first, revoked ones included. Raises AccountNotFound."""
        with self._database.read() as connection:
            return snapshots.list_keys(connection, account_id, now=self._now())

    def update_key(
        self,
        key_id: str,
        *,
        name: str | Unset = UNSET,
        models: Sequence[str] | Unset | None = UNSET,
        rpm: Limit = UNSET,
        tpm: Limit = UNSET,
        concurrency: Limit = UNSET,
        budget: Limit = UNSET,
        budget_period: BudgetPeriod | Unset | None = UNSET,
        expires_at: float | Unset | None = UNSET,
        audit: Audit | None = None,
    ) -> KeySnapshot:
        """Change what is given; None takes a limit away, and a `budget` of None its period too.

        A budget that is set counts what the key has been charged in the running period already.

        Raises KeyNotFound, InvalidValue.
        """
        given = {
            "name": name,
            "models": models,
            "rpm": rpm,
            "tpm": tpm,
            "concurrency": concurrency,
            "budget": budget,
            "budget_period": budget_period,
            "expires_at": expires_at,
        }
        with self._database.write() as transaction:
            return api_keys.update_key(transaction, key_id, given, audit=audit, now=self._now())

    def revoke_key(self, key_id: str, *, audit: Audit | None = None) -> KeySnapshot:
        """End a key for good; harmless if it was. Raises KeyNotFound."""
        with self._database.write() as transaction:
            return api_keys.revoke_key(transaction, key_id, audit=audit, now=self._now())

    def find_key(self, digest: str) -> tuple[KeySnapshot, AccountSnapshot] | None:
        """The key with this digest and its account, active or not, or None."""
        with self._database.read() as connection:
            return snapshots.find_key(connection, digest, now=self._now())

    def changes(self, since: int, limit: int = 1000) -> Changes:
        """Accounts and keys that changed after version `since`, in the order of their versions; 0 starts.

        Ask next from the answer's `version`, at once if it has `more`. Nothing is ever missed: versions become visible
        in their order. A row that changed twice shows up once, with its latest version.
        """
        with self._database.read() as connection:
            return snapshots.changes(connection, since, limit, now=self._now())

    # Usage

    def settle(self, settlements: Sequence[Settlement]) -> list[Settled | SettlementRejected]:
        """Charge and record finished requests, all in one transaction; the answers come in the same order.

        Idempotent by `request_id`, also within the batch: a repeated one answers the first charge with `duplicate`
        set, whatever it contains. Balances and versions are those after the whole batch. A settlement that cannot be
        recorded is answered with SettlementRejected and does not disturb the others.

        Raises ValueError for more than 1000 at once.
        """
        if not settlements:
            return []
        with self._database.write() as transaction:
            return settle.settle(transaction, settlements, now=self._now())

    def usage(
        self,
        account_id: str | None = None,
        key_id: str | None = None,
        model: str | None = None,
        day_from: str | None = None,
        day_to: str | None = None,
        group_by: Sequence[Group] = (),
    ) -> list[UsageRow]:
        """Sums over requests, one row per group, sorted by the groups; no row where there was no request.

        Days are YYYY-MM-DD in UTC, of the requests' ends, both included. Raises InvalidValue.
        """
        with self._database.read() as connection:
            return usage.usage(
                connection,
                account_id=account_id,
                key_id=key_id,
                model=model,
                day_from=day_from,
                day_to=day_to,
                group_by=group_by,
            )

    def export_usage(
        self,
        *,
        account_id: str | None = None,
        key_id: str | None = None,
        model: str | None = None,
        time_from: float | None = None,
        time_to: float | None = None,
        after: str | None = None,
        limit: int = 1000,
    ) -> UsagePage:
        """One record per request that ended at or after `time_from` and before `time_to` (Unix seconds).

        In the order of accounts, ends and request ids, from the page behind `after` on: the `next` of a page before.
        Raises InvalidValue.
        """
        with self._database.read() as connection:
            return usage.export_usage(
                connection,
                account_id=account_id,
                key_id=key_id,
                model=model,
                time_from=time_from,
                time_to=time_to,
                after=after,
                limit=limit,
            )

    def find_reply(self, account_id: str, idempotency_key: str) -> StoredReply | None:
        """The reply that a settlement of the last 24 hours has stored, or None."""
        with self._database.read() as connection:
            return replies.find_reply(connection, account_id, idempotency_key, now=self._now())

    def prune_replies(self) -> int:
        """Forget up to 1000 replies older than 24 hours; how many that were. Processes may do this at the same time."""
        with self._database.write() as transaction:
            return replies.prune_replies(transaction.connection, now=self._now())

    def audit_log(
        self, *, account_id: str | None = None, after: int | None = None, limit: int = 100
    ) -> list[AuditRecord]:
        """Changes that operators made, newest first: from the one before record `after` on. Raises InvalidValue."""
        with self._database.read() as connection:
            return audit_log.read_audit(connection, account_id=account_id, after=after, limit=limit)

    def account_totals(self, account_id: str) -> UsageRow:
        """All that an account has ever used. Raises AccountNotFound."""
        with self._database.read() as connection:
            return usage.account_totals(connection, account_id)

    def check(self) -> CheckReport:
        """Compare everything that must agree, on one snapshot, while the service runs; reads the whole ledger."""
        with self._database.read() as connection:
            return check.check(connection)
