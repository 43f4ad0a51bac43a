"""Keys that are moved to another key secret, and those that still have to be. See `contracts/key_secrets.py`."""

from __future__ import annotations

from sqlalchemy import ColumnElement, Connection, String, and_, func, literal, null, or_, select, union_all, update

from serve_app.accounting.api_keys import check_digest
from serve_app.accounting.console_tables import management_keys
from serve_app.accounting.database import Transaction
from serve_app.accounting.schema import accounts, api_keys, usage_daily
from serve_app.accounting.snapshots import has_digest
from serve_app.accounting.validation import check_page
from serve_app.contracts.errors import InvalidValue
from serve_app.contracts.key_format import MARK_DIGITS, Hashed
from serve_app.contracts.key_secrets import MAX_MOVES, KeyMove, ListUnmoved, MoveKeys, UnmovedKey, UnmovedKeys


def move_keys(transaction: Transaction, wanted: MoveKeys, _now: float) -> list[bool]:
    if len(wanted.moves) > MAX_MOVES:
        raise InvalidValue(f"{len(wanted.moves)} moves: give at most {MAX_MOVES} at once")
    for move in wanted.moves:
        _check(move.before)
        _check(move.after)
    return [_move(transaction, move) for move in wanted.moves]


def list_unmoved(connection: Connection, wanted: ListUnmoved, now: float) -> UnmovedKeys:
    _check_mark(wanted.mark)
    limit = check_page(wanted.limit)
    is_active = {
        "api": and_(api_keys.c.active, _lasts(api_keys.c.expires_at, now)),
        "management": and_(management_keys.c.revoked_at.is_(None), _lasts(management_keys.c.expires_at, now)),
    }
    last_day = (
        select(func.max(usage_daily.c.day))
        .where(usage_daily.c.account_id == api_keys.c.account_id, usage_daily.c.key_id == api_keys.c.id)
        .scalar_subquery()
    )
    moved = unmoved = 0
    pages = []
    for kind, table, last in (("api", api_keys, last_day), ("management", management_keys, null().cast(String))):
        columns = table.c
        is_moved = or_(
            func.coalesce(columns.digest_mark == wanted.mark, False),
            func.coalesce(columns.moved_mark == wanted.mark, False),
        )
        active = is_active[kind]
        counted = select(is_moved, func.count()).select_from(table).where(active).group_by(is_moved)
        for under, count in connection.execute(counted):
            moved, unmoved = (moved + count, unmoved) if under else (moved, unmoved + count)
        mark = func.coalesce(columns.moved_mark, columns.digest_mark)
        names = (literal(kind), columns.id, columns.account_id, accounts.c.name, columns.name, columns.hint)
        page = select(*(one.label(f"c{index}") for index, one in enumerate((*names, columns.created_at, mark, last))))
        page = page.join_from(table, accounts, accounts.c.id == columns.account_id)
        page = page.where(active, ~is_moved, columns.id > wanted.after).order_by(columns.id).limit(limit + 1)
        pages.append(select(page.subquery()))
    together = union_all(*pages).order_by("c1").limit(limit + 1)
    rows = [UnmovedKey(*row) for row in connection.execute(together)]
    return UnmovedKeys(moved, unmoved, tuple(rows[:limit]), rows[limit - 1].key_id if len(rows) > limit else None)


def _move(transaction: Transaction, move: KeyMove) -> bool:
    connection, before, after = transaction.connection, move.before, move.after
    for table in (api_keys, management_keys):
        columns = table.c
        either = has_digest(table, (before.digest, after.digest))
        rows = connection.execute(select(columns.id, columns.digest, columns.moved_digest).where(either)).all()
        if not rows:
            continue
        if any(after.digest in (row.digest, row.moved_digest) for row in rows):
            return True
        # A digest that is older than `before` is dropped: no process can have its secret any more.
        values = {
            "digest": before.digest,
            "digest_mark": before.mark,
            "moved_digest": after.digest,
            "moved_mark": after.mark,
        }
        version = {"version": transaction.next_version()} if table is api_keys else {}
        connection.execute(update(table).where(columns.id == rows[0].id).values(**values, **version))
        return True
    return False


def _lasts(expires_at: ColumnElement[float | None], now: float) -> ColumnElement[bool]:
    return or_(expires_at.is_(None), expires_at > now)


def _check(hashed: Hashed) -> None:
    check_digest(hashed.digest)
    _check_mark(hashed.mark)


def _check_mark(mark: str) -> None:
    if len(mark) != MARK_DIGITS or not set(mark) <= set("0123456789abcdef"):
        raise InvalidValue(f"a mark is {MARK_DIGITS} hex digits: pass what key_format.mark_of returns")
