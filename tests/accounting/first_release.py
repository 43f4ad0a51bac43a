"""A ledger as the first release wrote it (revision 0001): two accounts, grants, top-ups, charges, a loss."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from serve_app.accounting.database import Database
from serve_app.accounting.schema import metadata

from .books import COST, NOON

ADA, BOB = "customer:acct_ada", "customer:acct_bob"


def _usage(request_id: str, who: str, entry_id: int | None, charged: int, at: float, **changed: Any) -> dict[str, Any]:
    row = {
        "request_id": request_id,
        "account_id": f"acct_{who}",
        "key_id": f"key_{who}",
        "model": "svc-chat",
        "backend": "smollm2",
        "price_version": 1,
        "day": "2026-06-01",
        "prompt_tokens": 10,
        "cached_tokens": 2,
        "completion_tokens": 4,
        "charged": charged,
        "uncollected": 0,
        "outcome": "completed",
        "started_at": at - 1,
        "finished_at": at,
        "settled_at": at,
        "entry_id": entry_id,
    }
    return row | changed


def _daily(who: str, requests: int, charged: int, uncollected: int) -> dict[str, Any]:
    return {
        "account_id": f"acct_{who}",
        "day": "2026-06-01",
        "key_id": f"key_{who}",
        "model": "svc-chat",
        "requests": requests,
        "prompt_tokens": 10 * requests,
        "cached_tokens": 2 * requests,
        "completion_tokens": 4 * requests,
        "charged": charged,
        "uncollected": uncollected,
    }


def _entry(number: int, kind: str, who: str, memo: str = "", key: str | None = None) -> dict[str, Any]:
    return {
        "id": number,
        "kind": kind,
        "account_id": f"acct_{who}",
        "memo": memo,
        "created_at": NOON - 100 + number,
        "idempotency_key": key,
    }


def _postings(number: int, moved: dict[str, int]) -> list[dict[str, Any]]:
    return [
        {"entry_id": number, "line": line, "ledger_account": name, "amount": amount}
        for line, (name, amount) in enumerate(moved.items(), start=1)
    ]


def _account(who: str, **columns: Any) -> dict[str, Any]:
    same = {"id": f"acct_{who}", "name": who, "currency": "USD", "created_at": NOON - 200}
    return {**same, "tpm": None, "concurrency": None, "idempotency_key": None} | columns


def _key(who: str, **columns: Any) -> dict[str, Any]:
    digest = ("a" if who == "ada" else "b") * 64
    return {
        "id": f"key_{who}",
        "account_id": f"acct_{who}",
        "name": "main",
        "digest": digest,
        "hint": "sk-…",
        "created_at": NOON - 150,
    } | columns


ROWS: dict[str, list[dict[str, Any]]] = {
    "accounts": [
        _account("ada", active=True, granted=58, topped_up=995, version=8, rpm=7),
        _account("bob", active=False, granted=0, topped_up=0, version=9, rpm=None, created_at=NOON - 190),
    ],
    "api_keys": [
        _key("ada", active=True, version=3, revoked_at=None),
        _key("bob", active=False, version=7, revoked_at=NOON - 10),
    ],
    "price_versions": [
        {"id": 1, "model": "svc-chat", "input": 3, "cached_input": 1, "output": 5, "created_at": NOON - 90}
    ],
    "journal_entries": [
        _entry(1, "grant", "ada", "welcome"),
        _entry(2, "top_up", "ada", key="payment-1"),
        _entry(3, "grant", "ada"),
        _entry(4, "charge", "ada", "r1"),
        _entry(5, "charge", "ada", "r2"),
        _entry(6, "top_up", "bob"),
        _entry(7, "charge", "bob", "r3"),
        _entry(8, "charge", "bob", "r4"),
        _entry(9, "correction", "ada", "ticket 1"),
    ],
    "postings": [
        *_postings(1, {f"{ADA}:granted": 100, "funds:granted": -100}),
        *_postings(2, {f"{ADA}:topped_up": 1000, "funds:received": -1000}),
        *_postings(3, {f"{ADA}:granted": 50, "funds:granted": -50}),
        *_postings(4, {f"{ADA}:granted": -COST, "revenue:svc-chat": COST}),
        *_postings(5, {f"{ADA}:granted": -COST, "revenue:svc-chat": COST}),
        *_postings(6, {f"{BOB}:topped_up": 60, "funds:received": -60}),
        *_postings(7, {f"{BOB}:topped_up": -COST, "revenue:svc-chat": COST}),
        *_postings(8, {f"{BOB}:topped_up": COST - 60, "revenue:svc-chat": COST, "loss:uncollected": 60 - 2 * COST}),
        *_postings(9, {f"{ADA}:topped_up": -5, "corrections": 5}),
    ],
    "usage": [
        _usage("r1", "ada", 4, COST, NOON),
        _usage("r2", "ada", 5, COST, NOON + 0.25),
        _usage("r3", "bob", 7, COST, NOON + 1),
        _usage("r4", "bob", 8, 60 - COST, NOON + 2, uncollected=2 * COST - 60),
        _usage("r5", "ada", None, 0, NOON + 3, outcome="failed"),
    ],
    "usage_daily": [_daily("ada", 3, 2 * COST, 0), _daily("bob", 2, 60, 2 * COST - 60)],
}


def fill(database: Database) -> None:
    """Write ROWS into a database at revision 0001."""
    with database.engine.begin() as connection:
        for name, rows in ROWS.items():
            connection.execute(sa.insert(sa.table(name, *map(sa.column, rows[0]))), rows)
        connection.execute(sa.text("UPDATE ledger_head SET version = 9, entry = 9"))


def read(database: Database) -> dict[str, list[dict[str, Any]]]:
    """What ROWS has become: the same tables and columns, at any revision."""
    found = {}
    with database.engine.connect() as connection:
        for name, rows in ROWS.items():
            order = [sa.column(column.name) for column in metadata.tables[name].primary_key.columns]
            query = sa.select(*map(sa.column, rows[0])).select_from(sa.table(name)).order_by(*order)
            found[name] = [dict(row._mapping) for row in connection.execute(query)]
    return found
