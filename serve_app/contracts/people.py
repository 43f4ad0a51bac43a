"""People who use the console, and the operations on them, one command each, as in `contracts.commands`.

The ledger stores only digests of session and invitation tokens (`contracts.key_format.digest`).
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from serve_app.contracts.books import Audit
from serve_app.contracts.commands import Command
from serve_app.contracts.key_format import digest
from serve_app.contracts.messages import set_state

Role = Literal["owner", "member", "billing"]
ROLES: Final = ("owner", "member", "billing")
OPERATOR_ROLES: Final = ("admin", "support", "finance", "read-only")
MAX_INVITATIONS_A_DAY: Final = 20  # of an account, by its owners, in any 24 hours
RESET: Final = "reset "  # prefix of `reset_text`, which is stored instead of a password's hash


def reset_text(token: str, expires_at: float) -> str:
    """Returns the text to store instead of a password's hash while the holder of `token` may choose a new password."""
    return f"{RESET}{int(expires_at)} {digest(token)}"


def new_reset_token(email: str) -> str:
    """Returns a new token for a person's link. It begins with the e-mail address, so that the page finds the person."""
    name = base64.urlsafe_b64encode(email.strip().lower().encode()).decode().rstrip("=")
    return f"{name}.{secrets.token_urlsafe(32)}"


@dataclass(frozen=True, slots=True)
class Identity:
    """A person as an OpenID Connect provider knows them. The subject is the provider's id and never changes."""

    issuer: str
    subject: str


@dataclass(frozen=True, slots=True)
class Person:
    """A person who may sign in. `roles` maps account ids to roles."""

    user_id: str
    email: str
    name: str
    suspended: bool
    created_at: float
    roles: Mapping[str, str] = field(default_factory=dict)
    operator_role: str | None = None
    password: str = field(default="", repr=False)  # an argon2 hash, or a `reset_text`; empty: none
    totp_secret: str | None = field(default=None, repr=False)
    totp_step: int = 0  # step of the last accepted code: no code is accepted twice
    issuers: tuple[str, ...] = ()  # issuers of the person's identities


@dataclass(frozen=True, slots=True)
class Invitation:
    """An invitation for one person, valid once."""

    invitation_id: str
    email: str
    account_id: str
    role: str
    created_at: float
    expires_at: float
    used_at: float | None = None
    revoked_at: float | None = None
    invited_by: str | None = None  # the inviting owner's name; None: the operator of the service
    account_name: str = ""

    __setstate__ = set_state


@dataclass(frozen=True, slots=True)
class SignedIn:
    """A session, without its token."""

    session_id: str
    user_id: str
    created_at: float
    seen_at: float
    expires_at: float
    revoked_at: float | None = None


@dataclass(frozen=True, slots=True)
class InvitePerson(Command[Invitation]):
    """Invites a person, and revokes earlier open invitations of the e-mail address to this account.

    Raises AccountNotFound, InvalidValue, and Conflict for the e-mail address of an existing member. If `by_owner`, it
    also raises Conflict after MAX_INVITATIONS_A_DAY.
    """

    account_id: str
    email: str
    role: str
    digest: str = field(repr=False)
    expires_at: float
    audit: Audit | None = None
    by_owner: bool = False
    invited_by: str | None = None  # as in Invitation

    __setstate__ = set_state


@dataclass(frozen=True, slots=True)
class FindInvitation(Command[Invitation | None]):
    """Returns an invitation that can be accepted now, or None."""

    digest: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class RevokeInvitation(Command[Invitation]):
    """Revokes an invitation; harmless to repeat. Raises InvalidValue for an invitation that is unknown or used."""

    invitation_id: str
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class AcceptInvitation(Command[Person]):
    """Creates the person and uses up the invitation. The audit log records it under the person's e-mail address.

    Without a password, the person signs in with the identity. Raises InvalidValue for an invitation that cannot be
    accepted, and Conflict for an e-mail address or an identity that is already in use.
    """

    digest: str = field(repr=False)
    name: str
    password: str = field(repr=False)
    address: str | None = None  # IP address of the caller, for the audit log
    identity: Identity | None = None


@dataclass(frozen=True, slots=True)
class JoinAccount(Command[Person]):
    """Accepts an invitation for a signed-in person.

    Raises InvalidValue for an invitation that does not work or is for someone else, and Conflict if the person is
    already a member.
    """

    digest: str = field(repr=False)
    user_id: str
    address: str | None = None  # as in AcceptInvitation


