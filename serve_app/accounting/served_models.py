"""Identifiers besides those of `config.yaml`, and the prices of all identifiers."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import Connection, insert, select, update

from serve_app.accounting.audit_log import write_audit
from serve_app.accounting.database import Transaction
from serve_app.accounting.registry import reads, writes
from serve_app.accounting.schema import served_models, served_prices
from serve_app.accounting.served import model_of, price_of
from serve_app.accounting.served_backends import check_not_retired
from serve_app.accounting.served_traffic import actor_of, check_weights, end_traffic, last_row, start_traffic
from serve_app.accounting.validation import check_name, check_time, equals
from serve_app.contracts.errors import Conflict, InvalidValue, ModelNotFound
from serve_app.contracts.money import MAX_CHARGE, TOKENS_PER_PRICE, Price, PriceVersion, price_at
from serve_app.contracts.served import ModelSpec, ServedModel, check_aliases
from serve_app.contracts.served_commands import CreateModel, ListPrices, RemoveModel, SchedulePrice, UpdateModel

_IDENTIFIER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)
_SPEC: Final = TypeAdapter(ModelSpec)
_MAX_USES: Final = 50  # maximum number of recommended temperatures


@writes(CreateModel)
def create_model(transaction: Transaction, wanted: CreateModel, now: float) -> ServedModel:
    connection, identifier = transaction.connection, wanted.identifier
    if not isinstance(identifier, str) or not _IDENTIFIER.fullmatch(identifier):
        raise InvalidValue(
            f"{identifier!r}: an identifier has 1 to 100 letters, digits, dots, dashes and underscores, and begins "
            "with a letter or digit"
        )
    weights = check_weights(wanted.weights)
    if not weights:
        raise InvalidValue(f"weights of {identifier}: at least one backend needs a weight above 0")
    _check_spec(connection, identifier, wanted.spec)
    _check_price(wanted.price)
    earlier = connection.execute(select(served_models).where(served_models.c.identifier == identifier)).one_or_none()
    if earlier is not None and earlier.removed_at is None:
        traffic, found = last_row(connection, identifier), model_of(earlier)
        price = price_at(_prices(connection, identifier), now)
        if (found.spec, traffic and traffic.weights, price) == (wanted.spec, weights, wanted.price):
            return found
        raise Conflict(f"{identifier} already exists: update it, or use a different id")
    check_not_retired(connection, weights)
    version = transaction.next_version()
    values = {"version": version, "since": version, "spec": _stored(wanted.spec), "created_at": now, "removed_at": None}
    if earlier is None:
        connection.execute(insert(served_models).values(values | {"identifier": identifier}))
    else:
        connection.execute(update(served_models).where(served_models.c.identifier == identifier).values(values))
    start_traffic(transaction, identifier, weights, actor_of(wanted.audit), now)
    _insert_price(transaction, identifier, wanted.price, now)
    detail = {"spec": asdict(wanted.spec), "weights": weights, **asdict(wanted.price)}
    write_audit(transaction, wanted.audit, "create_model", "", detail, now, subject=identifier)
    return ServedModel(identifier, version, wanted.spec, now)


@writes(UpdateModel)
def update_model(transaction: Transaction, wanted: UpdateModel, now: float) -> ServedModel:
    connection, identifier = transaction.connection, wanted.identifier
    before = model_of(_live(connection, identifier))
    if before.spec == wanted.spec:
        return before
    _check_spec(connection, identifier, wanted.spec)
    version = transaction.next_version()
    changes = {"version": version, "spec": _stored(wanted.spec)}
    connection.execute(update(served_models).where(served_models.c.identifier == identifier).values(changes))
    was, new = asdict(before.spec), asdict(wanted.spec)
    detail = {name: {"was": was[name], "is": new[name]} for name in new if was[name] != new[name]}
    write_audit(transaction, wanted.audit, "update_model", "", detail, now, subject=identifier)
    return ServedModel(identifier, version, wanted.spec, before.created_at)


@writes(RemoveModel)
def remove_model(transaction: Transaction, wanted: RemoveModel, now: float) -> None:
    connection, identifier = transaction.connection, wanted.identifier
    row = connection.execute(_named(identifier)).one_or_none()
    if row is None:
        raise ModelNotFound(identifier)
    if row.removed_at is not None:
        return
    version = transaction.next_version()
    changes = {"version": version, "since": version, "removed_at": now}
    connection.execute(update(served_models).where(served_models.c.identifier == identifier).values(changes))
    end_traffic(transaction, identifier, actor_of(wanted.audit), now)
    write_audit(transaction, wanted.audit, "remove_model", "", {}, now, subject=identifier)


@writes(SchedulePrice)
def schedule_price(transaction: Transaction, wanted: SchedulePrice, now: float) -> PriceVersion:
    connection, identifier = transaction.connection, wanted.identifier
    check_name(identifier, "an identifier")
    _check_price(wanted.price)
    if not wanted.is_configured:
        _live(connection, identifier)
    prices = _prices(connection, identifier)
    effective_at = now if wanted.effective_at is None else check_time(wanted.effective_at)
    in_effect = [one for one in prices if one.effective_at <= effective_at]
    is_same_time = in_effect and (wanted.effective_at is None or in_effect[-1].effective_at == effective_at)
    if is_same_time and in_effect[-1].price == wanted.price:
        return in_effect[-1]
    if effective_at < now:
        raise InvalidValue("effective_at has passed: use a time in the future, or leave it out to change the price now")
    row = _insert_price(transaction, identifier, wanted.price, effective_at)
    was = asdict(in_effect[-1].price) if in_effect else {}
    detail: dict[str, Any] = {name: {"was": was.get(name), "is": value} for name, value in asdict(wanted.price).items()}
    detail |= {"effective_at": effective_at, "version": row.version}
    write_audit(transaction, wanted.audit, "schedule_price", "", detail, now, subject=identifier)
    return row


@reads(ListPrices)
def list_prices(connection: Connection, wanted: ListPrices, _now: float) -> list[PriceVersion]:
    return sorted(_prices(connection, wanted.identifier), key=lambda one: -one.version)


def _prices(connection: Connection, identifier: str) -> list[PriceVersion]:
    """Returns prices in the order that `price_at` needs. Omits those from before the latest creation or removal."""
    row = connection.execute(_named(identifier)).one_or_none()
    prices, since = served_prices.c, 0 if row is None else row.since
    query = select(served_prices).where(equals(prices.identifier, identifier), prices.version >= since)
    return [price_of(row) for row in connection.execute(query.order_by(prices.effective_at, prices.version))]


def _insert_price(transaction: Transaction, identifier: str, price: Price, effective_at: float) -> PriceVersion:
    row = PriceVersion(identifier, transaction.next_version(), effective_at, price)
    values = {"identifier": identifier, "version": row.version, "effective_at": effective_at, **asdict(price)}
    transaction.connection.execute(insert(served_prices).values(values))
    return row


def _named(identifier: str) -> Any:
    return select(served_models).where(equals(served_models.c.identifier, identifier))


def _live(connection: Connection, identifier: str) -> Any:
    row = connection.execute(_named(identifier)).one_or_none()
    if row is None or row.removed_at is not None:
        raise ModelNotFound(identifier)
    return row


def _stored(spec: ModelSpec) -> str:
    return json.dumps(asdict(spec), ensure_ascii=True, allow_nan=False)


def _check_spec(connection: Connection, identifier: str, spec: ModelSpec) -> None:
    try:
        _SPEC.validate_json(_stored(spec), strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        raise InvalidValue(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None
    except (TypeError, ValueError) as error:
        raise InvalidValue(f"a model's values must be JSON: {error}") from None
    if spec.max_output >= spec.context_length:
        raise InvalidValue("max_output: must be below context_length, which counts the prompt too")
    if len(spec.recommended_temperatures) > _MAX_USES:
        raise InvalidValue(f"recommended_temperatures: at most {_MAX_USES}")
    for use in spec.recommended_temperatures:
        check_name(use, "a use of recommended_temperatures")
    others = connection.execute(select(served_models).where(served_models.c.removed_at.is_(None)))
    aliases = {row.identifier: model_of(row).spec.aliases for row in others} | {identifier: spec.aliases}
    try:
        check_aliases(aliases)
    except ValueError as error:
        raise InvalidValue(str(error)) from None
    if spec.fallback is not None:
        check_name(spec.fallback, "a fallback")
        check_not_retired(connection, [spec.fallback])


def _check_price(price: Price) -> None:
    for name, value in asdict(price).items():
        if type(value) is not int or not 0 <= value <= MAX_CHARGE // TOKENS_PER_PRICE:
            raise InvalidValue(
                f"{name} {value!r}: give nano-units per token from 0 to {MAX_CHARGE // TOKENS_PER_PRICE}"
            )
