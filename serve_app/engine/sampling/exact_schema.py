"""JSON schemas in terms that a grammar holds to exactly, where it would take more than readers of the reply allow.

- Grammars compare decimals: 3.0000000000000001 is above 3. Whoever reads the reply compares doubles (RFC 8259, section
  6), and there it is 3, which a schema with `exclusiveMinimum: 3` forbids. So exclusive bounds move inside, to the
  nearest number that can be told from them. Inclusive ones need nothing, since rounding keeps the order.
- llguidance knows days of a month, but not leap years (RFC 3339, appendix C), nor how long a name of a host may be
  (RFC 1123, section 2.1; RFC 1035, section 2.3.4).
"""

from __future__ import annotations

import math
from typing import Any, Final

_LEAST_STEP: Final = 1e-15  # of bounds near 0, where doubles are so close that no grammar writes them out
_MOST: Final = 2.0**53  # beyond it doubles are farther apart than integers

_LEAP_YEAR: Final = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DAY: Final = f"^([0-9]{{4}}-(0[13-9]|1[0-2])|[0-9]{{4}}-02-([01]|2[0-8])|{_LEAP_YEAR}-02-29)"
_LONGEST_HOST_NAME: Final = 253  # characters

_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions")
_LISTED: Final = ("anyOf", "allOf", "oneOf", "prefixItems")
_SINGLE: Final = ("items", "additionalProperties")


def exact(schema: Any) -> Any:
    """The schema with all of its parts in such terms, a copy. What is no schema comes back as it is."""
    if not isinstance(schema, dict):
        return schema
    changed = dict(schema)
    for key in _NAMED:
        if isinstance(parts := schema.get(key), dict):
            changed[key] = {name: exact(part) for name, part in parts.items()}
    for key in _LISTED:
        if isinstance(parts := schema.get(key), list):
            changed[key] = [exact(part) for part in parts]
    for key in _SINGLE:
        if key in schema:
            changed[key] = exact(schema[key])
    # Integers and multiples are never that close to a bound.
    if schema.get("type") != "integer" and "multipleOf" not in schema:
        _move(changed, "exclusiveMinimum", "minimum", 1)
        _move(changed, "exclusiveMaximum", "maximum", -1)
    _format(changed)
    return changed


def _format(schema: dict[str, Any]) -> None:
    """Add what the grammar engine's own idea of a format lacks; a pattern of the user's own is left alone."""
    if schema.get("format") in ("date", "date-time"):
        schema.setdefault("pattern", _DAY)
    elif schema.get("format") == "hostname":
        most = _number(schema.get("maxLength"))
        schema["maxLength"] = _LONGEST_HOST_NAME if most is None else min(most, _LONGEST_HOST_NAME)


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
