"""Operations of operators in the console: finding accounts, and giving credit that a second operator must approve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from serve_app.contracts.books import AccountSnapshot, Audit
from serve_app.contracts.commands import Command
from serve_app.contracts.people import Person

ROLES: Final = ("admin", "support", "finance", "read-only")


@dataclass(frozen=True, slots=True)
class PendingCredit:
    """A credit requested by one operator. A different operator approves it, or any permitted operator rejects it."""

    pending_id: str
    account_id: str
    amount: int  # nano-units
    kind: str
    memo: str
    asked_by: str
    asked_at: float
    booked: bool = False  # without a second operator


@dataclass(frozen=True, slots=True)
class SetOperatorRole(Command[Person]):
    """Sets an operator's role; None removes it. All sessions of the person end.

    A role is given to a member of `account_id`, a staff account. The address alone proves nothing: a manager of an
    account can invite any address and accept the invitation. Raises InvalidValue for an unknown address or role, and
    for a person who is not a member.
    """

    email: str
    role: str | None
    account_id: str | None = None
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class SearchAccounts(Command[list[AccountSnapshot]]):
    """Returns up to `limit` accounts, newest first, by part of the name (in any case) or by the beginning of the id."""

    text: str
    limit: int = 100


@dataclass(frozen=True, slots=True)
class AskCredit(Command[PendingCredit]):
    """Requests a credit that waits for a second operator.

    It is booked at once if the total is at most `alone`. The total is this credit and the credits that this operator
    gave alone in the last 24 hours, to any account. With the same `once`, a repetition changes nothing and returns the
    outcome of the first. Raises AccountNotFound, Conflict, InvalidAmount, InvalidValue.
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
    """Returns the pending credits, oldest first."""


@dataclass(frozen=True, slots=True)
class DecideCredit(Command[bool]):
    """Books or rejects a credit. Returns False if it was decided before.

    Raises InvalidValue if the requester approves it.
    """

    pending_id: str
    approved: bool
    audit: Audit
