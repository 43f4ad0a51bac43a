"""Traffic: how an identifier's requests are divided among backends. A change may name the version that it replaces.

Rows are never changed or removed. A roll-out is a series of rows that raise the shares of the same backends. They
all have the same `before`: the version of the last row before the series. One rollback therefore undoes the whole
roll-out. A rollback is a new row with the `before` of the row that it restores.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from sqlalchemy import Connection, insert, select

from serve_app.accounting.audit_log import write_audit
from serve_app.accounting.database import Transaction
from serve_app.accounting.registry import reads, writes
from serve_app.accounting.schema import served_models, served_traffic
from serve_app.accounting.served import read_traffic, traffic_of
from serve_app.accounting.served_backends import check_not_retired
from serve_app.accounting.validation import check_name, check_page, equals
from serve_app.contracts.books import Audit
from serve_app.contracts.errors import Conflict, InvalidValue, ModelNotFound
from serve_app.contracts.served import Traffic, raised
from serve_app.contracts.served_commands import ListTraffic, RollBackTraffic, SetTraffic

MAX_BACKENDS: Final = 100
MAX_WEIGHT: Final = 1_000_000
CONFIGURED: Final = "config.yaml"  # actor of the weights that applied before the first row
_MAX_REASON: Final = 500  # characters


@writes(SetTraffic)
def set_traffic(transaction: Transaction, wanted: SetTraffic, now: float) -> Traffic:
    connection, identifier = transaction.connection, wanted.identifier
    check_name(identifier, "an identifier")
    check_reason(wanted.reason)
    weights, configured = check_weights(wanted.weights), check_weights(wanted.configured or {})
    last = last_row(connection, identifier)
    current = last if last is not None and last.weights else None
    is_created = _is_created(connection, identifier)
    if current is None and wanted.configured is None and not is_created:
        raise ModelNotFound(identifier)
    if not weights and is_created:
        raise InvalidValue(f"weights of {identifier}: at least one backend needs a weight above 0")
    if last is not None and last.weights == weights:
        return last  # nothing changes, so the version stays the same; the command may be a repetition
    if wanted.expected is not None and wanted.expected != (current.version if current else 0):
        raise _changed_meanwhile(identifier, current, wanted.expected)
    check_not_retired(connection, weights)
    if current is None and configured and weights:
        current = Traffic(identifier, transaction.next_version(), configured, now, CONFIGURED, "as configured")
        _insert(connection, current)
        if weights == configured:
            _record(transaction, wanted.audit, "set_traffic", {}, current, now)
            return current
    elif current is None and not weights:
        raise InvalidValue(f"weights of {identifier}: the weights in config.yaml already apply")
    row = Traffic(identifier, transaction.next_version(), weights, now, actor_of(wanted.audit), wanted.reason)
    row = replace(row, before=_before(connection, weights, current))
    _insert(connection, row)
    _record(transaction, wanted.audit, "set_traffic", current.weights if current else {}, row, now)
    return row


@writes(RollBackTraffic)
def roll_back_traffic(transaction: Transaction, wanted: RollBackTraffic, now: float) -> Traffic:
    connection, identifier = transaction.connection, wanted.identifier
    check_name(identifier, "an identifier")
    check_reason(wanted.reason)
    current = last_row(connection, identifier)
    if current is None:
        raise ModelNotFound(identifier)
    if current.version != wanted.expected:
        if current.undoes == wanted.expected:
            return current  # another process was first, or the command is a repetition
        raise _changed_meanwhile(identifier, current if current.weights else None, wanted.expected)
    if not current.weights or current.before is None:
        raise Conflict(f"{identifier} has no earlier weights to restore: set its weights instead")
    [restored] = read_traffic(connection, [current.before])
    check_not_retired(connection, restored.weights)
    row = Traffic(
        identifier, transaction.next_version(), restored.weights, now, actor_of(wanted.audit), wanted.reason,
        before=restored.before, undoes=current.version,
    )  # fmt: skip
    _insert(connection, row)
    _record(transaction, wanted.audit, "roll_back_traffic", current.weights, row, now)
    return row


@reads(ListTraffic)
def list_traffic(connection: Connection, wanted: ListTraffic, _now: float) -> list[Traffic]:
    query = _rows_of(wanted.identifier).limit(check_page(wanted.limit))
    if wanted.before is not None:
        query = query.where(served_traffic.c.version < wanted.before)
    return [traffic_of(row) for row in connection.execute(query)]


def start_traffic(
    transaction: Transaction, identifier: str, weights: Mapping[str, int], actor: str, now: float
) -> None:
    """Inserts the first row of a new identifier. A rollback cannot go back further than this row."""
    row = Traffic(identifier, transaction.next_version(), weights, now, actor, "created")
    _insert(transaction.connection, row)


def end_traffic(transaction: Transaction, identifier: str, actor: str, now: float) -> None:
    """Inserts the last row of an identifier that is removed."""
    _insert(transaction.connection, Traffic(identifier, transaction.next_version(), {}, now, actor, "removed"))


def last_row(connection: Connection, identifier: str) -> Traffic | None:
    """Returns the last row. If its weights are empty, those of `config.yaml` apply, or the identifier was removed."""
    row = connection.execute(_rows_of(identifier).limit(1)).one_or_none()
    return None if row is None else traffic_of(row)


def actor_of(audit: Audit | None) -> str:
    return "service" if audit is None else audit.actor


def check_weights(given: Mapping[str, int]) -> dict[str, int]:
    """Returns the weights above 0. Raises InvalidValue."""
    if len(given) > MAX_BACKENDS:
        raise InvalidValue(f"an identifier has at most {MAX_BACKENDS} backends")
    for name, weight in given.items():
        check_name(name, "a backend")
        if type(weight) is not int or not 0 <= weight <= MAX_WEIGHT:
            raise InvalidValue(f"weight {weight!r} of {name}: must be a whole number from 0 to {MAX_WEIGHT:,}")
    weights = {name: weight for name, weight in given.items() if weight}
    if given and not weights:
        raise InvalidValue("at least one backend needs a weight above 0")
    return weights


def check_reason(reason: str) -> None:
    if reason:
        check_name(reason, "a reason", longest=_MAX_REASON)


def _before(connection: Connection, weights: Mapping[str, int], current: Traffic | None) -> int | None:
    """Returns the version of the row that a rollback from these weights restores."""
    if current is None or not weights:
        return None
    for start in read_traffic(connection, [current.before]):
        if raised(weights, start.weights) == raised(current.weights, start.weights) != set():
            return start.version  # these weights are one more step of the same roll-out
    return current.version


def _rows_of(identifier: str) -> Any:
    """Returns a query for an identifier's rows, newest first."""
    return (
        select(served_traffic)
        .where(equals(served_traffic.c.identifier, identifier))
        .order_by(served_traffic.c.version.desc())
    )


def _is_created(connection: Connection, identifier: str) -> bool:
    known = served_models.c
    query = select(known.identifier).where(known.identifier == identifier, known.removed_at.is_(None))
    return connection.execute(query).one_or_none() is not None


def _insert(connection: Connection, row: Traffic) -> None:
    values = {name: getattr(row, name) for name in row.__slots__}
    connection.execute(insert(served_traffic).values(values | {"weights": json.dumps(dict(row.weights))}))


def _record(
    transaction: Transaction, audit: Audit | None, action: str, was: Mapping[str, int], row: Traffic, now: float
) -> None:
    detail = {"weights": {"was": dict(was), "is": dict(row.weights)}, "reason": row.reason, "version": row.version}
    write_audit(transaction, audit, action, "", detail, now, subject=row.identifier)


def _changed_meanwhile(identifier: str, current: Traffic | None, expected: int) -> Conflict:
    now = "the weights of config.yaml" if current is None else f"version {current.version}, set by {current.actor}"
    return Conflict(f"the traffic of {identifier} is no longer version {expected}, but {now}: look again")
