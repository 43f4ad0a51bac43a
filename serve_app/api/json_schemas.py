"""Bounds of the JSON schemas in a request: within them a grammar is compiled in a fraction of a second.

What a schema says is for the grammar engine to understand or refuse. These bounds come before it, because a schema of
a hundred characters can keep it busy for a minute, and a thread that compiles can't be stopped.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Final

from serve_app.api import errors
from serve_app.api.codec import encode

MOST_BYTES: Final = 64 * 1024  # of one schema as JSON without spaces
MOST_BYTES_OF_TOOLS: Final = 128 * 1024  # of the parameters of all tools together
MOST_LEVELS: Final = 64  # of arrays and objects in one another
MOST_PROPERTIES: Final = 400  # of one object, since each that may be left out multiplies what may follow
MOST_CHARACTERS: Final = 10_000  # of one text: a constant, a pattern, a name
# A grammar counts remainders: of the least common multiple where several numbers hold at once.
MOST_REMAINDERS: Final = 10_000
_GREATEST: Final = sys.float_info.max


def check(field: str, schema: dict[str, Any]) -> int:
    """Checks the bounds of one schema and answers its size in bytes.

    Raises InvalidParametersError (422) that names the field and the bound.
    """
    size = len(encode(schema))
    if size > MOST_BYTES:
        raise _beyond(field, f"is a JSON schema of {size} bytes, and at most {MOST_BYTES} are possible")
    remainders = 1
    for level, value in _walk(schema):
        if level > MOST_LEVELS:
            raise _beyond(field, f"is nested deeper than the {MOST_LEVELS} levels that are possible in a JSON schema")
        if isinstance(value, str):
            if len(value) > MOST_CHARACTERS:
                raise _beyond(field, f"has a text of {len(value)} characters: at most {MOST_CHARACTERS} are possible")
        elif isinstance(value, int | float):
            if abs(value) > _GREATEST:
                raise _beyond(field, "has a number that is too large for a JSON schema")
        elif isinstance(value, dict):
            for keyword in ("properties", "required"):
                if isinstance(value.get(keyword), dict | list) and len(value[keyword]) > MOST_PROPERTIES:
                    found = f"{len(value[keyword])} {keyword}"
                    raise _beyond(field, f"has an object of {found}, and at most {MOST_PROPERTIES} are possible")
            remainders = math.lcm(remainders, _remainders(value.get("multipleOf")))
            if remainders > MOST_REMAINDERS:
                what = f"the least common multiple of all multipleOf must be at most {MOST_REMAINDERS}"
                raise _beyond(field, f"asks for too much: {what}")
    return size


def check_tools(tools: list[tuple[str, dict[str, Any] | None]]) -> None:
    """Checks the parameters of all tools, each with the name of its field. Raises InvalidParametersError (422)."""
    total = sum(check(field, schema) for field, schema in tools if schema is not None)
    if total > MOST_BYTES_OF_TOOLS:
        found = f"parameters of {total} bytes, and at most {MOST_BYTES_OF_TOOLS} are possible for all tools together"
        raise _beyond("tools", f"have {found}")


def _walk(schema: Any) -> Iterator[tuple[int, Any]]:
    """Every value and every name in the schema, each with its level; nothing below a level that is too deep."""
    waiting: list[tuple[int, Any]] = [(1, schema)]
    while waiting:
        level, value = waiting.pop()
        yield level, value
        if isinstance(value, dict):
            waiting += [(level, name) for name in value]
            waiting += [(level + isinstance(inner, dict | list), inner) for inner in value.values()]
        elif isinstance(value, list):
            waiting += [(level + isinstance(inner, dict | list), inner) for inner in value]


def _remainders(divisor: Any) -> int:
    """The digits of a multipleOf as an integer, 1 where there is none or none that counts."""
    if isinstance(divisor, bool) or not isinstance(divisor, int | float) or not math.isfinite(divisor):
        return 1
    number = Decimal(repr(divisor))
    whole = number == number.to_integral_value()
    digits = int(number) if whole else int("".join(map(str, number.as_tuple().digits)))
    return max(1, abs(digits))


def _beyond(field: str, what: str) -> errors.InvalidParametersError:
    return errors.invalid_parameters(f"{field} {what}.", field)
