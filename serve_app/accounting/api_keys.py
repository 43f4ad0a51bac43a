"""Changes the permissions, limits, budgets and expiry of API keys. Each change gives the key the next version."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import func, insert, or_, select, update

from serve_app.accounting import budgets
from serve_app.accounting.audit_log import changed, value_of, write_audit
from serve_app.accounting.database import Transaction
from serve_app.accounting.registry import writes
from serve_app.accounting.schema import api_keys
from serve_app.accounting.snapshots import read_account, read_key
from serve_app.accounting.validation import check_fields, check_limit, check_name, check_time, is_text
from serve_app.contracts.addresses import network_in
from serve_app.contracts.books import KeySnapshot
from serve_app.contracts.commands import CreateKey, RevokeKey, RotateKey, UpdateKey
from serve_app.contracts.errors import Conflict, InvalidValue, KeyNotFound
from serve_app.contracts.key_format import new_id
from serve_app.contracts.limits import KEY_LIMITS
from serve_app.contracts.money import MAX_BALANCE

MAX_MODELS = 100
MAX_KEYS = 1000  # active, unexpired keys per account; keeps listing and summing them fast
MAX_TAGS = 10
LONGEST_TAG = 40
MAX_ADDRESSES = 50
TERMS = ("models", *KEY_LIMITS, "budget", "budget_period", "expires_at", "tags", "addresses")


@writes(CreateKey)
def create_key(transaction: Transaction, wanted: CreateKey, now: float) -> KeySnapshot:
    connection, account_id, digest = transaction.connection, wanted.account_id, wanted.digest
    check_name(wanted.name)
    check_name(wanted.hint, "a hint", longest=40)
    check_fields(wanted.terms, TERMS)
    check_digest(digest)
    read_account(connection, account_id)
    earlier = connection.execute(select(api_keys).where(api_keys.c.digest == digest)).first()
    if earlier is not None:
        if (earlier.account_id, earlier.name) != (account_id, wanted.name):
            raise Conflict("this API key already exists: create a new one")
        return read_key(connection, earlier.id, now)
    mine = (api_keys.c.account_id == account_id, api_keys.c.active)
    lasting = or_(api_keys.c.expires_at.is_(None), api_keys.c.expires_at > now)
    if connection.execute(select(func.count()).select_from(api_keys).where(*mine, lasting)).scalar_one() >= MAX_KEYS:
        raise Conflict(f"an account has at most {MAX_KEYS} active API keys: revoke unused keys")
    terms = {name: value for name, value in _checked(wanted.terms, now).items() if value is not None}
    _check_budget(terms.get("budget"), terms.get("budget_period"))
    key_id = new_id("key_")
    given = {"account_id": account_id, "name": wanted.name, "digest": digest, "hint": wanted.hint} | _stored(terms)
    initial = {"id": key_id, "active": True, "version": transaction.next_version(), "created_at": now}
    connection.execute(insert(api_keys).values(given | initial))
    budgets.count_anew(connection, account_id, key_id, terms.get("budget_period"), now)
    write_audit(transaction, wanted.audit, "create_key", account_id, {"name": wanted.name} | terms, now, key_id=key_id)
    return read_key(connection, key_id, now)


@writes(UpdateKey)
def update_key(transaction: Transaction, wanted: UpdateKey, now: float) -> KeySnapshot:
    connection, key_id = transaction.connection, wanted.key_id
    before = read_key(connection, key_id, now)
    check_fields(wanted.changes, ("name", *TERMS))
    # Unchanged values are not checked again, because an unchanged expiry may have passed meanwhile.
    new = {name: value for name, value in wanted.changes.items() if value != value_of(before, name)}
    values = _checked(new, now)
    if "budget" in values and values["budget"] is None:
        values.setdefault("budget_period", None)
    values = {name: value for name, value in values.items() if value_of(before, name) != value}
    if not values:
        return before  # nothing changes, so the version stays the same
    period = values.get("budget_period", before.budget_period)
    _check_budget(values.get("budget", before.budget), period)
    connection.execute(
        update(api_keys).where(api_keys.c.id == key_id).values(version=transaction.next_version(), **_stored(values))
    )
    if period != before.budget_period:
        budgets.count_anew(connection, before.account_id, key_id, period, now)
    after = read_key(connection, key_id, now)
    detail = changed(before, after, values)
    write_audit(transaction, wanted.audit, "update_key", after.account_id, detail, now, key_id=key_id)
    return after


@writes(RevokeKey)
def revoke_key(transaction: Transaction, wanted: RevokeKey, now: float) -> KeySnapshot:
    connection, key_id = transaction.connection, wanted.key_id
    before = read_key(connection, key_id, now)
    if not before.active:
        return before
    connection.execute(
        update(api_keys)
        .where(api_keys.c.id == key_id)
        .values(active=False, revoked_at=now, version=transaction.next_version())
    )
    after = read_key(connection, key_id, now)
    detail = changed(before, after, ("active",))
    write_audit(transaction, wanted.audit, "revoke_key", after.account_id, detail, now, key_id=key_id)
    return after


@writes(RotateKey)
def rotate_key(transaction: Transaction, wanted: RotateKey, now: float) -> KeySnapshot:
    connection = transaction.connection
    old = read_key(connection, wanted.key_id, now)
    if old.account_id != wanted.account_id:
        raise KeyNotFound(wanted.key_id)
    is_repetition = connection.execute(select(api_keys.c.id).where(api_keys.c.digest == wanted.digest)).first()
    if not (old.active or is_repetition):
        raise InvalidValue(f"{old.key_id} is revoked: create a new key")
    until = check_time(wanted.until)
    ends_at = until if old.expires_at is None else min(until, old.expires_at)
    create = CreateKey(old.account_id, old.name, wanted.digest, wanted.hint, old.terms, wanted.audit)
    made = create_key(transaction, create, now)
    if ends_at > now:
        update_key(transaction, UpdateKey(old.key_id, {"expires_at": ends_at}, wanted.audit), now)
    else:
        revoke_key(transaction, RevokeKey(old.key_id, wanted.audit), now)
    return made


def check_digest(digest: str) -> None:
    """Raises InvalidValue for anything but 64 hex digits."""
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise InvalidValue("a digest is 64 hex digits: pass what key_format.digest returns, never the key itself")


def _checked(given: Mapping[str, Any], now: float) -> dict[str, Any]:
    """Returns the values in canonical form. Raises InvalidValue."""
    values = dict(given)
    if "name" in values:
        check_name(values["name"])
    for name in KEY_LIMITS:
        check_limit(name, values.get(name))
    if values.get("models") is not None:
        values["models"] = _checked_models(values["models"])
    if values.get("tags") is not None:
        values["tags"] = _checked_tags(values["tags"])
    if values.get("addresses") is not None:
        values["addresses"] = _checked_addresses(values["addresses"])
    budget = values.get("budget")
    if budget is not None and (type(budget) is not int or not 0 < budget <= MAX_BALANCE):
        raise InvalidValue(f"budget {budget!r}: give nano-units from 1 to {MAX_BALANCE}, or None for no budget")
    if values.get("budget_period") not in (None, "day", "month"):
        raise InvalidValue(f"budget_period {values['budget_period']!r}: must be 'day' or 'month'")
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


def _checked_tags(tags: Sequence[str]) -> tuple[str, ...]:
    if isinstance(tags, str) or not 1 <= len(tags) <= MAX_TAGS:
        raise InvalidValue(f"tags {tags!r}: give 1 to {MAX_TAGS} tags, or None for no tags")
    for tag in tags:
        if not is_text(tag, LONGEST_TAG) or "," in tag or tag != tag.strip():
            raise InvalidValue(
                f"tags: {tag!r} must have 1 to {LONGEST_TAG} printable characters, no comma, and no space at its ends"
            )
    return tuple(dict.fromkeys(tags))


def _checked_addresses(addresses: Sequence[str]) -> tuple[str, ...]:
    """Returns the addresses as canonical texts, without duplicates."""
    if isinstance(addresses, str) or not 1 <= len(addresses) <= MAX_ADDRESSES:
        raise InvalidValue(f"addresses: give 1 to {MAX_ADDRESSES} addresses or networks, or None to allow all")
    try:
        return tuple(dict.fromkeys(str(network_in(address)) for address in addresses))
    except ValueError as error:
        raise InvalidValue(f"addresses: {error}") from None


def _check_budget(budget: int | None, period: str | None) -> None:
    if (budget is None) != (period is None):
        raise InvalidValue("a budget and its period go together: give both budget and budget_period, or neither")


def _stored(values: Mapping[str, Any]) -> dict[str, Any]:
    lists = {name: values[name] for name in ("models", "tags", "addresses") if values.get(name) is not None}
    return dict(values) | {name: json.dumps(texts, ensure_ascii=False) for name, texts in lists.items()}
