"""What a check finds: two things that should agree and do not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Select

MAX_DIFFERENCES = 100  # of one kind: enough to see the pattern


@dataclass(frozen=True, slots=True)
class Difference:
    """Two things that should agree and do not."""

    #: "entry", "balance", "aggregate", "usage", "version", "journal", "grant", "key_spend", "reply", "audit"
    kind: str
    subject: str  # the id of what to look at
    message: str


def some(connection: Connection, query: Select[Any]) -> Any:
    """The first rows of a query that finds differences."""
    return connection.execute(query.limit(MAX_DIFFERENCES))
