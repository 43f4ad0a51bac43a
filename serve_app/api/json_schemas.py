"""Checks the limits of JSON schemas before a schema reaches the grammar engine.

The grammar engine itself interprets or rejects the content of a schema. The limits come first, because a schema of a
hundred characters can keep the engine busy for a minute, and a compiling thread cannot be stopped. Within the limits, a
grammar compiles in a fraction of a second.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Final

from serve_app.api import errors
from serve_app.api.codec import encode_json, quote

MAX_BYTES: Final = 64 * 1024  # per schema, as JSON without spaces
MAX_BYTES_OF_TOOLS: Final = 128 * 1024  # the parameters of all tools together
MAX_LEVELS: Final = 64  # nesting of arrays and objects
MAX_PROPERTIES: Final = 400  # per object, because each optional property multiplies the possible continuations
MAX_CHARACTERS: Final = 10_000  # per string: a constant, a pattern, a name
MAX_REPEATED: Final = 10_000  # characters of a pattern with all repetitions written out
MAX_MINIMUM: Final = 10**9  # maximum for minLength, minItems, minProperties
# For `multipleOf`, a grammar has one state per remainder. For several divisors, their least common multiple counts.
MAX_REMAINDERS: Final = 10_000
_GREATEST: Final = sys.float_info.max
_MINIMUMS: Final = ("minLength", "minItems", "minProperties")

_COUNT: Final = re.compile(r"\{(\d{1,12})(?:,(\d{0,12}))?\}")


def check_schema(field: str, schema: dict[str, Any]) -> int:
    """Returns the size of a schema in bytes. Raises ApiError (422), which names the field and the limit."""
    size = len(encode_json(schema))
    if size > MAX_BYTES:
        raise _beyond(field, f"is a JSON schema of {size} bytes, and at most {MAX_BYTES} are possible")
    remainders = 1
    for level, value in _walk(schema):
        if level > MAX_LEVELS:
            raise _beyond(field, f"is nested deeper than the {MAX_LEVELS} levels that are possible in a JSON schema")
        if isinstance(value, str):
            if len(value) > MAX_CHARACTERS:
                raise _beyond(field, f"has a text of {len(value)} characters: at most {MAX_CHARACTERS} are possible")
        elif isinstance(value, int | float):
            if abs(value) > _GREATEST:
                raise _beyond(field, "has a number that is too large for a JSON schema")
        elif isinstance(value, dict):
            _check_repetitions(field, value)
            for keyword in ("properties", "required"):
                if isinstance(value.get(keyword), dict | list) and len(value[keyword]) > MAX_PROPERTIES:
                    found = f"{len(value[keyword])} {keyword}"
                    raise _beyond(field, f"has an object of {found}, and at most {MAX_PROPERTIES} are possible")
            remainders = math.lcm(remainders, _remainders(value.get("multipleOf")))
            if remainders > MAX_REMAINDERS:
                what = f"the least common multiple of all multipleOf must be at most {MAX_REMAINDERS}"
                raise _beyond(field, f"asks for too much: {what}")
    return size


def _check_repetitions(field: str, schema: dict[str, Any]) -> None:
    patterns = [schema.get("pattern"), *(schema["patternProperties"] if _has_patterns(schema) else ())]
    for pattern in patterns:
        if isinstance(pattern, str) and repeated_size(pattern) > MAX_REPEATED:
            what = f"more than {MAX_REPEATED} characters when its repetitions are written out"
            raise _beyond(field, f"has a pattern of {what}, {quote(pattern)}: repeat less, or use maxLength")
    for keyword in _MINIMUMS:
        least = schema.get(keyword)
        if isinstance(least, int | float) and least > MAX_MINIMUM:
            found = f"of {least:g}" if least <= _GREATEST else "with hundreds of digits"
            raise _beyond(field, f"has a {keyword} {found}, and at most {MAX_MINIMUM} are possible")


def _has_patterns(schema: dict[str, Any]) -> bool:
    return isinstance(schema.get("patternProperties"), dict)


def _walk(schema: Any) -> Iterator[tuple[int, Any]]:
    """Yields every value and every name in the schema, each with its level."""
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
    """Returns the number of remainders of a `multipleOf`: its digits as an integer, such as 25 for 0.25.

    Returns 1 if it is absent or unusable.
    """
    if isinstance(divisor, bool) or not isinstance(divisor, int | float) or not abs(divisor) <= _GREATEST:
        return 1
    number = Decimal(repr(divisor))
    whole = number == number.to_integral_value()
    digits = int(number) if whole else int("".join(map(str, number.as_tuple().digits)))
    return max(1, abs(digits))


def repeated_size(pattern: str) -> int:
    """Estimates the length of a regular expression with its repetitions written out; `{2,5}` counts five times.

    Nested repetitions multiply. Returns at most `MAX_REPEATED` + 1. The grammar engine's work grows with this length.
    """
    sizes, last, at = [0], 0, 0  # sizes of the open groups; `last` is the size of the previous piece
    while at < len(pattern):
        text = pattern[at]
        if text == "{" and (count := _COUNT.match(pattern, at)):
            last *= max(1, *(int(number) for number in count.groups() if number))
            at = count.end()
        elif text == ")" and len(sizes) > 1:
            last += sizes.pop()
            at += 1
        else:
            sizes[-1] += last
            last = 1
            at = _end_of_class(pattern, at) if text == "[" else at + (2 if text == "\\" else 1)
            if text == "(":
                sizes.append(0)
                last = 0
                at += 2 * pattern.startswith("?:", at)
        if last > MAX_REPEATED:
            return MAX_REPEATED + 1
    return min(MAX_REPEATED + 1, last + sum(sizes))


def _end_of_class(pattern: str, at: int) -> int:
    """Returns the position after the character class that begins at `at`. Classes may be nested."""
    depth = 0
    while at < len(pattern):
        text = pattern[at]
        at += 2 if text == "\\" else 1
        if text == "[":
            depth += 1
            at += pattern.startswith("^", at)
            at += pattern.startswith("]", at)  # a leading ] is a literal
        elif text == "]":
            depth -= 1
            if not depth:
                break
    return at


def _beyond(field: str, rule: str) -> errors.ApiError:
    return errors.invalid_parameters(f"{field} {rule}.", field)
