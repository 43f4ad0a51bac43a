"""Formats numbers as a board shows them, in Grafana's units."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

_TIMES: Final = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_COUNTS: Final = ((1e9, "B"), (1e6, "M"), (1e3, "K"))
_BYTES: Final = ((2.0**30, " GiB"), (2.0**20, " MiB"), (2.0**10, " KiB"))


def shown(value: float, unit: str) -> str:
    """Formats a value. `unit` is Grafana's name of the unit; an unknown name is shown unchanged."""
    if math.isnan(value):
        return "–"
    return _UNITS.get(unit, lambda number: f"{_scaled(number, _COUNTS)} {unit}")(value)


def _time(value: float) -> str:
    for size, name in _TIMES:
        if abs(value) >= size:
            return f"{_short(value / size)} {name}"
    return "0 s" if abs(value) < 1e-9 else f"{value:.1g} s"


def _scaled(value: float, sizes: Sequence[tuple[float, str]]) -> str:
    for size, name in sizes:
        if abs(value) >= size:
            return f"{_short(value / size)}{name}"
    return _short(value)


def _share(value: float) -> str:
    """Formats a share. Just below 1, it has more digits, so that it does not look like 100%."""
    percent = 100 * value
    digits = 3 if 99 < percent < 100 else 1
    return f"{percent:.{digits}f}".rstrip("0").rstrip(".") + "%"


def _short(value: float) -> str:
    return "0" if abs(value) < 1e-12 else f"{value:.3g}"


_UNITS: Final[dict[str, Callable[[float], str]]] = {
    "short": lambda value: _scaled(value, _COUNTS),
    "s": _time,
    "ms": lambda value: _time(value / 1000),
    "percentunit": _share,
    "percent": lambda value: _share(value / 100),
    "bytes": lambda value: _scaled(value, _BYTES) if abs(value) >= 1024 else f"{_short(value)} B",
    "decmbytes": lambda value: _scaled(value * 1e6, _BYTES),
    "reqps": lambda value: f"{_scaled(value, _COUNTS)}/s",
    "ops": lambda value: f"{_scaled(value, _COUNTS)}/s",
}
