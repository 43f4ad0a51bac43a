"""Double entry: every movement of money is an entry whose postings sum to zero, written once and never changed.

Ledger accounts, and the meaning of a positive posting:

    customer:{id}:granted     the customer has more granted money   (= accounts.granted)
    customer:{id}:topped_up   the customer has more paid-in money   (= accounts.topped_up)
    funds:received            always negative: money that customers have paid in
    funds:granted             always negative: money given to customers
    funds:expired             granted money that expired before it was spent
    corrections               negative: given back to customers, positive: taken back
    revenue:{model}           cost of the model's usage, at full price
    loss:uncollected          always negative: the part of the cost that no balance covered
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, insert

from serve_app.accounting.schema import journal_entries, postings

FUNDS_RECEIVED = "funds:received"
FUNDS_GRANTED = "funds:granted"
FUNDS_EXPIRED = "funds:expired"
CORRECTIONS = "corrections"
LOSS_UNCOLLECTED = "loss:uncollected"


class EntryKind(StrEnum):
    TOP_UP = "top_up"
    GRANT = "grant"
    CHARGE = "charge"
    CORRECTION = "correction"
    EXPIRY = "expiry"


@dataclass(frozen=True, slots=True)
class Entry:
    """A journal entry and its postings: ledger account → gain in nano-units. Zeros are not stored."""

    entry_id: int
    kind: EntryKind
    account_id: str
    created_at: float
    postings: Mapping[str, int] = field(default_factory=dict)
    memo: str = ""
    idempotency_key: str | None = None

    def __post_init__(self) -> None:
        if sum(self.postings.values()) != 0:
            raise AssertionError(f"entry {self.entry_id} does not balance: {dict(self.postings)}")


@dataclass(frozen=True, slots=True)
class Spending:
    """The parts of a charge by source, in nano-units."""

    granted: int
    topped_up: int
    uncollected: int

    @property
    def charged(self) -> int:
        return self.granted + self.topped_up


def granted(account_id: str) -> str:
    return f"customer:{account_id}:granted"


def topped_up(account_id: str) -> str:
    return f"customer:{account_id}:topped_up"


def split_cost(has_granted: int, has_topped_up: int, cost: int) -> Spending:
    """Splits a cost: grants first, then top-ups. The rest is uncollected, so no balance is ever negative."""
    from_granted = min(cost, has_granted)
    from_topped_up = min(cost - from_granted, has_topped_up)
    return Spending(from_granted, from_topped_up, cost - from_granted - from_topped_up)


def charge_postings(account_id: str, model: str, spending: Spending) -> dict[str, int]:
    return {
        granted(account_id): -spending.granted,
        topped_up(account_id): -spending.topped_up,
        f"revenue:{model}": spending.charged + spending.uncollected,
        LOSS_UNCOLLECTED: -spending.uncollected,
    }


_ADD_ENTRIES, _ADD_POSTINGS = insert(journal_entries), insert(postings)


def post(connection: Connection, entries: Sequence[Entry]) -> None:
    """Adds one or more entries, always with two SQL statements."""
    lines: list[dict[str, Any]] = []
    for entry in entries:
        moved = [(ledger_account, amount) for ledger_account, amount in entry.postings.items() if amount]
        lines += [
            {"entry_id": entry.entry_id, "line": line, "ledger_account": ledger_account, "amount": amount}
            for line, (ledger_account, amount) in enumerate(moved, start=1)
        ]
    rows = [
        {name: getattr(entry, name) for name in ("account_id", "memo", "created_at", "idempotency_key")}
        | {"id": entry.entry_id, "kind": entry.kind.value}
        for entry in entries
    ]
    connection.execute(_ADD_ENTRIES, rows)
    connection.execute(_ADD_POSTINGS, lines)
