"""People, their invitations and suspensions. The audit log names a person by their e-mail address."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, Select, delete, func, insert, or_, select, update

from serve_app.accounting.audit_log import write_audit
from serve_app.accounting.console_tables import (
    identities,
    invitations,
    memberships,
    operator_roles,
    passkeys,
    recovery_codes,
    sessions,
    users,
)
from serve_app.accounting.database import Transaction
from serve_app.accounting.registry import LONG_S, reads, writes
from serve_app.accounting.schema import accounts
from serve_app.accounting.snapshots import read_account
from serve_app.accounting.validation import check_fields, check_name, check_page, equals, is_text
from serve_app.contracts.books import Audit
from serve_app.contracts.errors import Conflict, InvalidValue
from serve_app.contracts.key_format import new_id
from serve_app.contracts.notices import is_email
from serve_app.contracts.people import (
    MAX_INVITATIONS_A_DAY,
    ROLES,
    AcceptInvitation,
    ChangePerson,
    FindInvitation,
    FindPerson,
    GetPerson,
    Identity,
    Invitation,
    InvitePerson,
    ListPeople,
    Person,
    ResetPerson,
    RevokeInvitation,
    SearchPeople,
    SuspendPerson,
)
from serve_app.contracts.units import DAY_S

_LONGEST = 500  # characters of an issuer or a subject; OpenID Connect limits subjects to 255
_OPEN = (invitations.c.used_at.is_(None), invitations.c.revoked_at.is_(None))


@writes(InvitePerson)
def invite_person(transaction: Transaction, wanted: InvitePerson, now: float) -> Invitation:
    connection, email = transaction.connection, checked_email(wanted.email)
    read_account(connection, wanted.account_id)
    if wanted.role not in ROLES:
        raise InvalidValue(f"role {wanted.role!r}: give one of {', '.join(ROLES)}")
    earlier = connection.execute(select(invitations).where(invitations.c.digest == wanted.digest)).one_or_none()
    if earlier is not None:
        return _invitation(connection, earlier)  # the command is a repetition
    known = find_person(connection, FindPerson(email), now)
    if known is not None and wanted.account_id in known.roles:
        raise Conflict(f"{email} already belongs to this account")
    if wanted.by_owner:
        _check_rate(connection, wanted.account_id, now)
    end_invitations(connection, wanted.account_id, email, now)
    row = {"id": new_id("inv_"), "email": email, "account_id": wanted.account_id, "role": wanted.role}
    times = {"created_at": now, "expires_at": wanted.expires_at}
    connection.execute(insert(invitations).values(**row, **times, digest=wanted.digest, invited_by=wanted.invited_by))
    detail = {"email": email, "role": wanted.role, "expires_at": wanted.expires_at}
    write_audit(transaction, wanted.audit, "invite_person", wanted.account_id, detail, now, subject=row["id"])
    made = connection.execute(select(invitations).where(invitations.c.id == row["id"])).one()
    return _invitation(connection, made)


@reads(FindInvitation)
def find_invitation(connection: Connection, wanted: FindInvitation, now: float) -> Invitation | None:
    query = select(invitations).where(equals(invitations.c.digest, wanted.digest), *_OPEN)
    row = connection.execute(query.where(invitations.c.expires_at > now)).one_or_none()
    return None if row is None else _invitation(connection, row)


@writes(RevokeInvitation)
def revoke_invitation(transaction: Transaction, wanted: RevokeInvitation, now: float) -> Invitation:
    connection = transaction.connection
    query = select(invitations).where(equals(invitations.c.id, wanted.invitation_id))
    row = connection.execute(query).one_or_none()
    if row is None or row.used_at is not None:
        raise InvalidValue(
            f"no open invitation {wanted.invitation_id!r}: list the account's people to see its open invitations"
        )
    if row.revoked_at is None:
        connection.execute(update(invitations).where(invitations.c.id == row.id).values(revoked_at=now))
        write_audit(transaction, wanted.audit, "revoke_invitation", row.account_id, {}, now, subject=row.id)
    return _invitation(connection, connection.execute(query).one())


@writes(AcceptInvitation)
def accept_invitation(transaction: Transaction, wanted: AcceptInvitation, now: float) -> Person:
    connection = transaction.connection
    invitation = find_invitation(connection, FindInvitation(wanted.digest), now)
    if invitation is None:
        raise InvalidValue("this invitation is used, revoked or expired: ask for a new one")
    user_id = add_person(connection, invitation.email, wanted.name, wanted.password, now)
    if wanted.identity is not None:
        add_identity(connection, user_id, wanted.identity, now)
    elif not wanted.password:
        raise InvalidValue("a password is required")
    add_member(connection, user_id, invitation.account_id, invitation.role)
    used = update(invitations).where(invitations.c.id == invitation.invitation_id).values(used_at=now)
    connection.execute(used)
    end_invitations(connection, invitation.account_id, invitation.email, now)
    audit = Audit(invitation.email, address=wanted.address)
    detail = {"invitation": invitation.invitation_id, "role": invitation.role}
    write_audit(transaction, audit, "accept_invitation", invitation.account_id, detail, now, subject=user_id)
    return read_person(connection, user_id)


@reads(FindPerson)
def find_person(connection: Connection, wanted: FindPerson, _now: float) -> Person | None:
    row = connection.execute(select(users).where(equals(users.c.email, wanted.email.strip().lower()))).one_or_none()
    return None if row is None else _person(connection, row)


@reads(GetPerson)
def get_person(connection: Connection, wanted: GetPerson, _now: float) -> Person:
    return read_person(connection, wanted.user_id)


@reads(SearchPeople, timeout_s=LONG_S)
def search_people(connection: Connection, wanted: SearchPeople, _now: float) -> list[Person]:
    query = select(users).order_by(users.c.created_at.desc(), users.c.id).limit(check_page(wanted.limit))
    if text := wanted.text.strip().lower():
        check_name(text, "a search")
        named = func.lower(users.c.name).contains(text, autoescape=True)
        query = query.where(or_(users.c.email.contains(text, autoescape=True), named))
    return [_person(connection, row) for row in connection.execute(query).all()]


@reads(ListPeople)
def list_people(connection: Connection, wanted: ListPeople, now: float) -> tuple[list[Person], list[Invitation]]:
    read_account(connection, wanted.account_id)
    members = select(memberships.c.user_id).where(memberships.c.account_id == wanted.account_id)
    people: Select[Any] = select(users).where(users.c.id.in_(members)).order_by(users.c.created_at, users.c.id)
    invited = select(invitations).where(
        invitations.c.account_id == wanted.account_id, *_OPEN, invitations.c.expires_at > now
    )
    return (
        [_person(connection, row) for row in connection.execute(people).all()],
        [_invitation(connection, row) for row in connection.execute(invited.order_by(invitations.c.created_at))],
    )


@writes(SuspendPerson)
def suspend_person(transaction: Transaction, wanted: SuspendPerson, now: float) -> Person:
    connection = transaction.connection
    before = find_person(connection, FindPerson(wanted.email), now)
    if before is None:
        raise InvalidValue(f"no person has the address {wanted.email!r}: list the account's people")
    if before.suspended != wanted.suspended:
        connection.execute(update(users).where(users.c.id == before.user_id).values(suspended=wanted.suspended))
        end_sessions(connection, before.user_id, "", now)
        detail = {"suspended": {"was": before.suspended, "is": wanted.suspended}}
        write_audit(transaction, wanted.audit, "suspend_person", "", detail, now, subject=before.user_id)
    return read_person(connection, before.user_id)


@writes(ResetPerson)
def reset_person(transaction: Transaction, wanted: ResetPerson, now: float) -> Person:
    connection = transaction.connection
    before = find_person(connection, FindPerson(wanted.email), now)
    if before is None:
        raise InvalidValue(f"no person has the address {wanted.email!r}: list the account's people")
    password = before.password if wanted.password is None else wanted.password
    if (before.password, before.totp_secret) == (password, None):
        return before  # the command is a repetition, or there is nothing to change
    changes = {"password": password, "totp_secret": None}
    connection.execute(update(users).where(users.c.id == before.user_id).values(changes))
    set_recovery_codes(connection, before.user_id, ())
    if wanted.password is not None:
        connection.execute(delete(passkeys).where(passkeys.c.user_id == before.user_id))
    end_sessions(connection, before.user_id, "", now)
    detail = {"password": wanted.password is not None, "codes": before.totp_secret is not None}
    write_audit(transaction, wanted.audit, "reset_person", "", detail, now, subject=before.user_id)
    return read_person(connection, before.user_id)


@writes(ChangePerson)
def change_person(transaction: Transaction, wanted: ChangePerson, now: float) -> Person:
    connection = transaction.connection
    check_fields(wanted.changes, ("password", "totp_secret"))
    if wanted.before is not None:
        if read_person(connection, wanted.user_id).password != wanted.before:
            raise InvalidValue("the password was changed meanwhile")
        connection.execute(delete(passkeys).where(passkeys.c.user_id == wanted.user_id))  # one may be an intruder's
    if "totp_secret" in wanted.changes:
        set_recovery_codes(connection, wanted.user_id, wanted.recovery)
    step = {} if wanted.totp_step is None else {"totp_step": wanted.totp_step}
    connection.execute(update(users).where(users.c.id == wanted.user_id).values(**wanted.changes, **step))
    end_sessions(connection, wanted.user_id, wanted.keep, now)
    for name, value in wanted.changes.items():
        action = "change_password" if name == "password" else "totp_off" if value is None else "totp_on"
        write_audit(transaction, wanted.audit, action, "", {}, now, subject=wanted.user_id)
    return read_person(connection, wanted.user_id)


def checked_email(text: str) -> str:
    """Returns an e-mail address in lower case. Raises InvalidValue."""
    email = text.strip().lower()
    if not is_text(email, 200) or not is_email(email):
        raise InvalidValue(f"{text!r} is not an e-mail address")
    return email


def add_person(connection: Connection, email: str, name: str, password: str, now: float) -> str:
    """Adds a person and returns the id. Raises InvalidValue, and Conflict for an e-mail address in use."""
    check_name(name)
    _check_free(connection, email)
    user_id = new_id("user_")
    given = {"id": user_id, "email": email, "name": name, "password": password}
    connection.execute(insert(users).values(**given, totp_step=0, suspended=False, created_at=now))
    return user_id


def add_member(connection: Connection, user_id: str, account_id: str, role: str) -> None:
    connection.execute(insert(memberships).values(user_id=user_id, account_id=account_id, role=role))


def set_recovery_codes(connection: Connection, user_id: str, digests: tuple[str, ...]) -> None:
    """Replaces a person's recovery codes."""
    connection.execute(delete(recovery_codes).where(recovery_codes.c.user_id == user_id))
    if digests:
        connection.execute(insert(recovery_codes), [{"digest": one, "user_id": user_id} for one in digests])


