"""Changes of API keys: what they may use, their limits and budgets, their end. Each takes the next version."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import insert, select, update

from serve_app.ledger import budgets
from serve_app.ledger.accounts import UNSET, check_limit, check_name, check_time
from serve_app.ledger.audit_log import changed, write_audit
from serve_app.ledger.database import Transaction
from serve_app.ledger.errors import Conflict, InvalidValue
from serve_app.ledger.keys import new_id
from serve_app.ledger.messages import Audit, KeySnapshot
from serve_app.ledger.money import MAX_BALANCE
from serve_app.ledger.schema import api_keys
from serve_app.ledger.snapshots import get_account, get_key

MAX_MODELS = 100
LIMITS = ("models", "rpm", "tpm", "concurrency", "budget", "budget_period", "expires_at")


def create_key(
    transaction: Transaction,
    account_id: str,
    name: str,
    digest: str,
    hint: str,
    limits: Mapping[str, Any],
    *,
    audit: Audit | None,
    now: float,
) -> KeySnapshot:
    """See `Ledger.create_key`; `limits` holds its optional arguments."""
    connection = transaction.connection
    check_name(name)
    check_name(hint, "a hint", longest=40)
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise InvalidValue("a digest is 64 hex digits: pass what keys.digest(key, secret) gives, never the key itself")
    get_account(connection, account_id)
    row = connection.execute(select(api_keys).where(api_keys.c.digest == digest)).one_or_none()
    if row is not None:
        if (row.account_id, row.name) != (account_id, name):
            raise Conflict("this API key exists already: make a new one")
        return get_key(connection, row.id, now=now)
    values = _checked(limits, now)
    _check_budget(values["budget"], values["budget_period"])
    key_id = new_id("key_")
    connection.execute(
        insert(api_keys).values(
            id=key_id,
            account_id=account_id,
            name=name,
            digest=digest,
            hint=hint,
            active=True,
            version=transaction.next_version(),
            created_at=now,
            **_stored(values),
        )
    )
    budgets.restart(connection, account_id, key_id, values["budget_period"], now)
    detail = {"name": name} | {field: value for field, value in values.items() if value is not None}
    write_audit(transaction, audit, "create_key", subject=key_id, account_id=account_id, detail=detail, now=now)
    return get_key(connection, key_id, now=now)


def update_key(
    transaction: Transaction, key_id: str, given: Mapping[str, Any], *, audit: Audit | None, now: float
) -> KeySnapshot:
    """See `Ledger.update_key`; what is UNSET in `given` stays."""
    connection = transaction.connection
    before = get_key(connection, key_id, now=now)
    # What stays is not checked again: an expiry may have passed meanwhile.
    new = {name: value for name, value in given.items() if value is not UNSET and value != getattr(before, name)}
    wanted = _checked(new, now)
    if "budget" in wanted and wanted["budget"] is None:
        wanted.setdefault("budget_period", None)
    wanted = {name: value for name, value in wanted.items() if getattr(before, name) != value}
    if not wanted:
        return before  # no change, no version
    period = wanted.get("budget_period", before.budget_period)
    _check_budget(wanted.get("budget", before.budget), period)
    connection.execute(
        update(api_keys).where(api_keys.c.id == key_id).values(version=transaction.next_version(), **_stored(wanted))
    )
    if period != before.budget_period:
        budgets.restart(connection, before.account_id, key_id, period, now)
    after = get_key(connection, key_id, now=now)
    detail = changed(before, after, tuple(wanted))
    write_audit(transaction, audit, "update_key", subject=key_id, account_id=after.account_id, detail=detail, now=now)
    return after


def revoke_key(transaction: Transaction, key_id: str, *, audit: Audit | None, now: float) -> KeySnapshot:
    """See `Ledger.revoke_key`."""
    connection = transaction.connection
    before = get_key(connection, key_id, now=now)
    if not before.active:
        return before
    connection.execute(
        update(api_keys)
        .where(api_keys.c.id == key_id)
        .values(active=False, revoked_at=now, version=transaction.next_version())
    )
    after = get_key(connection, key_id, now=now)
    detail = changed(before, after, ("active",))
    write_audit(transaction, audit, "revoke_key", subject=key_id, account_id=after.account_id, detail=detail, now=now)
    return after


def _checked(given: Mapping[str, Any], now: float) -> dict[str, Any]:
    """The values in their kept form. Raises InvalidValue for one that cannot be."""
    values = dict(given)
    if "name" in values:
        check_name(values["name"])
    for name in ("rpm", "tpm", "concurrency"):
        if name in values:
            check_limit(name, values[name])
    if values.get("models") is not None:
        values["models"] = _checked_models(values["models"])
    budget = values.get("budget")
    if budget is not None and (type(budget) is not int or not 0 < budget <= MAX_BALANCE):
        raise InvalidValue(f"budget {budget!r}: give nano-units from 1 to {MAX_BALANCE}, or None for none")
    if values.get("budget_period") not in (None, "day", "month"):
        raise InvalidValue(f"budget_period {values['budget_period']!r}: a budget is for a 'day' or a 'month'")
    if values.get("expires_at") is not None:
        values["expires_at"] = check_time(values["expires_at"])
        if values["expires_at"] <= now:
            raise InvalidValue(f"expires_at {values['expires_at']!r} is past: revoke the key to end it now")
    return values


def _checked_models(models: Sequence[str]) -> tuple[str, ...]:
    if isinstance(models, str) or not 1 <= len(models) <= MAX_MODELS:
        raise InvalidValue(f"models {models!r}: give 1 to {MAX_MODELS} identifiers, or None to allow all")
    for model in models:
        check_name(model, "a model")
    return tuple(dict.fromkeys(models))


def _check_budget(budget: int | None, period: str | None) -> None:
    if (budget is None) != (period is None):
        raise InvalidValue("a budget and its period go together: give both budget and budget_period, or neither")


def _stored(values: Mapping[str, Any]) -> dict[str, Any]:
    stored = dict(values)
    if stored.get("models") is not None:
        stored["models"] = json.dumps(stored["models"], ensure_ascii=False)
    return stored
