"""Changes a member's role, removes members, and adds existing users to other accounts."""

from __future__ import annotations

from sqlalchemy import Connection, delete, insert, select, update

from serve_app.accounting.audit_log import write_audit
from serve_app.accounting.console_tables import invitations, memberships
from serve_app.accounting.database import Transaction
from serve_app.accounting.people import end_invitations, find_invitation, read_person
from serve_app.accounting.registry import writes
from serve_app.accounting.validation import equals
from serve_app.contracts.books import Audit
from serve_app.contracts.errors import Conflict, InvalidValue
from serve_app.contracts.people import ROLES, FindInvitation, JoinAccount, Person, SetMembership


@writes(SetMembership)
def set_membership(transaction: Transaction, wanted: SetMembership, now: float) -> Person:
    connection = transaction.connection
    here = (equals(memberships.c.account_id, wanted.account_id), equals(memberships.c.user_id, wanted.user_id))
    before = connection.execute(select(memberships.c.role).where(*here)).scalar_one_or_none()
    if before is None:
        raise InvalidValue("this account has no such member")
    if wanted.role is not None and wanted.role not in ROLES:
        raise InvalidValue(f"role {wanted.role!r}: give one of {', '.join(ROLES)}")
    if before != wanted.role:
        if before == "owner" and _owners(connection, wanted.account_id) == 1:
            raise Conflict("this is the account's last owner: make another member an owner first")
        changed = delete(memberships) if wanted.role is None else update(memberships).values(role=wanted.role)
        connection.execute(changed.where(*here))
        detail = {"role": {"was": before, "is": wanted.role}}
        write_audit(transaction, wanted.audit, "set_membership", wanted.account_id, detail, now, subject=wanted.user_id)
    return read_person(connection, wanted.user_id)


@writes(JoinAccount)
def join_account(transaction: Transaction, wanted: JoinAccount, now: float) -> Person:
    connection = transaction.connection
    invitation = find_invitation(connection, FindInvitation(wanted.digest), now)
    person = read_person(connection, wanted.user_id)
    if invitation is None or invitation.email != person.email:
        raise InvalidValue(
            "this invitation is used, revoked, expired, or for another e-mail address: ask for a new one"
        )
    if invitation.account_id in person.roles:
        raise Conflict("you already belong to this account")
    member = {"user_id": person.user_id, "account_id": invitation.account_id, "role": invitation.role}
    connection.execute(insert(memberships).values(member))
    connection.execute(update(invitations).where(invitations.c.id == invitation.invitation_id).values(used_at=now))
    end_invitations(connection, invitation.account_id, invitation.email, now)
    detail = {"invitation": invitation.invitation_id, "role": invitation.role}
    audit = Audit(person.email, address=wanted.address)
    write_audit(transaction, audit, "accept_invitation", invitation.account_id, detail, now, subject=person.user_id)
    return read_person(connection, person.user_id)


def _owners(connection: Connection, account_id: str) -> int:
    """Counts an account's owners and locks their rows, so that two owners cannot leave at the same time."""
    of_account = memberships.c.account_id == account_id, memberships.c.role == "owner"
    return len(connection.execute(select(memberships.c.user_id).where(*of_account).with_for_update()).all())
