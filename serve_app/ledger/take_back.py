"""Takes back what is left of a grant that was given by mistake: a new entry against that grant alone."""

from __future__ import annotations

from sqlalchemy import select

from serve_app.ledger import journal
from serve_app.ledger.accounts import check_name, move
from serve_app.ledger.audit_log import write_audit
from serve_app.ledger.database import Transaction
from serve_app.ledger.errors import Conflict, GrantNotFound, InsufficientBalance, InvalidValue
from serve_app.ledger.grants import Lot, write_lots
from serve_app.ledger.journal import EntryKind
from serve_app.ledger.messages import AccountSnapshot, Audit
from serve_app.ledger.schema import grants, journal_entries
from serve_app.ledger.snapshots import get_account


def take_back(
    transaction: Transaction,
    account_id: str,
    grant_id: int,
    *,
    idempotency_key: str | None,
    memo: str,
    audit: Audit | None,
    now: float,
) -> AccountSnapshot:
    """See `Ledger.take_back`."""
    if not memo:
        raise InvalidValue("a grant is taken back without a memo: say which mistake this rights")
    account = get_account(transaction.connection, account_id)
    mine = grants.c.account_id == account_id
    grant = transaction.connection.execute(select(grants).where(mine, grants.c.entry_id == grant_id)).one_or_none()
    if grant is None:
        raise GrantNotFound(account_id, grant_id)
    kept = f"grant {grant_id}: {memo}"
    if _done_before(transaction, account_id, kept, idempotency_key):
        return account
    if not grant.remaining:
        raise InsufficientBalance(f"nothing is left of grant {grant_id} of {account_id}")
    moved = {journal.granted(account_id): -grant.remaining, journal.CORRECTIONS: grant.remaining}
    entry_id = move(transaction, account_id, EntryKind.CORRECTION, moved, idempotency_key, kept, now)
    write_lots(transaction.connection, [Lot(grant_id, 0, grant.expires_at, touched=True)])
    detail = {"entry": entry_id, "grant": grant_id, "amount": -grant.remaining, "memo": memo}
    write_audit(transaction, audit, "take_back", subject=account_id, account_id=account_id, detail=detail, now=now)
    return get_account(transaction.connection, account_id)


def _done_before(transaction: Transaction, account_id: str, memo: str, idempotency_key: str | None) -> bool:
    """Whether the idempotency key has taken this grant back. Raises Conflict if it was something else.

    How much was left when it did can't be told again, so the memo, which names the grant, is what must be the same.
    """
    if idempotency_key is None:
        return False
    check_name(idempotency_key, "an idempotency key", longest=200)
    same = (journal_entries.c.account_id == account_id) & (journal_entries.c.idempotency_key == idempotency_key)
    entry = transaction.connection.execute(select(journal_entries).where(same)).one_or_none()
    if entry is not None and (entry.kind, entry.memo) != (EntryKind.CORRECTION.value, memo):
        raise Conflict(f"idempotency key {idempotency_key!r} has moved something else: entry {entry.id}")
    return entry is not None
