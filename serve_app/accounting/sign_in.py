"""The sign-in link of an account's administrator, recovery codes, and passkeys."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, delete, func, insert, select

from serve_app.accounting.audit_log import write_audit
from serve_app.accounting.console_tables import (
    memberships,
    operator_roles,
    passkeys,
    recovery_codes,
    sign_in_links,
    users,
)
from serve_app.accounting.database import Transaction
from serve_app.accounting.people import (
    add_member,
    add_person,
    checked_email,
    read_person,
    set_recovery_codes,
)
from serve_app.accounting.registry import reads, writes
from serve_app.accounting.snapshots import read_account
from serve_app.accounting.validation import check_name, equals, is_text
from serve_app.contracts.books import Audit
from serve_app.contracts.errors import Conflict, InvalidValue
from serve_app.contracts.people import Person
from serve_app.contracts.sign_in import (
    MAX_PASSKEYS,
    AddPasskey,
    CountRecoveryCodes,
    FindPasskey,
    FindSignInLink,
    ListPasskeys,
    MakeSignInLink,
    Passkey,
    RemovePasskey,
    ReplaceRecoveryCodes,
    SignInLink,
    UseSignInLink,
)

_MAX_BINARY = 4096  # characters of a passkey's id or public key


@writes(MakeSignInLink)
def make_sign_in_link(transaction: Transaction, wanted: MakeSignInLink, now: float) -> None:
    connection, account_id = transaction.connection, wanted.account_id
    read_account(connection, account_id)
    if find_sign_in_link(connection, FindSignInLink(wanted.digest), now) is not None:
        return  # the command is a repetition
    connection.execute(delete(sign_in_links).where(sign_in_links.c.account_id == account_id))
    row = {"account_id": account_id, "digest": wanted.digest, "expires_at": wanted.expires_at}
    connection.execute(insert(sign_in_links).values(row))
    detail = {"expires_at": wanted.expires_at}
    write_audit(transaction, wanted.audit, "make_sign_in_link", account_id, detail, now)


@reads(FindSignInLink)
def find_sign_in_link(connection: Connection, wanted: FindSignInLink, now: float) -> SignInLink | None:
    query = select(sign_in_links).where(equals(sign_in_links.c.digest, wanted.digest))
    row = connection.execute(query.where(sign_in_links.c.expires_at > now)).one_or_none()
    if row is None:
        return None
    account = read_account(connection, row.account_id)
    return SignInLink(row.account_id, account.name, row.expires_at, _administrator(connection, row.account_id))


@writes(UseSignInLink)
def use_sign_in_link(transaction: Transaction, wanted: UseSignInLink, now: float) -> Person:
    connection = transaction.connection
    link = find_sign_in_link(connection, FindSignInLink(wanted.digest), now)
    mine = delete(sign_in_links).where(equals(sign_in_links.c.digest, wanted.digest))
    if link is None or not connection.execute(mine).rowcount:
        raise InvalidValue("this link is used, replaced or expired")
    user_id, email = "" if link.person is None else link.person.user_id, ""
    if link.person is None:
        email = checked_email(wanted.email)
        if not wanted.password:
            raise InvalidValue("a password is required")
        user_id = add_person(connection, email, wanted.name, wanted.password, now)
        add_member(connection, user_id, link.account_id, "owner")
        connection.execute(insert(operator_roles).values(user_id=user_id, role="admin"))
    person = read_person(connection, user_id)
    audit = Audit(person.email, address=wanted.address)
    detail = {"is_new": link.person is None}
    write_audit(transaction, audit, "use_sign_in_link", link.account_id, detail, now, subject=user_id)
    return person


@writes(ReplaceRecoveryCodes)
def replace_recovery_codes(transaction: Transaction, wanted: ReplaceRecoveryCodes, now: float) -> None:
    person = read_person(transaction.connection, wanted.user_id)
    if person.totp_secret is None:
        raise InvalidValue("turn on one-time codes first")
    set_recovery_codes(transaction.connection, wanted.user_id, wanted.digests)
    write_audit(transaction, wanted.audit, "set_recovery_codes", "", {}, now, subject=wanted.user_id)


@reads(CountRecoveryCodes)
def count_recovery_codes(connection: Connection, wanted: CountRecoveryCodes, _now: float) -> int:
    mine = select(func.count()).select_from(recovery_codes).where(equals(recovery_codes.c.user_id, wanted.user_id))
    return int(connection.execute(mine).scalar_one())


@writes(AddPasskey)
def add_passkey(transaction: Transaction, wanted: AddPasskey, now: float) -> Passkey:
    connection = transaction.connection
    check_name(wanted.name)
    if not (is_text(wanted.passkey_id, _MAX_BINARY) and is_text(wanted.public_key, _MAX_BINARY)):
        raise InvalidValue("this passkey can't be stored")
    read_person(connection, wanted.user_id)
    if find_passkey(connection, FindPasskey(wanted.passkey_id), now) is not None:
        raise Conflict("this passkey is already registered")
    if len(list_passkeys(connection, ListPasskeys(wanted.user_id), now)) >= MAX_PASSKEYS:
        raise Conflict(f"a person has at most {MAX_PASSKEYS} passkeys: remove one first")
    row = {"id": wanted.passkey_id, "user_id": wanted.user_id, "name": wanted.name, "public_key": wanted.public_key}
    connection.execute(insert(passkeys).values(**row, sign_count=wanted.sign_count, created_at=now))
    write_audit(transaction, wanted.audit, "add_passkey", "", {"name": wanted.name}, now, subject=wanted.user_id)
    return _passkey(connection.execute(select(passkeys).where(passkeys.c.id == wanted.passkey_id)).one())


@reads(ListPasskeys)
def list_passkeys(connection: Connection, wanted: ListPasskeys, _now: float) -> list[Passkey]:
    query = select(passkeys).where(equals(passkeys.c.user_id, wanted.user_id))
    return [_passkey(row) for row in connection.execute(query.order_by(passkeys.c.created_at, passkeys.c.id))]


@reads(FindPasskey)
def find_passkey(connection: Connection, wanted: FindPasskey, _now: float) -> tuple[Passkey, Person] | None:
    row = connection.execute(select(passkeys).where(equals(passkeys.c.id, wanted.passkey_id))).one_or_none()
    return None if row is None else (_passkey(row), read_person(connection, row.user_id))


@writes(RemovePasskey)
def remove_passkey(transaction: Transaction, wanted: RemovePasskey, now: float) -> None:
    mine = (equals(passkeys.c.id, wanted.passkey_id), equals(passkeys.c.user_id, wanted.user_id))
    if transaction.connection.execute(delete(passkeys).where(*mine)).rowcount:
        write_audit(transaction, wanted.audit, "remove_passkey", "", {}, now, subject=wanted.user_id)


def _administrator(connection: Connection, account_id: str) -> Person | None:
    """Returns an owner of the account who has the operator role `admin` and is not suspended.

    Of several, it is the person who was created first.
    """
    query = (
        select(users.c.id)
        .join(memberships, memberships.c.user_id == users.c.id)
        .join(operator_roles, operator_roles.c.user_id == users.c.id)
        .where(memberships.c.account_id == account_id, memberships.c.role == "owner")
        .where(operator_roles.c.role == "admin", users.c.suspended.is_(False))
        .order_by(users.c.created_at, users.c.id)
        .limit(1)
    )
    user_id = connection.execute(query).scalar_one_or_none()
    return None if user_id is None else read_person(connection, user_id)


def _passkey(row: Row[Any]) -> Passkey:
    values = {**row._mapping, "passkey_id": row.id}
    del values["id"]
    return Passkey(**values)
