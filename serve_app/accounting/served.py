"""Reads traffic, identifiers, prices and backends in one snapshot."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, Final

from sqlalchemy import Connection, Row, func, select

from serve_app.accounting.registry import reads
from serve_app.accounting.schema import served_backends, served_models, served_prices, served_traffic
from serve_app.contracts.money import Price
from serve_app.contracts.served import (
    Backend,
    ModelSpec,
    PriceVersion,
    SamplingDefaults,
    Served,
    ServedModel,
    Traffic,
)
from serve_app.contracts.served_commands import ReadServed
from serve_app.contracts.units import DAY_S

RETIRED_S: Final = 30 * DAY_S  # a retired backend is listed for this time, so that gateways delete it
_EARLIER_S: Final = DAY_S  # a gateway with a slow clock may still use the previous price for this long

_TABLES = (served_traffic, served_prices, served_models, served_backends)
_LAST = select(
    *(select(func.coalesce(func.max(table.c.version), 0)).scalar_subquery().label(table.name) for table in _TABLES)
)


@reads(ReadServed)
def read_served(connection: Connection, wanted: ReadServed, now: float) -> Served | None:
    version = max(connection.execute(_LAST).one())
    if version == wanted.after:
        return None
    traffic = current_traffic(connection)
    before = {row.version: row for row in read_traffic(connection, (row.before for row in traffic.values()))}
    models = connection.execute(select(served_models)).all()
    kept = served_backends.c.retired_at.is_(None) | (served_backends.c.retired_at > now - RETIRED_S)
    backends = (backend_of(row) for row in connection.execute(select(served_backends).where(kept)))
    return Served(
        version=version,
        traffic=traffic,
        before={name: before[row.before] for name, row in traffic.items() if row.before is not None},
        models={row.identifier: model_of(row) for row in models if row.removed_at is None},
        prices=_prices(connection, {row.identifier: row.since for row in models}, now),
        backends={backend.name: backend for backend in backends},
    )


def current_traffic(connection: Connection) -> dict[str, Traffic]:
    """Returns the traffic by identifier, without identifiers to which the weights of `config.yaml` apply."""
    last = select(func.max(served_traffic.c.version)).group_by(served_traffic.c.identifier)
    query = select(served_traffic).where(served_traffic.c.version.in_(last)).order_by(served_traffic.c.identifier)
    rows = map(traffic_of, connection.execute(query))
    return {row.identifier: row for row in rows if row.weights}


def read_traffic(connection: Connection, versions: Iterable[int | None]) -> list[Traffic]:
    """Returns the traffic rows with these versions. Ignores None."""
    known = [version for version in versions if version is not None]
    query = select(served_traffic).where(served_traffic.c.version.in_(known))
    return [traffic_of(row) for row in connection.execute(query)] if known else []


def _prices(connection: Connection, since: dict[str, int], now: float) -> dict[str, tuple[PriceVersion, ...]]:
    found: dict[str, list[PriceVersion]] = {}
    query = select(served_prices).order_by(
        served_prices.c.identifier, served_prices.c.effective_at, served_prices.c.version
    )
    for row in connection.execute(query):
        if row.version < since.get(row.identifier, 0):
            continue
        prices = found.setdefault(row.identifier, [])
        if row.effective_at <= now - _EARLIER_S:
            prices.clear()
        prices.append(price_of(row))
    return {identifier: tuple(prices) for identifier, prices in found.items()}


def traffic_of(row: Row[Any]) -> Traffic:
    return Traffic(**{**row._mapping, "weights": json.loads(row.weights)})


def price_of(row: Row[Any]) -> PriceVersion:
    price = Price(row.input, row.cached_input, row.output)
    return PriceVersion(row.identifier, row.version, row.effective_at, price)


def model_of(row: Row[Any]) -> ServedModel:
    return ServedModel(row.identifier, row.version, spec_of(json.loads(row.spec)), row.created_at)


def spec_of(stored: dict[str, Any]) -> ModelSpec:
    """Returns the spec without the fields that a later release has added."""
    values = {one.name: stored[one.name] for one in fields(ModelSpec) if one.name in stored}
    sampling = {one.name: stored["sampling"].get(one.name) for one in fields(SamplingDefaults)}
    return ModelSpec(
        **{**values, "sampling": SamplingDefaults(**sampling), "aliases": tuple(values.get("aliases", ()))}
    )


def backend_of(row: Row[Any]) -> Backend:
    return Backend(**{**row._mapping, "args": json.loads(row.args), "options": json.loads(row.options)})
