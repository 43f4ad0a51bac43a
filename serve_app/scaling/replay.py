"""Recorded usage as requests of a simulation: who asked when, for how many tokens. There is no text in it.

What was refused was never billed, and is not in the records: a replay shows the demand that was served.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from serve_app.contracts.money import Price, price_per_million
from serve_app.scaling.simulation.cluster import Arrival


class BadUsage(ValueError):
    """A row that is no row of a usage export; the message names it."""


def arrivals(rows: Iterable[Mapping[str, Any]], price: Price | None = None) -> tuple[list[Arrival], float]:
    """The requests of rows as `serve-app usage export` writes them, by time, and the Unix time of the first.

    `price` replaces the recorded prices. Requests of which no token was computed are left out. Raises BadUsage.
    """
    found = []
    for number, row in enumerate(rows, start=1):
        try:
            prompt, cached, output = (int(row[f"{name}_tokens"]) for name in ("prompt", "cached", "completion"))
            started = datetime.fromisoformat(str(row["started_at"])).timestamp()
            charged = price or Price(
                input=price_per_million(str(row["price_input"])),
                cached_input=price_per_million(str(row["price_cached_input"])),
                output=price_per_million(str(row["price_output"])),
            )
            account_id = str(row["account_id"])
        except (KeyError, ValueError, TypeError) as error:
            raise BadUsage(f"row {number} is none of a usage export: {error}") from None
        if prompt + output > 0:
            found.append((started, account_id, max(1, prompt), max(1, output), min(cached, prompt), charged))
    found.sort(key=lambda one: one[0])
    first = found[0][0] if found else 0.0
    return [
        Arrival(at - first, account_id, prompt, output, output, cached, charged)
        for at, account_id, prompt, output, cached, charged in found
    ], first
