"""Rewrites JSON schemas where llguidance would allow a reply that a JSON Schema validator rejects.

- Numbers: llguidance compares decimals, so 3.0000000000000001 is above 3. A validator compares doubles (RFC 8259,
  section 6): it reads 3, which `exclusiveMinimum: 3` forbids. So exclusive bounds move inwards, to the nearest number
  that differs as a double. Inclusive bounds are safe, because rounding keeps the order.
- Dates and hosts: llguidance knows the days of each month, but not leap years (RFC 3339, appendix C) or the maximum
  length of a host name (RFC 1123, section 2.1; RFC 1035, section 2.3.4).
- Lengths: llguidance rejects string lengths of 2**32 and more. Maximum lengths that no reply can reach are dropped.
- Keys: llguidance allows escapes in keys that are not in `properties`, and compares these keys as written. So
  {"\\u0061ge": "old"} would match a schema in which `age` is a number, although the decoded key is `age`. Keys that
  match a pattern cannot have escapes. So the rewritten schema has a pattern for the keys that are not in `properties`,
  unless the schema may be merged with others (`_MERGED`) or its property names are very long (`_MAX_KEY_CHARACTERS`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from serve_app.engine.grammar.lark import none_of

_MIN_STEP: Final = 1e-15  # minimum distance from a bound; near 0, doubles have more digits than a grammar can have
_MAX_EXACT_INTEGER: Final = 2.0**53  # above this, the distance between doubles is more than 1

_UNREACHED: Final = 10**9  # characters, items or properties; no reply has more
_LEAP_YEAR: Final = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DAY: Final = f"^([0-9]{{4}}-(0[13-9]|1[0-2])|[0-9]{{4}}-02-([01]|2[0-8])|{_LEAP_YEAR}-02-29)"
_LONGEST_HOST_NAME: Final = 253  # characters
_MAX_KEY_CHARACTERS: Final = 10_000  # of all property names together; the pattern grows with them

# In a schema with one of these keywords, keys are not rewritten: the schema may be merged with others, and two patterns
# would conflict.
_MERGED: Final = frozenset({"allOf", "anyOf", "oneOf", "$ref", "patternProperties", "minProperties", "maxProperties"})


def exact(schema: Any) -> Any:
    """A copy of the schema with all parts rewritten; a value that is not a schema is returned unchanged."""
    values = _with_exact_values(schema)
    return values if _has_all_of(values) else _with_exact_keys(values)


def _parts_rewritten(schema: dict[str, Any], rewrite: Callable[[Any], Any]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
            changed[key] = {name: rewrite(part) for name, part in value.items()}
        elif key in ("anyOf", "allOf", "oneOf", "prefixItems") and isinstance(value, list):
            changed[key] = [rewrite(part) for part in value]
        elif key in ("items", "additionalItems", "additionalProperties"):
            changed[key] = rewrite(value)
        else:
            changed[key] = value
    return changed


def _with_exact_values(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    changed = _parts_rewritten(schema, _with_exact_values)
    for name in ("maxLength", "maxItems", "maxProperties"):
        if (_number(schema.get(name)) or 0) > _UNREACHED:
            del changed[name]
    # Not for integers and multiples: unless they equal a bound, they are never within `_MIN_STEP` of it.
    if schema.get("type") != "integer" and "multipleOf" not in schema:
        _move_bound(changed, "exclusiveMinimum", "minimum", 1)
        _move_bound(changed, "exclusiveMaximum", "maximum", -1)
    if schema.get("format") in ("date", "date-time"):
        changed.setdefault("pattern", _DAY)  # keeps a pattern that the user has set
    elif schema.get("format") == "hostname":
        limit = _number(schema.get("maxLength"))
        changed["maxLength"] = _LONGEST_HOST_NAME if limit is None else min(limit, _LONGEST_HOST_NAME)
    return changed


def _move_bound(schema: dict[str, Any], exclusive: str, inclusive: str, sign: int) -> None:
    """Replace an exclusive bound with an inclusive bound further inside, unless a stricter inclusive bound exists.

    `sign` is the direction of "inside": 1 for a minimum, -1 for a maximum.
    """
    bound, other = _number(schema.get(exclusive)), _number(schema.get(inclusive))
    if bound is None or abs(bound) > _MAX_EXACT_INTEGER:
        return
    inside = bound + sign * max(math.ulp(bound), _MIN_STEP)
    if other is not None:
        inside = max(inside, other) if sign > 0 else min(inside, other)
    del schema[exclusive]
    schema[inclusive] = inside


def _number(value: Any) -> int | float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _with_exact_keys(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    inside = _parts_rewritten(schema, _with_exact_keys)
    properties, more = inside.get("properties"), inside.get("additionalProperties", True)
    if not isinstance(properties, dict) or not properties or more is False or not _MERGED.isdisjoint(inside):
        return inside
    if sum(map(len, properties)) > _MAX_KEY_CHARACTERS or not _allows_object(inside):
        return inside
    return {**inside, "patternProperties": {none_of(properties): more}, "additionalProperties": False}


def _allows_object(schema: Mapping[str, Any]) -> bool:
    kind = schema.get("type", "object")
    return kind == "object" or (isinstance(kind, list) and "object" in kind)


def _has_all_of(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(map(_has_all_of, schema))
    return isinstance(schema, dict) and ("allOf" in schema or any(map(_has_all_of, schema.values())))