def end_invitations(connection: Connection, account_id: str, email: str, now: float) -> None:
    """Revokes an e-mail address's open invitations to an account. A new one, or the membership, replaces them."""
    theirs = (invitations.c.account_id == account_id, invitations.c.email == email)
    connection.execute(update(invitations).where(*theirs, *_OPEN).values(revoked_at=now))


def add_identity(connection: Connection, user_id: str, identity: Identity, now: float) -> None:
    """Adds an identity to a person. Raises InvalidValue, and Conflict if it belongs to a person already."""
    if not (is_text(identity.issuer, _LONGEST) and is_text(identity.subject, _LONGEST)):
        raise InvalidValue(f"the provider's ids must have 1 to {_LONGEST} printable characters")
    if owner_of(connection, identity) is not None:
        raise Conflict("this identity is already linked to a person: sign in with it, then open the invitation again")
    row = {"issuer": identity.issuer, "subject": identity.subject, "user_id": user_id, "created_at": now}
    connection.execute(insert(identities).values(row))


def owner_of(connection: Connection, identity: Identity) -> str | None:
    """Returns the id of the person with this identity, or None."""
    one = (equals(identities.c.issuer, identity.issuer), equals(identities.c.subject, identity.subject))
    found: str | None = connection.execute(select(identities.c.user_id).where(*one)).scalar_one_or_none()
    return found


