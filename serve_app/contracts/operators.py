"""Operations of operators in the console: accounts, service usage, notes, announcements, and credits for approval.

The console calls announcements "notices".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from serve_app.contracts.books import AccountSnapshot, Audit, Outcome, UsageRow
from serve_app.contracts.commands import Command
from serve_app.contracts.messages import set_state
from serve_app.contracts.people import Person

ROLES: Final = ("admin", "support", "finance", "read-only")
ORDERS: Final = ("highest spend today", "newest", "name", "lowest balance", "highest balance")  # of accounts
LEVELS: Final = ("info", "warning", "danger")  # of announcements


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
    booked: bool = False  # booked without a second operator
    decided_by: str | None = None
    decided_at: float | None = None  # None: pending
    approved: bool | None = None

    __setstate__ = set_state


@dataclass(frozen=True, slots=True)
class SetOperatorRole(Command[Person]):
    """Sets an operator's role; None removes it. If this changes the role, all sessions of the person end.

    Only a member of the staff account `account_id` can get a role. The e-mail address alone proves nothing: an owner of
    another account can invite any address and open the invitation's link themselves, without reading that mailbox.
    Raises InvalidValue for an unknown e-mail address or role, and for a person who is not a member.
    """

    email: str
    role: str | None
    account_id: str | None = None
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class FoundAccount:
    """An account, and its usage since the `day_from` of the search."""

    account: AccountSnapshot
    charged: int  # nano-units
    requests: int


@dataclass(frozen=True, slots=True)
class AccountsPage:
    """A page of accounts. `next` is the `after` of the next page, or None on the last page."""

    rows: tuple[FoundAccount, ...]
    next: str | None = None


@dataclass(frozen=True, slots=True)
class SearchAccounts(Command[AccountsPage]):
    """Finds up to `limit` accounts by a part of the name, ignoring case, or by the beginning of the id.

    `order` is one of ORDERS; accounts with equal spend are listed newest first. `below` finds only accounts with a
    balance (AccountSnapshot.balance) below this amount. Usage is summed from `day_from` (YYYY-MM-DD) on. `spending`:
    True finds only accounts that were charged since `day_from`, False only the others. `after` is the last account of
    the previous page. Raises AccountNotFound if that does not exist, and InvalidValue for any other invalid value.
    """

    text: str
    limit: int = 100
    active: bool | None = None
    below: int | None = None
    day_from: str | None = None
    spending: bool | None = None
    after: str | None = None
    order: str = "newest"

    __setstate__ = set_state


@dataclass(frozen=True, slots=True)
class SpendingAccount:
    """An account's usage in a range of days."""

    account_id: str
    name: str
    requests: int
    tokens: int
    charged: int  # nano-units


@dataclass(frozen=True, slots=True)
class ServiceUsage:
    """Usage of all accounts in a range of days."""

    days: tuple[UsageRow, ...]  # one row per day with a request
    active: int  # accounts with a request
    top: tuple[SpendingAccount, ...]  # accounts that were charged most, largest first
    currency: str  # the ledger's currency; empty: not set yet


@dataclass(frozen=True, slots=True)
class SumService(Command[ServiceUsage]):
    """Sums the usage of all accounts between two days (YYYY-MM-DD in UTC, both inclusive), from the daily sums.

    Raises InvalidValue.
    """

    day_from: str
    day_to: str
    top: int = 10


@dataclass(frozen=True, slots=True)
class SumAccountDays(Command[list[UsageRow]]):
    """Sums usage per account and day, for up to 100 accounts, between two days as in SumService."""

    account_ids: tuple[str, ...]
    day_from: str
    day_to: str


@dataclass(frozen=True, slots=True)
class Uncharged:
    """A settled request that was not charged."""

    request_id: str
    account_id: str
    model: str
    backend: str
    outcome: Outcome
    finished_at: float


@dataclass(frozen=True, slots=True)
class ListUncharged(Command[list[Uncharged]]):
    """Returns the latest settled requests that were not charged, of all accounts, newest first.

    These are the failed requests, those cancelled before any output, and those of a free model.
    """

    limit: int = 1000


@dataclass(frozen=True, slots=True)
class Entry:
    """An account's journal entry that is not a charge."""

    entry_id: int
    kind: str  # top_up, grant, correction or expiry
    amount: int  # nano-units; negative: a debit
    created_at: float
    memo: str


@dataclass(frozen=True, slots=True)
class ListEntries(Command[list[Entry]]):
    """Returns an account's journal entries without the charges, newest first. Raises AccountNotFound."""

    account_id: str
    limit: int = 20


@dataclass(frozen=True, slots=True)
class NameSubjects(Command[dict[str, str]]):
    """Returns the names of up to 500 accounts and keys, and the e-mail addresses of people, by id.

    Unknown ids are omitted.
    """

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Note:
    """A note of an operator about an account. Customers never see it."""

    note_id: str
    account_id: str
    text: str
    author: str
    created_at: float


@dataclass(frozen=True, slots=True)
class AddNote(Command[Note]):
    """Adds a note. `once` is an idempotency key. Raises AccountNotFound, InvalidValue."""

    account_id: str
    text: str
    audit: Audit
    once: str = ""


@dataclass(frozen=True, slots=True)
class ListNotes(Command[list[Note]]):
    """Returns an account's notes, newest first."""

    account_id: str
    limit: int = 50


@dataclass(frozen=True, slots=True)
class Announcement:
    """An announcement of the operators to customers, shown above their pages."""

    announcement_id: str
    text: str
    level: str  # one of LEVELS
    account_id: str  # empty: every account
    starts_at: float
    ends_at: float | None  # None: until an operator ends it
    author: str


@dataclass(frozen=True, slots=True)
class PublishAnnouncement(Command[Announcement]):
    """Shows an announcement from `starts_at` on; None: from now on. `once` is an idempotency key.

    Raises AccountNotFound, InvalidValue.
    """

    text: str
    level: str
    audit: Audit
    account_id: str = ""
    starts_at: float | None = None
    ends_at: float | None = None
    once: str = ""


@dataclass(frozen=True, slots=True)
class EndAnnouncement(Command[None]):
    """Ends an announcement now; harmless to repeat. Raises InvalidValue for an unknown id."""

    announcement_id: str
    audit: Audit


@dataclass(frozen=True, slots=True)
class ListAnnouncements(Command[list[Announcement]]):
    """Returns the present and future announcements, latest start first; with `ended`, also those that have ended."""

    ended: bool = False
    limit: int = 50


@dataclass(frozen=True, slots=True)
class AskCredit(Command[PendingCredit]):
    """Requests a credit. It waits for a second operator, unless the requester may give it alone.

    The requester may do so if this credit and the credits that they gave alone in the last 24 hours, to any account,
    are at most `alone` nano-units in total. `once` is an idempotency key: a repetition changes nothing and returns the
    first outcome. Raises AccountNotFound, Conflict, InvalidAmount, InvalidValue.
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
    """Returns the pending credits, oldest first; with `decided`, the latest decided ones instead, newest first."""

    decided: bool = False
    limit: int = 100

    __setstate__ = set_state


@dataclass(frozen=True, slots=True)
class DecideCredit(Command[bool]):
    """Books or rejects a pending credit. Returns False if it is unknown or already decided.

    Raises InvalidValue if the requester approves it.
    """

    pending_id: str
    approved: bool
    audit: Audit
