"""Settlement: turns a batch of finished requests into charges, usage rows and aggregates in one transaction.

A batch of any size takes about a dozen statements. The charges are computed in memory, from data read under the
writer's lock. Nothing here retries or waits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, bindparam, delete, insert, select, update

from serve_app.accounting import archive, budgets, grants, journal, replies, stored_responses
from serve_app.accounting.database import Transaction
from serve_app.accounting.dialects import Upsert
from serve_app.accounting.grants import Lot
from serve_app.accounting.journal import Entry, EntryKind
from serve_app.accounting.schema import (
    DAILY_GROUP,
    DAILY_SUMS,
    accounts,
    api_keys,
    limiter_holds,
    price_versions,
    usage,
    usage_daily,
)
from serve_app.contracts.books import Outcome, Refusal, RequestUsage, Settled, Settlement, SettlementRejected
from serve_app.contracts.money import MAX_CHARGE, Price
from serve_app.contracts.periods import BudgetPeriod, period_at

logger = logging.getLogger(__name__)

MAX_BATCH = 1000
MAX_TOKENS = 10**9  # maximum for each of a request's three token counts
_YEAR_10000 = 253402300800.0
_AS_SETTLED = tuple(column.name for column in fields(RequestUsage) if column.name not in ("price", "outcome"))


# Built once: SQLAlchemy takes longer to build a statement and find its compiled form than SQLite takes to run it.
_ADD_UP = Upsert(usage_daily, lambda new: {name: usage_daily.c[name] + new[name] for name in DAILY_SUMS})
_SET_FUNDS = (
    update(accounts)
    .where(accounts.c.id == bindparam("account"))
    .values(granted=bindparam("given"), topped_up=bindparam("paid"), version=bindparam("next"))
)
_FUNDS = select(accounts.c.id, accounts.c.granted, accounts.c.topped_up, accounts.c.version).where(
    accounts.c.id.in_(bindparam("ids", expanding=True))
)
_KEYS = select(api_keys.c.id, api_keys.c.account_id, api_keys.c.budget_period).where(
    api_keys.c.id.in_(bindparam("ids", expanding=True))
)
_EARLIER = select(usage).where(usage.c.request_id.in_(bindparam("ids", expanding=True)))
_PRICES = select(price_versions).where(price_versions.c.model.in_(bindparam("ids", expanding=True)))
_ADD_USAGE = insert(usage)
# Runs in the settlement's transaction, as `limiter_leases.py` requires.
_REMOVE_POSTED = delete(limiter_holds).where(limiter_holds.c.request_id.in_(bindparam("ids", expanding=True)))
_SET_KEY_VERSION = update(api_keys).where(api_keys.c.id == bindparam("key")).values(version=bindparam("next"))


@dataclass(slots=True)
class _Account:
    """An account while a batch is computed."""

    account_id: str
    granted: int
    topped_up: int
    version: int
    lots: list[Lot]  # grants in spending order
    touched: bool = False


@dataclass(slots=True)
class _Key:
    """An API key while a batch is computed."""

    account_id: str
    period: BudgetPeriod | None  # None: the key has no budget
    touched: bool = False


@dataclass(slots=True)
class _Batch:
    """Data in the database before the batch, and the data that the batch adds."""

    accounts: dict[str, _Account] = field(default_factory=dict)
    keys: dict[str, _Key] = field(default_factory=dict)
    recorded: dict[str, dict[str, Any]] = field(default_factory=dict)  # usage rows by request id, earlier and new
    prices: dict[tuple[str, Price], int] = field(default_factory=dict)
    spend: dict[tuple[str, str], int] = field(default_factory=dict)  # by key and period, for keys with a budget
    entries: list[Entry] = field(default_factory=list)
    usage: list[dict[str, Any]] = field(default_factory=list)
    daily: dict[tuple[str, ...], dict[str, Any]] = field(default_factory=dict)
    replies: list[dict[str, Any]] = field(default_factory=list)
    responses: list[dict[str, Any]] = field(default_factory=list)
    closed_before: float = 0.0  # Unix time: rows of requests that ended before it may be in an archive


def settle(
    transaction: Transaction, settlements: Sequence[Settlement], now: float
) -> list[Settled | SettlementRejected]:
    if len(settlements) > MAX_BATCH:
        raise ValueError(f"{len(settlements)} settlements at once: settle at most {MAX_BATCH} in a batch")
    refused: dict[int, SettlementRejected] = {}  # by index; likewise `valid`
    for index, settlement in enumerate(settlements):
        if reason := _why_invalid(settlement):
            refused[index] = SettlementRejected(str(settlement.request_id), Refusal.INVALID, reason)
    valid = {index: settlement for index, settlement in enumerate(settlements) if index not in refused}
    batch = _read(transaction.connection, list(valid.values()), now) if valid else _Batch()
    new: set[int] = set()  # indexes of the settlements that this batch records
    for index, settlement in valid.items():
        if rejected := _why_rejected(batch, settlement):
            refused[index] = rejected
        elif settlement.request_id not in batch.recorded:
            _add_price(transaction.connection, batch, settlement, now)
            _record(transaction, batch, settlement, now)
            _keep_reply(batch, settlement, now)
            new.add(index)
        elif _is_same(settlement, batch.recorded[settlement.request_id], batch.prices):
            _keep_reply(batch, settlement, now)  # the first settlement may have come from a process without the reply
        else:
            logger.warning("request %s was settled before with other values: the first apply", settlement.request_id)
    if batch.usage:
        _write_usage(transaction, batch)
    if recorded := [settlement.request_id for index, settlement in valid.items() if index not in refused]:
        transaction.connection.execute(_REMOVE_POSTED, {"ids": recorded})
    if batch.replies:
        replies.write_replies(transaction.connection, batch.replies)
    if batch.responses:
        stored_responses.write_responses(transaction.connection, batch.responses)
    for index, rejected in refused.items():
        logger.error("settlement %r refused: %s", settlements[index], rejected.message)
    return [
        refused[index] if index in refused else _settled(batch, settlement, now, duplicate=index not in new)
        for index, settlement in enumerate(settlements)
    ]


def _why_invalid(settlement: Settlement) -> str | None:
    """Returns why a settlement is invalid for any ledger, or None."""
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
    if settlement.cost > MAX_CHARGE:
        return f"a charge of {settlement.cost} nano-units: at most {MAX_CHARGE} for one request"
    return None


def _read(connection: Connection, settlements: Sequence[Settlement], now: float) -> _Batch:
    def matching(query: Any, ids: Iterable[str]) -> Any:
        return connection.execute(query, {"ids": list(dict.fromkeys(ids))}).all()

    batch = _Batch()
    funds = matching(_FUNDS, (settlement.account_id for settlement in settlements))
    with_grants = {row.id for row in funds if row.granted}
    lots = grants.read_lots(connection, with_grants) if with_grants else {}
    for row in funds:
        batch.accounts[row.id] = _Account(row.id, row.granted, row.topped_up, row.version, lots.get(row.id, []))
    for row in matching(_KEYS, (settlement.key_id for settlement in settlements)):
        batch.keys[row.id] = _Key(row.account_id, row.budget_period)
    if any(key.period for key in batch.keys.values()):
        _read_spend(connection, batch, settlements, now)
    for row in matching(_EARLIER, (settlement.request_id for settlement in settlements)):
        batch.recorded[row.request_id] = dict(row._mapping)
    for row in matching(_PRICES, (settlement.model for settlement in settlements)):
        batch.prices[row.model, Price(row.input, row.cached_input, row.output)] = row.id
    if min(settlement.finished_at for settlement in settlements) < now - archive.SETTLING_S / 2:
        batch.closed_before = archive.closed_before(connection)
    return batch


def _day(settlement: Settlement) -> str:
    return datetime.fromtimestamp(settlement.finished_at, UTC).date().isoformat()


def _read_spend(connection: Connection, batch: _Batch, settlements: Sequence[Settlement], now: float) -> None:
    """Reads the spending of keys with a budget, in the current period and in the periods of the settlements."""
    wanted: dict[tuple[str, str], str] = {}  # account by key and period
    for settlement in settlements:
        key = batch.keys.get(settlement.key_id)
        if key is not None and key.period is not None:
            wanted[settlement.key_id, period_at(key.period, now).name] = key.account_id
            wanted[settlement.key_id, budgets.period_name(key.period, _day(settlement))] = key.account_id
    batch.spend = budgets.read_spend(connection, wanted.keys())
    for (key_id, period), account_id in wanted.items():
        if (key_id, period) not in batch.spend:  # no sum is stored for this period yet
            batch.spend[key_id, period] = budgets.count_spend(connection, account_id, key_id, period)


def _why_rejected(batch: _Batch, settlement: Settlement) -> SettlementRejected | None:
    request_id, account_id = settlement.request_id, settlement.account_id
    if account_id not in batch.accounts:
        return SettlementRejected(request_id, Refusal.ACCOUNT_NOT_FOUND, f"no account {account_id!r}")
    key = batch.keys.get(settlement.key_id)
    if key is None or key.account_id != account_id:
        message = f"account {account_id!r} has no API key {settlement.key_id!r}"
        return SettlementRejected(request_id, Refusal.KEY_NOT_FOUND, message)
    recorded = batch.recorded.get(request_id)
    if recorded is not None and recorded["account_id"] != account_id:
        # Returning the first result would reveal one account's charge to another account.
        message = "this request id was settled for another account: request ids must be unique"
        return SettlementRejected(request_id, Refusal.REQUEST_OF_ANOTHER_ACCOUNT, message)
    if recorded is None and settlement.finished_at < batch.closed_before:
        message = "the requests of its month are archived: look in the archive whether it was settled"
        return SettlementRejected(request_id, Refusal.INVALID, message)
    return None


def _add_price(connection: Connection, batch: _Batch, settlement: Settlement, now: float) -> None:
    model, price = settlement.model, settlement.price
    if (model, price) in batch.prices:
        return
    added = insert(price_versions).values(
        model=model, input=price.input, cached_input=price.cached_input, output=price.output, created_at=now
    )
    batch.prices[model, price] = connection.execute(added.returning(price_versions.c.id)).scalar_one()


def _record(transaction: Transaction, batch: _Batch, settlement: Settlement, now: float) -> None:
    account = batch.accounts[settlement.account_id]
    has_granted = grants.payable(account.lots, settlement.started_at) if account.lots else 0
    spending = journal.split_cost(has_granted, account.topped_up, settlement.cost)
    if spending.granted:
        grants.spend(account.lots, spending.granted, settlement.started_at)
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
            "request %s (epoch %d) of account %s cost %d nano-units more than the balance held; posted to %s",
            settlement.request_id,
            settlement.epoch,
            settlement.account_id,
            spending.uncollected,
            journal.LOSS_UNCOLLECTED,
        )
    row: dict[str, Any] = {name: getattr(settlement, name) for name in _AS_SETTLED} | {
        "price_version": batch.prices[settlement.model, settlement.price],
        "day": _day(settlement),
        "charged": spending.charged,
        "uncollected": spending.uncollected,
        "outcome": settlement.outcome.value,
        "settled_at": now,
        "entry_id": entry_id,
    }
    batch.recorded[settlement.request_id] = row
    batch.usage.append(row)
    key = batch.keys[settlement.key_id]
    if key.period is not None:
        batch.spend[settlement.key_id, budgets.period_name(key.period, row["day"])] += spending.charged
        key.touched = True
    group = {name: row[name] for name in DAILY_GROUP}
    sums = batch.daily.setdefault(tuple(group.values()), group | dict.fromkeys(DAILY_SUMS, 0))
    for name in DAILY_SUMS:
        sums[name] += row.get(name, 1)


def _keep_reply(batch: _Batch, settlement: Settlement, now: float) -> None:
    """Adds the settlement's reply and its stored response to the batch, if it has them."""
    reasons = []
    if settlement.reply is not None:
        reasons.append(replies.why_not_kept(settlement.reply))
        if reasons[-1] is None:
            batch.replies.append(replies.reply_row(settlement, settlement.reply, now))
    if settlement.response is not None:
        reasons.append(stored_responses.why_not_kept(settlement.response))
        if reasons[-1] is None:
            batch.responses.append(stored_responses.response_row(settlement, settlement.response, now))
    for reason in filter(None, reasons):  # the usage is billed anyway
        logger.error("the reply to request %s is not stored: %s", settlement.request_id, reason)