def end_sessions(connection: Connection, user_id: str, keep: str, now: float) -> None:
    """Ends all sessions of a person except the one with the id `keep`."""
    mine = update(sessions).where(sessions.c.user_id == user_id, sessions.c.id != keep)
    connection.execute(mine.where(sessions.c.revoked_at.is_(None)).values(revoked_at=now))


def read_person(connection: Connection, user_id: str) -> Person:
    """Returns a person. Raises InvalidValue for an unknown id."""
    row = connection.execute(select(users).where(equals(users.c.id, user_id))).one_or_none()
    if row is None:
        raise InvalidValue(f"no person {user_id!r}")
    return _person(connection, row)


def _person(connection: Connection, row: Row[Any]) -> Person:
    roles = select(memberships).where(memberships.c.user_id == row.id).order_by(memberships.c.account_id)
    operator = select(operator_roles.c.role).where(operator_roles.c.user_id == row.id)
    linked = select(identities.c.issuer).where(identities.c.user_id == row.id).distinct()
    values = {**row._mapping, "user_id": row.id}
    del values["id"]
    return Person(
        **values,
        roles={one.account_id: one.role for one in connection.execute(roles)},
        operator_role=connection.execute(operator).scalar_one_or_none(),
        issuers=tuple(connection.execute(linked.order_by(identities.c.issuer)).scalars()),
    )


def _check_rate(connection: Connection, account_id: str, now: float) -> None:
    latest = (invitations.c.account_id == account_id, invitations.c.created_at > now - DAY_S)
    made = connection.execute(select(func.count()).select_from(invitations).where(*latest)).scalar_one()
    if made >= MAX_INVITATIONS_A_DAY:
        raise Conflict(f"an account makes at most {MAX_INVITATIONS_A_DAY} invitations in 24 hours: try again tomorrow")


def _check_free(connection: Connection, email: str) -> None:
    if connection.execute(select(users.c.id).where(users.c.email == email)).one_or_none() is not None:
        raise Conflict(f"{email} already belongs to a person: sign in, then open the invitation again")


def _invitation(connection: Connection, row: Row[Any]) -> Invitation:
    name = connection.execute(select(accounts.c.name).where(accounts.c.id == row.account_id)).scalar_one()
    values = {**row._mapping, "invitation_id": row.id, "account_name": name}
    del values["id"], values["digest"]
    return Invitation(**values)
