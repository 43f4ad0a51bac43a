"""What operators do in the console beside the other commands: find accounts, and give credit that two must agree to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from serve_app.contracts.books import AccountSnapshot, Audit
from serve_app.contracts.commands import Command
from serve_app.contracts.people import Person

ROLES: Final = ("admin", "support", "finance", "read-only")


@dataclass(frozen=True, slots=True)
class PendingCredit:
    """Asked for by one operator. Another one approves it, or anyone who may rejects it."""

    pending_id: str
    account_id: str
    amount: int  # nano-units
    kind: str
    memo: str
    asked_by: str
    asked_at: float
    booked: bool = False  # without another one


@dataclass(frozen=True, slots=True)
class SetOperatorRole(Command[Person]):
    """None takes the role away. All sessions of the person end.

    A role is given to a member of `account_id`, an account of the staff's. The address alone proves nothing: who
    manages an account can invite any address and accept the invitation. Raises InvalidValue for an unknown address or
    role, and for a person who is no member.
    """

    email: str
    role: str | None
    account_id: str | None = None
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class SearchAccounts(Command[list[AccountSnapshot]]):
    """Up to `limit` accounts whose name has the text, in any case, or whose id begins with it; newest first."""

    text: str
    limit: int = 100


@dataclass(frozen=True, slots=True)
class AskCredit(Command[PendingCredit]):
    """A credit that waits for a second operator.

    It is booked at once if it and what this operator has given in the last 24 hours alone, to any account, are at most
    `alone` together. With the same `once` a repetition changes nothing, and returns what became of the first. Raises
    AccountNotFound, Conflict, InvalidAmount, InvalidValue.
    """

    account_id: str
    amount: int
    kind: Literal["top_up", "grant"]
    memo: str
    audit: Audit
    alone: int = 0
    once: str = ""


@dataclass(frozen=True, slots=True)
class ListPendingCredits(Command[list[PendingCredit]]):
    """Oldest first."""


@dataclass(frozen=True, slots=True)
class DecideCredit(Command[bool]):
    """Books it, or not. False: it was decided before. Raises InvalidValue when who asked approves it."""

    pending_id: str
    approved: bool
    audit: Audit
