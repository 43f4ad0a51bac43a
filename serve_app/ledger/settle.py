"""Settlement: a batch of finished requests becomes charges, usage rows and aggregates in one transaction.

A batch takes about a dozen statements, whatever its size. What is settled is decided by pure functions on what was
read under the writer's lock; nothing here retries or waits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, bindparam, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from serve_app.ledger import budgets, grants, journal, replies
from serve_app.ledger.database import Transaction
from serve_app.ledger.grants import Lot
from serve_app.ledger.journal import Entry, EntryKind
from serve_app.ledger.messages import BudgetPeriod, Outcome, Price, Refusal, Settled, Settlement, SettlementRejected
from serve_app.ledger.money import MAX_CHARGE
from serve_app.ledger.schema import accounts, api_keys, price_versions, usage, usage_daily

logger = logging.getLogger(__name__)

MAX_BATCH = 1000
MAX_TOKENS = 10**9  # of one request and kind
_YEAR_10000 = 253402300800.0
_COUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "charged", "uncollected")

Result = Settled | SettlementRejected


def _adding_up(added: Any) -> Any:
    return added.on_conflict_do_update(
        index_elements=list(usage_daily.primary_key.columns),
        set_={name: usage_daily.c[name] + added.excluded[name] for name in _COUNTS},
    )


_ADD_UP = {
    "sqlite": _adding_up(sqlite.insert(usage_daily)),
    "postgresql": _adding_up(postgresql.insert(usage_daily)),
}
_SET_FUNDS = (
    update(accounts)
    .where(accounts.c.id == bindparam("account"))
    .values(granted=bindparam("has_granted"), topped_up=bindparam("has_topped_up"), version=bindparam("next"))
)
# Built once: to build a statement and find its compiled form takes SQLAlchemy longer than SQLite takes to run it.
_FUNDS = select(accounts.c.id, accounts.c.granted, accounts.c.topped_up, accounts.c.version).where(
    accounts.c.id.in_(bindparam("ids", expanding=True))
)
_KEYS = select(api_keys.c.id, api_keys.c.account_id, api_keys.c.budget_period).where(
    api_keys.c.id.in_(bindparam("ids", expanding=True))
)
_EARLIER = select(usage).where(usage.c.request_id.in_(bindparam("ids", expanding=True)))
_PRICES = select(price_versions).where(price_versions.c.model.in_(bindparam("models", expanding=True)))
_ADD_USAGE = insert(usage)
_SET_KEY_VERSION = update(api_keys).where(api_keys.c.id == bindparam("key")).values(version=bindparam("next"))


@dataclass(slots=True)
class _Account:
    """An account while a batch is worked out."""

    account_id: str
    granted: int
    topped_up: int
    version: int
    lots: list[Lot]  # of the grants, in the order in which they are spent
    touched: bool = False


@dataclass(slots=True)
class _Key:
    """An API key while a batch is worked out."""

    account_id: str
    period: BudgetPeriod | None  # of its budget
    touched: bool = False


@dataclass(slots=True)
class _Batch:
    """What the database knew before the batch, and what the batch adds to it."""

    accounts: dict[str, _Account]
    keys: dict[str, _Key]
    recorded: dict[str, dict[str, Any]]  # usage rows by request id: the earlier ones, and those of this batch
    prices: dict[tuple[str, Price], int]
    spend: dict[tuple[str, str], int]  # by key and period, of keys with a budget
    entries: list[Entry] = field(default_factory=list)
    usage: list[dict[str, Any]] = field(default_factory=list)
    daily: dict[tuple[str, str, str, str], dict[str, Any]] = field(default_factory=dict)
    replies: list[dict[str, Any]] = field(default_factory=list)


def cost(settlement: Settlement) -> int:
    """Nano-units that a request costs: nothing if it failed, or was cancelled before it produced anything."""
    if settlement.outcome is Outcome.FAILED:
        return 0
    if settlement.outcome is Outcome.CANCELLED and settlement.completion_tokens == 0:
        return 0
    return settlement.price.charge(settlement.prompt_tokens, settlement.cached_tokens, settlement.completion_tokens)


def settle(transaction: Transaction, settlements: Sequence[Settlement], *, now: float) -> list[Result]:
    """See `Ledger.settle`."""
    if len(settlements) > MAX_BATCH:
        raise ValueError(f"{len(settlements)} settlements at once: settle at most {MAX_BATCH} in a batch")
    invalid = {index: reason for index, one in enumerate(settlements) if (reason := why_invalid(one))}
    valid = [one for index, one in enumerate(settlements) if index not in invalid]
    batch = _read(transaction.connection, valid, now)
    refused: dict[int, SettlementRejected] = {
        index: SettlementRejected(str(settlements[index].request_id), Refusal.INVALID, reason)
        for index, reason in invalid.items()
    }
    first: set[int] = set()  # the settlements that this batch records
    for index, settlement in enumerate(settlements):
        if index in refused:
            continue
        rejected = _why_rejected(batch, settlement)
        if rejected is not None:
            refused[index] = rejected
        elif settlement.request_id not in batch.recorded:
            _add_price(transaction.connection, batch, settlement, now)
            _record(transaction, batch, settlement, now)
            _keep_reply(batch, settlement, now)
            first.add(index)
        elif _is_same(settlement, batch.recorded[settlement.request_id], batch.prices):
            _keep_reply(batch, settlement, now)  # the one before may have come from who had no reply to keep
        else:
            logger.warning("request %s was settled before with other content; the first stands", settlement.request_id)
    _write(transaction, batch)
    for index, rejected in refused.items():
        logger.error("settlement %r refused: %s", settlements[index], rejected.message)
    return [
        refused[index] if index in refused else _settled(batch, settlement, now, duplicate=index not in first)
        for index, settlement in enumerate(settlements)
    ]


def why_invalid(settlement: Settlement) -> str | None:
    """What makes a settlement impossible whatever the ledger holds, or None."""
    for name in ("request_id", "account_id", "key_id", "model", "backend"):
        text = getattr(settlement, name)
        if not isinstance(text, str) or not 1 <= len(text) <= 200 or not text.isprintable():
            return f"{name} {text!r}: expected 1 to 200 printable characters"
    for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
        count = getattr(settlement, name)
        if type(count) is not int or not 0 <= count <= MAX_TOKENS:
            return f"{name} {count!r}: expected a whole number from 0 to {MAX_TOKENS}"
    if settlement.cached_tokens > settlement.prompt_tokens:
        return f"{settlement.cached_tokens} cached tokens in a prompt of {settlement.prompt_tokens}"
    if not isinstance(settlement.outcome, Outcome):
        return f"outcome {settlement.outcome!r}: expected an Outcome"
    for name in ("input", "cached_input", "output"):
        price = getattr(settlement.price, name, None)
        if type(price) is not int or not 0 <= price <= MAX_CHARGE:
            return f"{name} price {price!r}: expected nano-units per token from 0 to {MAX_CHARGE}"
    for name in ("started_at", "finished_at"):
        time = getattr(settlement, name)
        if not isinstance(time, int | float) or not 0 <= time < _YEAR_10000:  # NaN compares false
            return f"{name} {time!r}: expected Unix seconds"
    if cost(settlement) > MAX_CHARGE:
        return f"a charge of {cost(settlement)} nano-units: at most {MAX_CHARGE} for one request"
    return None


def _read(connection: Connection, settlements: Sequence[Settlement], now: float) -> _Batch:
    batch = _Batch({}, {}, {}, {}, {})
    if not settlements:
        return batch
    rows = connection.execute(_FUNDS, {"ids": _distinct(one.account_id for one in settlements)}).all()
    lots = grants.read_lots(connection, {row.id for row in rows if row.granted})
    for row in rows:
        batch.accounts[row.id] = _Account(row.id, row.granted, row.topped_up, row.version, lots.get(row.id, []))
    for key in connection.execute(_KEYS, {"ids": _distinct(one.key_id for one in settlements)}):
        batch.keys[key.id] = _Key(key.account_id, key.budget_period)
    _read_spend(connection, batch, settlements, now)
    for row in connection.execute(_EARLIER, {"ids": _distinct(one.request_id for one in settlements)}):
        batch.recorded[row.request_id] = dict(row._mapping)
    for price in connection.execute(_PRICES, {"models": _distinct(one.model for one in settlements)}):
        batch.prices[price.model, Price(price.input, price.cached_input, price.output)] = price.id
    return batch


def _distinct(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def _read_spend(connection: Connection, batch: _Batch, settlements: Sequence[Settlement], now: float) -> None:
    """What the keys with a budget have spent: in the running period, and in those that the settlements belong to."""
    wanted: dict[tuple[str, str], str] = {}
    for settlement in settlements:
        key = batch.keys.get(settlement.key_id)
        if key is not None and key.period is not None:
            for at in (now, settlement.finished_at):
                wanted[settlement.key_id, budgets.period_at(key.period, at)] = key.account_id
    batch.spend = budgets.read_spend(connection, wanted.keys())
    for (key_id, period), account_id in wanted.items():
        if (key_id, period) not in batch.spend:  # the first in this period
            batch.spend[key_id, period] = budgets.count_spend(connection, account_id, key_id, period)


def _why_rejected(batch: _Batch, settlement: Settlement) -> SettlementRejected | None:
    if settlement.account_id not in batch.accounts:
        return SettlementRejected(
            settlement.request_id, Refusal.ACCOUNT_NOT_FOUND, f"no account {settlement.account_id!r}"
        )
    key = batch.keys.get(settlement.key_id)
    if key is None or key.account_id != settlement.account_id:
        message = f"account {settlement.account_id!r} has no API key {settlement.key_id!r}"
        return SettlementRejected(settlement.request_id, Refusal.KEY_NOT_FOUND, message)
    recorded = batch.recorded.get(settlement.request_id)
    if recorded is not None and recorded["account_id"] != settlement.account_id:
        # To answer the first result would tell one account's charge, or balance, to another.
        message = "this request id was settled for another account: request ids must be unique"
        return SettlementRejected(settlement.request_id, Refusal.REQUEST_OF_ANOTHER_ACCOUNT, message)
    return None


def _add_price(connection: Connection, batch: _Batch, settlement: Settlement, now: float) -> None:
    if (settlement.model, settlement.price) in batch.prices:
        return
    price = settlement.price
    added = insert(price_versions).values(
        model=settlement.model,
        input=price.input,
        cached_input=price.cached_input,
        output=price.output,
        created_at=now,
    )
    version = connection.execute(added.returning(price_versions.c.id)).scalar_one()
    batch.prices[settlement.model, price] = version


def _record(transaction: Transaction, batch: _Batch, settlement: Settlement, now: float) -> None:
    account = batch.accounts[settlement.account_id]
    has_granted = grants.spendable(account.lots, settlement.started_at)
    spending = journal.spend(has_granted, account.topped_up, cost(settlement))
    grants.take(account.lots, spending.granted, settlement.started_at)
    account.granted -= spending.granted
    account.topped_up -= spending.topped_up
    account.touched = True
    entry_id = None
    if spending.charged or spending.uncollected:
        entry_id = transaction.next_entry()
        moved = journal.charge_postings(settlement.account_id, settlement.model, spending)
        batch.entries.append(
            Entry(entry_id, EntryKind.CHARGE, settlement.account_id, now, moved, memo=settlement.request_id)
        )
    if spending.uncollected:
        logger.error(
            "request %s of account %s cost %d nano-units more than the balance held; posted to %s",
            settlement.request_id,
            settlement.account_id,
            spending.uncollected,
            journal.LOSS_UNCOLLECTED,
        )
    day = datetime.fromtimestamp(settlement.finished_at, UTC).date().isoformat()
    row: dict[str, Any] = {
        "request_id": settlement.request_id,
        "account_id": settlement.account_id,
        "key_id": settlement.key_id,
        "model": settlement.model,
        "backend": settlement.backend,
        "price_version": batch.prices[settlement.model, settlement.price],
        "day": day,
        "prompt_tokens": settlement.prompt_tokens,
        "cached_tokens": settlement.cached_tokens,
        "completion_tokens": settlement.completion_tokens,
        "charged": spending.charged,
        "uncollected": spending.uncollected,
        "outcome": settlement.outcome.value,
        "started_at": settlement.started_at,
        "finished_at": settlement.finished_at,
        "settled_at": now,
        "entry_id": entry_id,
    }
    batch.recorded[settlement.request_id] = row
    batch.usage.append(row)
    key = batch.keys[settlement.key_id]
    if key.period is not None:
        batch.spend[settlement.key_id, budgets.period_of(key.period, day)] += spending.charged
        key.touched = True
    group = (settlement.account_id, day, settlement.key_id, settlement.model)
    sums = batch.daily.setdefault(
        group, dict(zip(("account_id", "day", "key_id", "model"), group, strict=True)) | dict.fromkeys(_COUNTS, 0)
    )
    for name in _COUNTS:
        sums[name] += row.get(name, 1)


def _keep_reply(batch: _Batch, settlement: Settlement, now: float) -> None:
    reply = settlement.reply
    if reply is None:
        return
    reason = replies.why_not_kept(reply)
    if reason is not None:  # the usage counts all the same
        logger.error("the reply to request %s is not kept: %s", settlement.request_id, reason)
        return
    batch.replies.append(
        {
            "account_id": settlement.account_id,
            "idempotency_key": reply.idempotency_key,
            "request_id": settlement.request_id,
            "fingerprint": reply.fingerprint,
            "body": reply.body,
            "created_at": now,
        }
    )


def _write(transaction: Transaction, batch: _Batch) -> None:
    connection = transaction.connection
    if batch.usage:
        _write_usage(transaction, batch)
    replies.write_replies(connection, batch.replies)


def _write_usage(transaction: Transaction, batch: _Batch) -> None:
    connection = transaction.connection
    journal.write(connection, batch.entries)
    connection.execute(_ADD_USAGE, batch.usage)
    connection.execute(_ADD_UP[connection.dialect.name], list(batch.daily.values()))
    touched = [account for account in batch.accounts.values() if account.touched]
    for account in touched:
        account.version = transaction.next_version()
    connection.execute(
        _SET_FUNDS,
        [
            {
                "account": account.account_id,
                "has_granted": account.granted,
                "has_topped_up": account.topped_up,
                "next": account.version,
            }
            for account in touched
        ],
    )
    grants.write_lots(connection, (lot for account in touched for lot in account.lots))
    with_budget = [key_id for key_id, key in batch.keys.items() if key.touched]
    if with_budget:
        budgets.write_spend(connection, {one: spent for one, spent in batch.spend.items() if one[0] in with_budget})
        bumped = [{"key": key_id, "next": transaction.next_version()} for key_id in with_budget]
        connection.execute(_SET_KEY_VERSION, bumped)  # the feed carries what the key has spent


def _settled(batch: _Batch, settlement: Settlement, now: float, *, duplicate: bool) -> Settled:
    account = batch.accounts[settlement.account_id]
    kind = batch.keys[settlement.key_id].period
    period = None if kind is None else budgets.period_at(kind, now)
    return Settled(
        request_id=settlement.request_id,
        charged=batch.recorded[settlement.request_id]["charged"],
        balance=account.granted + account.topped_up,
        version=account.version,
        duplicate=duplicate,
        key_spent=None if period is None else batch.spend[settlement.key_id, period],
        key_period=period,
    )


def _is_same(settlement: Settlement, row: dict[str, Any], prices: dict[tuple[str, Price], int]) -> bool:
    """Whether a repetition says what was recorded."""
    names = ("key_id", "model", "backend", "prompt_tokens", "cached_tokens", "completion_tokens", "outcome")
    same_price = prices.get((settlement.model, settlement.price)) == row["price_version"]
    return same_price and all(getattr(settlement, name) == row[name] for name in names)
