"""Backends deployed by command. No command changes the args or options of a backend: other values need a new name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
from sqlalchemy import Connection, insert, select, update

from serve_app.accounting.audit_log import write_audit
from serve_app.accounting.database import Transaction
from serve_app.accounting.registry import writes
from serve_app.accounting.schema import served_backends, served_models
from serve_app.accounting.served import backend_of, current_traffic, spec_of
from serve_app.accounting.validation import check_fields, equals
from serve_app.contracts.calls import application_of
from serve_app.contracts.errors import BackendNotFound, Conflict, InvalidValue
from serve_app.contracts.served import BACKEND_OPTIONS, Backend
from serve_app.contracts.served_commands import DeployBackend, RetireBackend

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", re.ASCII)
_MAX_BYTES: Final = 32 * 1024


@writes(DeployBackend)
def deploy_backend(transaction: Transaction, wanted: DeployBackend, now: float) -> Backend:
    connection, name = transaction.connection, wanted.name
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidValue(f"{name!r}: a backend's name has 1 to 63 letters, digits, dots, dashes and underscores")
    check_fields(wanted.options, BACKEND_OPTIONS)
    given = {"args": _as_json("args", wanted.args), "options": _as_json("options", wanted.options)}
    earlier = _find(connection, name)
    if earlier is None:
        initial = {"name": name, "version": transaction.next_version(), "created_at": now}
        connection.execute(insert(served_backends).values(given | initial))
        write_audit(transaction, wanted.audit, "deploy_backend", "", _content(wanted), now, subject=name)
    elif (earlier.args, earlier.options) != (json.loads(given["args"]), json.loads(given["options"])):
        raise Conflict(f"{name} has different args or options: deploy under a new name and shift the traffic to it")
    elif earlier.retired_at is not None:
        _set_retired(transaction, name, None)
        write_audit(transaction, wanted.audit, "deploy_backend", "", _content(wanted), now, subject=name)
    return _read(connection, name)


@writes(RetireBackend)
def retire_backend(transaction: Transaction, wanted: RetireBackend, now: float) -> Backend:
    connection, name = transaction.connection, wanted.name
    earlier = _read(connection, name)
    if earlier.retired_at is not None:
        return earlier
    if users := _users(connection, name):
        raise Conflict(f"{name} still serves {', '.join(users)}: set its weight to 0 and remove it as fallback first")
    _set_retired(transaction, name, now)
    write_audit(transaction, wanted.audit, "retire_backend", "", {}, now, subject=name)
    return _read(connection, name)


def check_not_retired(connection: Connection, names: Iterable[str]) -> None:
    """Raises Conflict for a retired backend. Accepts unknown names: the ledger does not have those of `config.yaml`."""
    retired = served_backends.c.retired_at.is_not(None)
    query = select(served_backends.c.name).where(served_backends.c.name.in_({*map(application_of, names)}), retired)
    if found := sorted(connection.execute(query).scalars()):
        raise Conflict(f"{', '.join(found)} is retired: deploy it again first")


def _users(connection: Connection, name: str) -> list[str]:
    """Returns the identifiers that send requests to a backend, or may send them."""
    using = {
        identifier
        for identifier, traffic in current_traffic(connection).items()
        if name in map(application_of, traffic.weights)
    }
    for row in connection.execute(select(served_models).where(served_models.c.removed_at.is_(None))):
        if application_of(spec_of(json.loads(row.spec)).fallback or "") == name:
            using.add(row.identifier)
    return sorted(using)


def _find(connection: Connection, name: str) -> Backend | None:
    row = connection.execute(select(served_backends).where(equals(served_backends.c.name, name))).one_or_none()
    return None if row is None else backend_of(row)


def _read(connection: Connection, name: str) -> Backend:
    if (found := _find(connection, name)) is None:
        raise BackendNotFound(name)
    return found


def _set_retired(transaction: Transaction, name: str, at: float | None) -> None:
    changed = {"retired_at": at, "version": transaction.next_version()}
    transaction.connection.execute(update(served_backends).where(served_backends.c.name == name).values(changed))


def _content(wanted: DeployBackend) -> dict[str, Any]:
    return {"args": dict(wanted.args), "options": dict(wanted.options)}


def _as_json(what: str, given: Mapping[str, Any]) -> str:
    """Returns the value as JSON. Raises InvalidValue."""
    try:
        text = json.dumps(dict(given), ensure_ascii=True, allow_nan=False)
        msgspec.msgpack.encode(given)  # rejects values that answers cannot carry, such as integers beyond 64 bits
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidValue(f"{what}: must be a JSON object: {error}") from None
    if len(text) > _MAX_BYTES:
        raise InvalidValue(f"{what}: at most {_MAX_BYTES} bytes of JSON")
    return text