@dataclass(frozen=True, slots=True)
class SetMembership(Command[Person]):
    """Changes a member's role; None removes the membership.

    Raises InvalidValue for a person who is not a member, and Conflict for the last owner.
    """

    account_id: str
    user_id: str
    role: str | None
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class FindPerson(Command[Person | None]):
    """Returns the person with this e-mail address, in any case, or None."""

    email: str


@dataclass(frozen=True, slots=True)
class GetPerson(Command[Person]):
    """Returns a person. Raises InvalidValue for an unknown id."""

    user_id: str


@dataclass(frozen=True, slots=True)
class SearchPeople(Command[list[Person]]):
    """Returns up to `limit` people, newest first, by part of the e-mail address or of the name, in any case."""

    text: str
    limit: int = 50


@dataclass(frozen=True, slots=True)
class FindIdentity(Command[Person | None]):
    """Returns the person with this identity, or None."""

    identity: Identity


@dataclass(frozen=True, slots=True)
class LinkIdentity(Command[Person]):
    """Links an identity, so that the person can sign in with it. Raises Conflict if it belongs to another person.

    Harmless to repeat.
    """

    user_id: str
    identity: Identity
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class UnlinkIdentities(Command[Person]):
    """Removes the person's identities of an issuer. Raises InvalidValue for a person without a password."""

    user_id: str
    issuer: str
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class ListPeople(Command[tuple[list[Person], list[Invitation]]]):
    """Returns the people of an account and its open invitations, oldest first. Raises AccountNotFound."""

    account_id: str


@dataclass(frozen=True, slots=True)
class SuspendPerson(Command[Person]):
    """Suspends a person, or lifts the suspension. A suspension ends all sessions and prevents signing in.

    Raises InvalidValue for an unknown e-mail address.
    """

    email: str
    suspended: bool
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class ResetPerson(Command[Person]):
    """Turns off the one-time codes of a person and ends all sessions.

    With a `password`, which is a `reset_text`, the present password and the passkeys no longer work either. Raises
    InvalidValue for an unknown e-mail address.
    """

    email: str
    password: str | None = field(repr=False)
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class ChangePerson(Command[Person]):
    """Sets `password` or `totp_secret`, and ends every session except `keep`.

    With `before`, the stored password must be `before`, and the passkeys are removed. A new `totp_secret` replaces the
    recovery codes with those whose digests are `recovery`. `totp_step` is the step of the code that confirmed the new
    secret; this code is not accepted again. Raises InvalidValue.
    """

    user_id: str
    changes: Mapping[str, str | None] = field(repr=False)
    keep: str
    audit: Audit | None = None
    recovery: tuple[str, ...] = field(default=(), repr=False)
    before: str | None = field(default=None, repr=False)
    totp_step: int | None = None

    __setstate__ = set_state


@dataclass(frozen=True, slots=True)
class OpenSession(Command[SignedIn]):
    """Opens a session. Raises InvalidValue for a suspended person, and for a code whose `totp_step` has been used.

    `password` is the stored hash that was checked. With it, the command also raises InvalidValue if the password was
    changed or one-time codes were turned on meanwhile. `recovery` is the digest of a recovery code, which is used up
    instead of a one-time code. `passkey` is the id of the passkey that was checked, with its new count. A code or
    passkey that was removed meanwhile raises InvalidValue.
    """

    user_id: str
    digest: str = field(repr=False)
    expires_at: float
    totp_step: int | None = None
    audit: Audit | None = None
    password: str | None = field(default=None, repr=False)
    recovery: str | None = field(default=None, repr=False)
    passkey: tuple[str, int] | None = None

    __setstate__ = set_state


@dataclass(frozen=True, slots=True)
class FindSession(Command[tuple[SignedIn, Person] | None]):
    """Returns a valid session and its person, or None if there is no such session or the person is suspended."""

    digest: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class TouchSession(Command[None]):
    """Records that the session was used now."""

    session_id: str


@dataclass(frozen=True, slots=True)
class ListSessions(Command[list[SignedIn]]):
    """Returns a person's valid sessions, newest first."""

    user_id: str


@dataclass(frozen=True, slots=True)
class EndSession(Command[None]):
    """Ends a session of this person. Harmless to repeat; no effect on another person's session."""

    user_id: str
    session_id: str
    audit: Audit | None = None