def _write_usage(transaction: Transaction, batch: _Batch) -> None:
    connection = transaction.connection
    if batch.entries:
        journal.post(connection, batch.entries)
    connection.execute(_ADD_USAGE, batch.usage)
    _ADD_UP.run(connection, list(batch.daily.values()))
    touched = [account for account in batch.accounts.values() if account.touched]
    for account in touched:
        account.version = transaction.next_version()
    connection.execute(
        _SET_FUNDS,
        [
            {"account": each.account_id, "given": each.granted, "paid": each.topped_up, "next": each.version}
            for each in touched
        ],
    )
    remaining = {lot.grant_id: lot.left for account in touched for lot in account.lots if lot.touched}
    if remaining:
        grants.write_remaining(connection, remaining)
    with_budget = [key_id for key_id, key in batch.keys.items() if key.touched]
    if with_budget:
        spend = {(key_id, period): spent for (key_id, period), spent in batch.spend.items() if key_id in with_budget}
        budgets.write_spend(connection, spend)
        bumped = [{"key": key_id, "next": transaction.next_version()} for key_id in with_budget]
        connection.execute(_SET_KEY_VERSION, bumped)  # puts the key's new spending into the feed of changes


def _settled(batch: _Batch, settlement: Settlement, now: float, *, duplicate: bool) -> Settled:
    account = batch.accounts[settlement.account_id]
    kind = batch.keys[settlement.key_id].period
    period = None if kind is None else period_at(kind, now).name
    return Settled(
        request_id=settlement.request_id,
        charged=batch.recorded[settlement.request_id]["charged"],
        balance=account.granted + account.topped_up,
        version=account.version,
        duplicate=duplicate,
        key_spent=None if period is None else batch.spend[settlement.key_id, period],
        key_period=period,
        uncollected=batch.recorded[settlement.request_id]["uncollected"],
    )


def _is_same(settlement: Settlement, row: dict[str, Any], prices: dict[tuple[str, Price], int]) -> bool:
    """Returns whether a repeated settlement has the same content as the recorded one."""
    names = ("key_id", "model", "backend", "prompt_tokens", "cached_tokens", "completion_tokens")
    same_price = prices.get((settlement.model, settlement.price)) == row["price_version"]
    # A replica that settles for a gateway records the request as cancelled. The gateway may be alive and record it as
    # completed. The charge is the same.
    outcomes = {settlement.outcome.value, row["outcome"]}
    same_outcome = len(outcomes) == 1 or (
        outcomes == {Outcome.COMPLETED.value, Outcome.CANCELLED.value} and settlement.completion_tokens > 0
    )
    return same_price and same_outcome and all(getattr(settlement, name) == row[name] for name in names)
