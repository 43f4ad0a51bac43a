"""Settlements that the ledger could not settle. They are kept until a retry by an operator succeeds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, bindparam, delete, func, select

from serve_app.accounting.audit_log import write_audit
from serve_app.accounting.database import Transaction
from serve_app.accounting.dialects import Upsert
from serve_app.accounting.registry import reads
from serve_app.accounting.schema import stuck_settlements, usage
from serve_app.accounting.validation import check_page, equals
from serve_app.contracts.books import Audit, Refusal, Settlement, SettlementRejected, StuckSettlement
from serve_app.contracts.commands import FindUnsettled, ListStuck
from serve_app.storage.settlement_lines import decode, encode

MAX_ASKED = 1000

_KEEP = Upsert(
    stuck_settlements,
    lambda new: {
        "refusal": new.refusal,
        "reason": new.reason,
        "last_at": new.last_at,
        "tries": stuck_settlements.c.tries + 1,
    },
)
_RECORDED = select(usage.c.request_id).where(usage.c.request_id.in_(bindparam("ids", expanding=True)))
_STUCK = select(stuck_settlements.c.stuck_id).where(stuck_settlements.c.stuck_id.in_(bindparam("ids", expanding=True)))


def keep(connection: Connection, refused: Sequence[tuple[Settlement, SettlementRejected]], now: float) -> None:
    """Stores settlements with the reason why each is stuck. A settlement that is already stored gets the new reason.

    Raises TypeError or ValueError for values that cannot be written as a settlement.
    """
    rows = [
        {
            "stuck_id": _shown(settlement.request_id, 200),
            "account_id": _shown(settlement.account_id, 200),
            "settlement": encode(replace(settlement, reply=None, response=None)).decode(),
            "refusal": rejected.refusal.value,
            "reason": _shown(rejected.message, 500),
            "first_at": now,
            "last_at": now,
            "tries": 1,
        }
        for settlement, rejected in refused
    ]
    _KEEP.run(connection, rows)


def read(connection: Connection, stuck_id: str) -> Settlement | None:
    """Returns a stuck settlement, or None if it does not exist or this release cannot read it."""
    query = select(stuck_settlements.c.settlement).where(equals(stuck_settlements.c.stuck_id, stuck_id))
    found = connection.execute(query).scalar_one_or_none()
    return None if found is None else decode(found.encode())


def remove(transaction: Transaction, stuck_id: str, settlement: Settlement, audit: Audit | None, now: float) -> None:
    """Removes a stuck settlement that is now settled."""
    gone = transaction.connection.execute(delete(stuck_settlements).where(stuck_settlements.c.stuck_id == stuck_id))
    if gone.rowcount:
        detail = {"request_id": settlement.request_id}
        write_audit(transaction, audit, "retry_stuck", settlement.account_id, detail, now)


@reads(ListStuck)
def list_stuck(connection: Connection, wanted: ListStuck, _now: float) -> list[StuckSettlement]:
    query = select(stuck_settlements).order_by(stuck_settlements.c.stuck_id).limit(check_page(wanted.limit))
    if wanted.after is not None:
        query = query.where(stuck_settlements.c.stuck_id > wanted.after)
    return [_record(row) for row in connection.execute(query)]


def find_stuck(connection: Connection, stuck_ids: Sequence[str]) -> list[StuckSettlement]:
    query = select(stuck_settlements).where(stuck_settlements.c.stuck_id.in_(stuck_ids))
    return [_record(row) for row in connection.execute(query.order_by(stuck_settlements.c.stuck_id))]


def count_stuck(connection: Connection) -> int:
    return connection.execute(select(func.count()).select_from(stuck_settlements)).scalar_one()


@reads(FindUnsettled)
def find_unsettled(connection: Connection, wanted: FindUnsettled, _now: float) -> list[str]:
    ids = list(dict.fromkeys(wanted.request_ids))[:MAX_ASKED]
    known = {row.request_id for row in connection.execute(_RECORDED, {"ids": ids})}
    if missing := [one for one in ids if one not in known]:
        known |= {row.stuck_id for row in connection.execute(_STUCK, {"ids": missing})}
    return [one for one in ids if one not in known]


def _record(row: Any) -> StuckSettlement:
    return StuckSettlement(
        stuck_id=row.stuck_id,
        account_id=row.account_id,
        settlement=json.loads(row.settlement),
        refusal=Refusal(row.refusal),
        reason=row.reason,
        first_at=row.first_at,
        last_at=row.last_at,
        tries=row.tries,
    )


def _shown(text: Any, most: int) -> str:
    """Returns a text that every database accepts. Unprintable text is escaped."""
    given = str(text)
    return (given if given.isprintable() else json.dumps(given))[:most]
