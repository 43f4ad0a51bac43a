"""Creates, revokes, lists and finds management keys."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, func, insert, select, update

from serve_app.accounting.api_keys import check_digest
from serve_app.accounting.audit_log import write_audit
from serve_app.accounting.console_tables import management_keys
from serve_app.accounting.database import Transaction
from serve_app.accounting.registry import reads, writes
from serve_app.accounting.snapshots import read_account
from serve_app.accounting.validation import check_name, check_time, equals
from serve_app.contracts.books import AccountSnapshot
from serve_app.contracts.errors import Conflict, InvalidValue, KeyNotFound
from serve_app.contracts.key_format import new_id
from serve_app.contracts.management import (
    MAX_KEYS,
    CreateManagementKey,
    FindManagementKey,
    ListManagementKeys,
    ManagementKey,
    RevokeManagementKey,
)

_COLUMNS = management_keys.c


@writes(CreateManagementKey)
def create_management_key(transaction: Transaction, wanted: CreateManagementKey, now: float) -> ManagementKey:
    connection, account_id = transaction.connection, wanted.account_id
    check_name(wanted.name)
    check_name(wanted.hint, "a hint", longest=40)
    check_digest(wanted.digest)
    read_account(connection, account_id)
    by_digest = select(management_keys).where(_COLUMNS.digest == wanted.digest)
    earlier = connection.execute(by_digest).first()
    if earlier is not None:
        if (earlier.account_id, earlier.name) != (account_id, wanted.name):
            raise Conflict("this management key already exists: create a new one")
        return _key(earlier)
    expires_at = None if wanted.expires_at is None else check_time(wanted.expires_at)
    if expires_at is not None and expires_at <= now:
        raise InvalidValue(f"expires_at {expires_at!r} has passed: use a time in the future")
    mine = (_COLUMNS.account_id == account_id, _COLUMNS.revoked_at.is_(None))
    if connection.execute(select(func.count()).select_from(management_keys).where(*mine)).scalar_one() >= MAX_KEYS:
        raise Conflict(f"an account has at most {MAX_KEYS} management keys: revoke one")
    given = {"account_id": account_id, "name": wanted.name, "digest": wanted.digest, "hint": wanted.hint}
    row = {"id": new_id("mkey_")} | given
    times = {"created_at": now, "expires_at": expires_at}
    connection.execute(insert(management_keys).values(**row, **times))
    detail = {"name": wanted.name} | ({} if expires_at is None else {"expires_at": expires_at})
    write_audit(transaction, wanted.audit, "create_management_key", account_id, detail, now, subject=row["id"])
    return _key(connection.execute(by_digest).one())


@writes(RevokeManagementKey)
def revoke_management_key(transaction: Transaction, wanted: RevokeManagementKey, now: float) -> ManagementKey:
    connection = transaction.connection
    mine = (equals(_COLUMNS.id, wanted.key_id), equals(_COLUMNS.account_id, wanted.account_id))
    query = select(management_keys).where(*mine)
    row = connection.execute(query).one_or_none()
    if row is None:
        raise KeyNotFound(wanted.key_id)
    if row.revoked_at is None:
        connection.execute(update(management_keys).where(*mine).values(revoked_at=now))
        write_audit(transaction, wanted.audit, "revoke_management_key", row.account_id, {}, now, subject=row.id)
    return _key(connection.execute(query).one())


@reads(ListManagementKeys)
def list_management_keys(connection: Connection, wanted: ListManagementKeys, _now: float) -> list[ManagementKey]:
    read_account(connection, wanted.account_id)
    query = select(management_keys).where(_COLUMNS.account_id == wanted.account_id)
    return [_key(row) for row in connection.execute(query.order_by(_COLUMNS.created_at, _COLUMNS.id))]


@reads(FindManagementKey)
def find_management_key(
    connection: Connection, wanted: FindManagementKey, _now: float
) -> tuple[ManagementKey, AccountSnapshot] | None:
    row = connection.execute(select(management_keys).where(equals(_COLUMNS.digest, wanted.digest))).first()
    return None if row is None else (_key(row), read_account(connection, row.account_id))


def _key(row: Row[Any]) -> ManagementKey:
    return ManagementKey(row.id, row.account_id, row.name, row.hint, row.created_at, row.expires_at, row.revoked_at)
