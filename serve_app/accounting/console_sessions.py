"""Sessions of people who are signed in to the console."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select, update

from serve_app.accounting.audit_log import write_audit
from serve_app.accounting.console_tables import passkeys, recovery_codes, sessions, users
from serve_app.accounting.database import Transaction
from serve_app.accounting.people import read_person
from serve_app.accounting.registry import reads, writes
from serve_app.accounting.validation import equals
from serve_app.contracts.errors import InvalidValue
from serve_app.contracts.key_format import new_id
from serve_app.contracts.people import (
    EndSession,
    FindSession,
    ListSessions,
    OpenSession,
    Person,
    SignedIn,
    TouchSession,
)


@writes(OpenSession)
def open_session(transaction: Transaction, wanted: OpenSession, now: float) -> SignedIn:
    connection = transaction.connection
    earlier = connection.execute(select(sessions).where(sessions.c.digest == wanted.digest)).one_or_none()
    if earlier is not None:
        return _signed_in(earlier)  # the command is a repetition
    person = read_person(connection, wanted.user_id)
    if person.suspended:
        raise InvalidValue("this person is suspended")
    if wanted.password is not None:
        needs_code = person.totp_secret is not None and wanted.totp_step is None and wanted.recovery is None
        if needs_code or person.password != wanted.password:
            raise InvalidValue("password or codes were changed meanwhile: sign in again")
    if wanted.totp_step is not None:
        if wanted.totp_step <= person.totp_step:
            raise InvalidValue("this code has been used: wait for the next one")
        connection.execute(update(users).where(users.c.id == person.user_id).values(totp_step=wanted.totp_step))
    if wanted.recovery is not None:
        mine = (equals(recovery_codes.c.digest, wanted.recovery), recovery_codes.c.user_id == person.user_id)
        if not connection.execute(delete(recovery_codes).where(*mine)).rowcount:
            raise InvalidValue("this recovery code is wrong or used")
        write_audit(transaction, wanted.audit, "use_recovery_code", "", {}, now, subject=person.user_id)
    if wanted.passkey is not None:
        passkey_id, count = wanted.passkey
        one = (equals(passkeys.c.id, passkey_id), passkeys.c.user_id == person.user_id)
        if not connection.execute(update(passkeys).where(*one).values(sign_count=count, used_at=now)).rowcount:
            raise InvalidValue("this passkey was removed")
    session_id = new_id("sess_")
    times = {"created_at": now, "seen_at": now, "expires_at": wanted.expires_at}
    connection.execute(insert(sessions).values(id=session_id, digest=wanted.digest, user_id=person.user_id, **times))
    write_audit(transaction, wanted.audit, "sign_in", "", {"session": session_id}, now, subject=person.user_id)
    return _signed_in(connection.execute(select(sessions).where(sessions.c.id == session_id)).one())


@reads(FindSession)
def find_session(connection: Connection, wanted: FindSession, now: float) -> tuple[SignedIn, Person] | None:
    good = (sessions.c.revoked_at.is_(None), sessions.c.expires_at > now)
    row = connection.execute(select(sessions).where(equals(sessions.c.digest, wanted.digest), *good)).one_or_none()
    if row is None:
        return None
    person = read_person(connection, row.user_id)
    return None if person.suspended else (_signed_in(row), person)


@writes(TouchSession)
def touch_session(transaction: Transaction, wanted: TouchSession, now: float) -> None:
    one = update(sessions).where(equals(sessions.c.id, wanted.session_id))
    transaction.connection.execute(one.values(seen_at=now))


@reads(ListSessions)
def list_sessions(connection: Connection, wanted: ListSessions, now: float) -> list[SignedIn]:
    query = select(sessions).where(equals(sessions.c.user_id, wanted.user_id), sessions.c.revoked_at.is_(None))
    query = query.where(sessions.c.expires_at > now).order_by(sessions.c.created_at.desc(), sessions.c.id)
    return [_signed_in(row) for row in connection.execute(query)]


@writes(EndSession)
def end_session(transaction: Transaction, wanted: EndSession, now: float) -> None:
    mine = (equals(sessions.c.id, wanted.session_id), equals(sessions.c.user_id, wanted.user_id))
    ended = transaction.connection.execute(
        update(sessions).where(*mine, sessions.c.revoked_at.is_(None)).values(revoked_at=now)
    )
    if ended.rowcount:
        detail = {"session": wanted.session_id}
        write_audit(transaction, wanted.audit, "end_session", "", detail, now, subject=wanted.user_id)


def _signed_in(row: Row[Any]) -> SignedIn:
    values = {**row._mapping, "session_id": row.id}
    del values["id"], values["digest"]
    return SignedIn(**values)
