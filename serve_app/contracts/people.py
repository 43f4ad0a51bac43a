"""People of the console and the operations on them, one command each, as in `contracts.commands`.

Tokens of sessions and invitations never reach the ledger: it has their digests (`contracts.key_format.digest`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from serve_app.contracts.books import Audit
from serve_app.contracts.commands import Command

Role = Literal["owner", "member", "billing"]
ROLES: Final = ("owner", "member", "billing")
OPERATOR_ROLES: Final = ("admin", "support", "finance", "read-only")


@dataclass(frozen=True, slots=True)
class Identity:
    """Somebody as an OpenID Connect provider knows them. The subject is the provider's, and never changes."""

    issuer: str
    subject: str


@dataclass(frozen=True, slots=True)
class Person:
    """Somebody who may sign in. `roles` by account."""

    user_id: str
    email: str
    name: str
    suspended: bool
    created_at: float
    roles: Mapping[str, str] = field(default_factory=dict)
    operator_role: str | None = None
    password: str = field(default="", repr=False)  # an argon2 hash; empty: none
    totp_secret: str | None = field(default=None, repr=False)
    totp_step: int = 0  # of the last code that was taken: none is taken twice
    issuers: tuple[str, ...] = ()  # of the person's identities


@dataclass(frozen=True, slots=True)
class Invitation:
    """It makes one person, once."""

    invitation_id: str
    email: str
    account_id: str
    role: str
    created_at: float
    expires_at: float
    used_at: float | None = None
    revoked_at: float | None = None


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
    """Raises AccountNotFound, InvalidValue, and Conflict for an address of the account's own people."""

    account_id: str
    email: str
    role: str
    digest: str = field(repr=False)
    expires_at: float
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class FindInvitation(Command[Invitation | None]):
    """One that can be accepted now, or None."""

    digest: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class RevokeInvitation(Command[Invitation]):
    """Harmless to repeat. Raises InvalidValue for one that is unknown or used."""

    invitation_id: str
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class AcceptInvitation(Command[Person]):
    """Makes the person and uses the invitation up. The audit log has it under the person's address.

    Without a password the person has the identity. Raises InvalidValue for an invitation that can't be accepted, and
    Conflict for an address or an identity that is taken.
    """

    digest: str = field(repr=False)
    name: str
    password: str = field(repr=False)
    address: str | None = None
    identity: Identity | None = None


@dataclass(frozen=True, slots=True)
class JoinAccount(Command[Person]):
    """AcceptInvitation of somebody who has signed in. Raises Conflict for a member, InvalidValue."""

    digest: str = field(repr=False)
    user_id: str
    address: str | None = None


@dataclass(frozen=True, slots=True)
class SetMembership(Command[Person]):
    """Changes a member's role; None takes the membership away.

    Raises InvalidValue for somebody who is no member, Conflict for the last owner.
    """

    account_id: str
    user_id: str
    role: str | None
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class FindPerson(Command[Person | None]):
    """By e-mail address, in any case."""

    email: str


@dataclass(frozen=True, slots=True)
class FindIdentity(Command[Person | None]):
    """Whose it is."""

    identity: Identity


@dataclass(frozen=True, slots=True)
class LinkIdentity(Command[Person]):
    """The person signs in with it from now on. Harmless to repeat. Raises Conflict for one of somebody else."""

    user_id: str
    identity: Identity
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class UnlinkIdentities(Command[Person]):
    """Takes away those of an issuer. Raises InvalidValue for a person without a password."""

    user_id: str
    issuer: str
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class ListPeople(Command[tuple[list[Person], list[Invitation]]]):
    """The people of an account and its open invitations, oldest first. Raises AccountNotFound."""

    account_id: str


@dataclass(frozen=True, slots=True)
class SuspendPerson(Command[Person]):
    """Ends all sessions, and lets nobody sign in until it is undone. Raises InvalidValue for an unknown address."""

    email: str
    suspended: bool
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class ChangePerson(Command[Person]):
    """Sets `password` or `totp_secret`; every session but `keep` ends. Raises InvalidValue."""

    user_id: str
    changes: Mapping[str, str | None] = field(repr=False)
    keep: str
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class OpenSession(Command[SignedIn]):
    """Raises InvalidValue for a suspended person, and for a code whose `totp_step` has been used.

    With `password`, the stored one that was checked: also when that was changed meanwhile, or codes were turned on.
    """

    user_id: str
    digest: str = field(repr=False)
    expires_at: float
    totp_step: int | None = None
    audit: Audit | None = None
    password: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class FindSession(Command[tuple[SignedIn, Person] | None]):
    """A session that is good now, of a person who is not suspended, or None."""

    digest: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class TouchSession(Command[None]):
    """The session was used now."""

    session_id: str


@dataclass(frozen=True, slots=True)
class ListSessions(Command[list[SignedIn]]):
    """Those of a person that are good now, newest first."""

    user_id: str


@dataclass(frozen=True, slots=True)
class EndSession(Command[None]):
    """Ends a session of this person; harmless to repeat, and for one of somebody else."""

    user_id: str
    session_id: str
    audit: Audit | None = None
