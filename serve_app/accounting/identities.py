"""Finds, links and unlinks the identities of people at OpenID Connect providers."""

from __future__ import annotations

from sqlalchemy import Connection, delete

from serve_app.accounting.audit_log import write_audit
from serve_app.accounting.console_tables import identities
from serve_app.accounting.database import Transaction
from serve_app.accounting.people import add_identity, owner_of, read_person
from serve_app.accounting.registry import reads, writes
from serve_app.accounting.validation import equals
from serve_app.contracts.errors import Conflict, InvalidValue
from serve_app.contracts.people import FindIdentity, LinkIdentity, Person, UnlinkIdentities


@reads(FindIdentity)
def find_identity(connection: Connection, wanted: FindIdentity, _now: float) -> Person | None:
    user_id = owner_of(connection, wanted.identity)
    return None if user_id is None else read_person(connection, user_id)


@writes(LinkIdentity)
def link_identity(transaction: Transaction, wanted: LinkIdentity, now: float) -> Person:
    connection, identity = transaction.connection, wanted.identity
    person, owner = read_person(connection, wanted.user_id), owner_of(connection, identity)
    if owner not in (None, person.user_id):
        raise Conflict("this identity is linked to another person")
    if owner is None:
        add_identity(connection, person.user_id, identity, now)
        detail = {"issuer": identity.issuer, "subject": identity.subject}
        write_audit(transaction, wanted.audit, "link_identity", "", detail, now, subject=person.user_id)
    return read_person(connection, person.user_id)


@writes(UnlinkIdentities)
def unlink_identities(transaction: Transaction, wanted: UnlinkIdentities, now: float) -> Person:
    connection = transaction.connection
    person = read_person(connection, wanted.user_id)
    if not person.password:
        raise InvalidValue("this sign-in cannot be unlinked: you have no password, so it is your only way to sign in")
    mine = (identities.c.user_id == person.user_id, equals(identities.c.issuer, wanted.issuer))
    if connection.execute(delete(identities).where(*mine)).rowcount:
        detail = {"issuer": wanted.issuer}
        write_audit(transaction, wanted.audit, "unlink_identities", "", detail, now, subject=person.user_id)
    return read_person(connection, person.user_id)
