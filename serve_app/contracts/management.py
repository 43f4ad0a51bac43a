"""Management keys of accounts, and the operations on them, one command each, as in `contracts.commands`.

A management key gives access to the account's endpoints (`/account/...`), but not to chat. The ledger stores only its
digest and hint (`contracts.key_format`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from serve_app.contracts.books import AccountSnapshot, Audit
from serve_app.contracts.commands import Command

MAX_KEYS: Final = 20  # per account, not counting revoked keys


@dataclass(frozen=True, slots=True)
class ManagementKey:
    """A management key as committed."""

    key_id: str
    account_id: str
    name: str
    hint: str
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None


@dataclass(frozen=True, slots=True)
class CreateManagementKey(Command[ManagementKey]):
    """Stores the digest and hint of a management key. The same digest and name return the same key.

    Raises AccountNotFound, InvalidValue, and Conflict, for example if the account already has MAX_KEYS keys.
    """

    account_id: str
    name: str
    digest: str = field(repr=False)
    hint: str
    expires_at: float | None = None
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class ListManagementKeys(Command[list[ManagementKey]]):
    """Returns an account's management keys, oldest first, including revoked ones. Raises AccountNotFound."""

    account_id: str


@dataclass(frozen=True, slots=True)
class RevokeManagementKey(Command[ManagementKey]):
    """Revokes a key permanently; harmless to repeat. Raises KeyNotFound, also for a key of another account."""

    account_id: str
    key_id: str
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class FindManagementKey(Command[tuple[ManagementKey, AccountSnapshot] | None]):
    """Returns the key with this digest and its account, active or not; None if there is no such key."""

    digest: str = field(repr=False)
