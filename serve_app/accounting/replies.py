"""Complete replies, stored for a day: a retry with the same idempotency key gets the stored reply.

Each account keeps its newest replies, up to a quota. After a reply is removed, a retry is a new request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, Delete, Table, bindparam, delete, func, select, tuple_

from serve_app.accounting import stored_responses
from serve_app.accounting.database import Transaction
from serve_app.accounting.dialects import Upsert
from serve_app.accounting.registry import reads, writes
from serve_app.accounting.schema import replies
from serve_app.accounting.validation import equals, is_text
from serve_app.contracts.books import Settlement, StoredReply
from serve_app.contracts.commands import FindReply, PruneReplies
from serve_app.contracts.units import DAY_S

KEPT_S = DAY_S
MAX_BODY = 8 * 2**20  # bytes
MAX_PRUNED = 1000  # rows per table and command; other writes wait for the command
MAX_ACCOUNTS = 10_000  # accounts whose writes a process counts


_ADD = Upsert(
    replies,
    lambda new: {name: new[name] for name in ("request_id", "fingerprint", "body", "created_at")},
    where=lambda new: replies.c.created_at <= new.created_at - KEPT_S,  # replaces only an expired reply
)


@dataclass(frozen=True, slots=True)
class ReplyQuota:
    """Maximum number and total bytes of one account's replies."""

    replies: int = 10_000
    total_bytes: int = 64 * 2**20


class QuotaKeeper:
    """Enforces the accounts' quota in a table with the primary key (`account_id`, `key`).

    Counting is slow, so a process checks an account only after it has written a sixteenth of the quota. An account can
    therefore exceed its quota by a sixteenth per process.
    """

    def __init__(self, quota: ReplyQuota, table: Table = replies, key: str = "idempotency_key") -> None:
        self._quota = quota
        self._trim = _trim(table, key)
        self._written: OrderedDict[str, tuple[int, int]] = OrderedDict()  # (rows, bytes) since the last check

    def enforce(self, connection: Connection, written: Iterable[tuple[str, int]]) -> None:
        """Removes the oldest rows of accounts that are above their quota after new rows were written.

        `written` has the account and the size of each new row.
        """
        due = set()
        for account_id, added in written:
            # An account without a count here is checked at once: another process may have counted its earlier rows.
            count, size = self._written.pop(account_id, (self._quota.replies, 0))
            count, size = count + 1, size + added
            if count * 16 >= self._quota.replies or size * 16 >= self._quota.total_bytes:
                due.add(account_id)
                count = size = 0
            self._written[account_id] = count, size
        while len(self._written) > MAX_ACCOUNTS:
            self._written.popitem(last=False)
        if due:
            most = {"accounts": list(due), "most_replies": self._quota.replies, "most_bytes": self._quota.total_bytes}
            connection.execute(self._trim, most)


def _trim(table: Table, key: str) -> Delete:
    """Returns a statement that removes the oldest rows of `accounts` beyond `most_replies` or `most_bytes`."""
    columns = table.c
    newest: dict[str, Any] = {
        "partition_by": columns.account_id,
        "order_by": (columns.created_at.desc(), columns[key]),
    }
    ranked = (
        select(
            columns.account_id,
            columns[key].label("key"),
            func.row_number().over(**newest).label("rank"),
            func.sum(func.length(columns.body)).over(**newest, rows=(None, 0)).label("bytes"),
        )
        .where(columns.account_id.in_(bindparam("accounts", expanding=True)))
        .subquery()
    )
    beyond = select(ranked.c.account_id, ranked.c.key).where(
        (ranked.c.rank > bindparam("most_replies")) | (ranked.c.bytes > bindparam("most_bytes"))
    )
    return delete(table).where(tuple_(columns.account_id, columns[key]).in_(beyond))


def kept_replies(settlements: Sequence[Settlement]) -> Iterator[tuple[str, int]]:
    """Yields account and size of each reply that `settle` has stored."""
    for settlement in settlements:
        if settlement.reply is not None and not why_not_kept(settlement.reply):
            yield settlement.account_id, len(settlement.reply.body)


def why_not_kept(reply: StoredReply) -> str | None:
    """Returns why a reply cannot be kept, or None."""
    for name in ("idempotency_key", "fingerprint"):
        text = getattr(reply, name, None)
        if not is_text(text, 255):
            return f"{name} {text!r}: expected 1 to 255 printable characters"
    body = getattr(reply, "body", None)
    if not isinstance(body, bytes) or len(body) > MAX_BODY:
        return f"a body of at most {MAX_BODY} bytes was expected"
    return None


def reply_row(settlement: Settlement, reply: StoredReply, now: float) -> dict[str, Any]:
    owner = {"account_id": settlement.account_id, "request_id": settlement.request_id}
    return owner | asdict(reply) | {"created_at": now}


def write_replies(connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
    """Stores one or more replies. Replaces a reply with the same idempotency key only if it has expired."""
    _ADD.run(connection, rows)


@reads(FindReply)
def find_reply(connection: Connection, wanted: FindReply, now: float) -> StoredReply | None:
    query = select(replies).where(
        equals(replies.c.account_id, wanted.account_id),
        equals(replies.c.idempotency_key, wanted.idempotency_key),
        replies.c.created_at > now - KEPT_S,
    )
    row = connection.execute(query).one_or_none()
    return None if row is None else StoredReply(row.idempotency_key, row.fingerprint, bytes(row.body))


@writes(PruneReplies)
def prune_replies(transaction: Transaction, _wanted: PruneReplies, now: float) -> int:
    connection = transaction.connection
    mine = tuple_(replies.c.account_id, replies.c.idempotency_key)
    old = select(replies.c.account_id, replies.c.idempotency_key).where(replies.c.created_at <= now - KEPT_S)
    pruned = connection.execute(delete(replies).where(mine.in_(old.limit(MAX_PRUNED)))).rowcount
    return pruned + stored_responses.prune(connection, now, MAX_PRUNED)
