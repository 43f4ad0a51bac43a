"""Exclusive bounds of numbers in JSON schemas, moved inside to the nearest number that its readers can tell from them.

A grammar compares decimals: 3.0000000000000001 is above 3. Whoever reads the reply compares doubles (RFC 8259, section
6), and there it is 3, which a schema with `exclusiveMinimum: 3` forbids. Inclusive bounds need nothing, since rounding
keeps the order.
"""

from __future__ import annotations

import math
from typing import Any, Final

_LEAST_STEP: Final = 1e-15  # of bounds near 0, where doubles are so close that no grammar writes them out
_MOST: Final = 2.0**53  # beyond it doubles are farther apart than integers

_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions")
_LISTED: Final = ("anyOf", "allOf", "oneOf", "prefixItems")
_SINGLE: Final = ("items", "additionalProperties")


def readable_bounds(schema: Any) -> Any:
    """The schema with such bounds in all of its parts, a copy. What is no schema comes back as it is."""
    if not isinstance(schema, dict):
        return schema
    changed = dict(schema)
    for key in _NAMED:
        if isinstance(parts := schema.get(key), dict):
            changed[key] = {name: readable_bounds(part) for name, part in parts.items()}
    for key in _LISTED:
        if isinstance(parts := schema.get(key), list):
            changed[key] = [readable_bounds(part) for part in parts]
    for key in _SINGLE:
        if key in schema:
            changed[key] = readable_bounds(schema[key])
    # Integers and multiples are never that close to a bound.
    if schema.get("type") != "integer" and "multipleOf" not in schema:
        _move(changed, "exclusiveMinimum", "minimum", 1)
        _move(changed, "exclusiveMaximum", "maximum", -1)
    return changed


def _move(schema: dict[str, Any], exclusive: str, inclusive: str, sign: int) -> None:
    """Replace a bound that is exclusive by one that is not, on the side that `sign` says, or keep a closer one."""
    bound, other = _number(schema.get(exclusive)), _number(schema.get(inclusive))
    if bound is None or abs(bound) > _MOST:
        return
    inside = bound + sign * max(math.ulp(bound), _LEAST_STEP)
    if other is not None:
        inside = max(inside, other) if sign > 0 else min(inside, other)
    del schema[exclusive]
    schema[inclusive] = inside


def _number(value: Any) -> int | float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
