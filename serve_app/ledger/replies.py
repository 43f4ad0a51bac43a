"""Complete replies, kept a day for an account's retries under the same idempotency key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, delete, select, tuple_
from sqlalchemy.dialects import postgresql, sqlite

from serve_app.ledger.messages import StoredReply
from serve_app.ledger.schema import replies

KEPT_S = 24 * 3600.0
MAX_BODY = 8 * 2**20  # bytes
MAX_PRUNED = 1000  # at once: nobody else writes meanwhile


def _adding(added: Any) -> Any:
    return added.on_conflict_do_update(
        index_elements=list(replies.primary_key.columns),
        set_={name: added.excluded[name] for name in ("request_id", "fingerprint", "body", "created_at")},
        where=replies.c.created_at <= added.excluded.created_at - KEPT_S,  # forgotten, only not removed yet
    )


_ADD = {"sqlite": _adding(sqlite.insert(replies)), "postgresql": _adding(postgresql.insert(replies))}


def why_not_kept(reply: StoredReply) -> str | None:
    """What makes a reply impossible to keep, or None."""
    for name, longest in (("idempotency_key", 255), ("fingerprint", 255)):
        text = getattr(reply, name, None)
        if not isinstance(text, str) or not 1 <= len(text) <= longest or not text.isprintable():
            return f"{name} {text!r}: expected 1 to {longest} printable characters"
    body = getattr(reply, "body", None)
    if not isinstance(body, bytes) or len(body) > MAX_BODY:
        return f"a body of at most {MAX_BODY} bytes was expected"
    return None


def write_replies(connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
    """Keep replies, given as rows; one that is kept already under the same idempotency key stands."""
    if rows:
        connection.execute(_ADD[connection.dialect.name], rows)


def find_reply(connection: Connection, account_id: str, idempotency_key: str, *, now: float) -> StoredReply | None:
    """See `Ledger.find_reply`."""
    if not idempotency_key.isprintable():
        return None  # never kept; PostgreSQL takes no NUL even in a question
    query = select(replies).where(
        replies.c.account_id == account_id,
        replies.c.idempotency_key == idempotency_key,
        replies.c.created_at > now - KEPT_S,
    )
    row = connection.execute(query).one_or_none()
    return None if row is None else StoredReply(row.idempotency_key, row.fingerprint, bytes(row.body))


def prune_replies(connection: Connection, *, now: float) -> int:
    """See `Ledger.prune_replies`."""
    mine = tuple_(replies.c.account_id, replies.c.idempotency_key)
    old = select(replies.c.account_id, replies.c.idempotency_key).where(replies.c.created_at <= now - KEPT_S)
    return connection.execute(delete(replies).where(mine.in_(old.limit(MAX_PRUNED)))).rowcount
