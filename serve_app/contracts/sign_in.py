"""Ways to sign in besides an invitation and a password: the operator's link, sign-up, recovery codes, passkeys.

Each operation is one command, as in `contracts.commands`. The ledger stores only digests of links and recovery codes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from serve_app.contracts.books import Audit
from serve_app.contracts.commands import Command
from serve_app.contracts.people import Person

LINK_S: Final = 600.0  # seconds for which a sign-in link works
RECOVERY_CODES: Final = 10  # of a person
MAX_PASSKEYS: Final = 20  # of a person
SIGN_UP: Final = "sign-up"  # actor in the audit log for the credit that a new account gets at sign-up


@dataclass(frozen=True, slots=True)
class SignInLink:
    """A link that signs in an account's administrator (UseSignInLink). `person` is None until the account has one."""

    account_id: str
    account_name: str
    expires_at: float
    person: Person | None = None


@dataclass(frozen=True, slots=True)
class MakeSignInLink(Command[None]):
    """Stores a link, which replaces the account's earlier link. Raises AccountNotFound."""

    account_id: str
    digest: str = field(repr=False)
    expires_at: float
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class FindSignInLink(Command[SignInLink | None]):
    """Returns a link that works now, or None."""

    digest: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class UseSignInLink(Command[Person]):
    """Uses up a link and returns an owner of the account who has the operator role `admin` and is not suspended.

    Of several, it returns the person who was created first. If there is none, `email`, `name` and `password` (a hash)
    create the person. Raises InvalidValue for a link that does not work, and Conflict for an e-mail address that is
    already in use.
    """

    digest: str = field(repr=False)
    email: str = ""
    name: str = ""
    password: str = field(default="", repr=False)
    address: str | None = None  # IP address of the caller, for the audit log


@dataclass(frozen=True, slots=True)
class SignUp(Command[Person]):
    """Creates a person with a confirmed e-mail address, and an account that the person owns.

    The account gets a grant of `credit`, unless it would raise the sum of such grants in the last 24 hours above
    `credit_cap`. Amounts are nano-units. Raises InvalidValue for an invalid value, and Conflict for an e-mail
    address that is already in use.
    """

    email: str
    name: str
    account_name: str
    password: str = field(repr=False)
    credit: int = 0
    credit_cap: int = 0
    address: str | None = None  # IP address of the caller, for the audit log


@dataclass(frozen=True, slots=True)
class ReplaceRecoveryCodes(Command[None]):
    """Replaces a person's recovery codes. Raises InvalidValue for a person without one-time codes."""

    user_id: str
    digests: tuple[str, ...] = field(repr=False)
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class CountRecoveryCodes(Command[int]):
    """Returns how many recovery codes a person has left."""

    user_id: str


@dataclass(frozen=True, slots=True)
class Passkey:
    """A passkey. Its id and its public key are in base64url."""

    passkey_id: str
    user_id: str
    name: str
    public_key: str
    sign_count: int
    created_at: float
    used_at: float | None = None


@dataclass(frozen=True, slots=True)
class AddPasskey(Command[Passkey]):
    """Adds a passkey.

    Raises InvalidValue for an unknown person, or a name or passkey that can't be stored, and Conflict if the passkey is
    registered already or the person has MAX_PASSKEYS.
    """

    passkey_id: str
    user_id: str
    name: str
    public_key: str
    sign_count: int
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class ListPasskeys(Command[list[Passkey]]):
    """Returns a person's passkeys, oldest first."""

    user_id: str


@dataclass(frozen=True, slots=True)
class FindPasskey(Command[tuple[Passkey, Person] | None]):
    """Returns a passkey and its person, or None."""

    passkey_id: str


@dataclass(frozen=True, slots=True)
class RemovePasskey(Command[None]):
    """Removes a passkey of this person. Harmless to repeat."""

    user_id: str
    passkey_id: str
    audit: Audit | None = None
