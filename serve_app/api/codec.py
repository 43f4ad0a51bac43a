"""JSON on the wire: strict parsing in, valid UTF-8 out."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from pydantic_core import from_json

from serve_app.api import errors

_encode_str = json.JSONEncoder(ensure_ascii=False).encode
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

# What a body begins with that was encoded as something else.
_NOT_UTF8: Final = (
    (b"\xef\xbb\xbf", "It begins with a byte order mark: send UTF-8 without one."),
    (b"\xff\xfe", "It looks like UTF-16: send UTF-8."),
    (b"\xfe\xff", "It looks like UTF-16: send UTF-8."),
    (b"\x1f\x8b", "It is compressed: send it as it is."),
    (b"--", "It looks like a form with parts: send JSON."),
)

# What the parser complains of, and what to do about it.
_HINTS: Final = (
    ("recursion limit", "Arrays and objects may be nested 200 deep."),
    ("out of range", "A number may have 4300 digits."),
    ("EOF while parsing", "It ends too early: was it cut on its way?"),
    ("trailing characters", "There is something after the object: send one object alone."),
    ("trailing comma", "Leave out the comma before the closing bracket."),
    ("control character", "In strings, line ends and other control characters are escaped, as in \\n."),
    ("hex escape", "Escapes of surrogates, \\ud800 to \\udfff, come in pairs."),
    ("unicode code point", "Text must be UTF-8."),
    ("invalid escape", "A backslash itself is written \\\\."),
    ("key must be a string", "Names are in double quotes."),
)
_PLACE: Final = re.compile(r"line (\d+) column (\d+)$")
_NO_NUMBERS: Final = (b"NaN", b"Infinity", b"-Infinity")

# Inside a JSON string these are plain characters, but some clients cut a stream into lines with a splitter that
# takes them for line ends (Python's str.splitlines among them).
_LINE_ENDS: Final = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def parse_object(raw: bytes, max_bytes: int) -> dict[str, Any]:
    """The JSON object in `raw`.

    Refuses what RFC 8259 does not allow, NaN and Infinity, surrogates that stand alone and nesting deeper than 200
    levels. Of a repeated member the last counts. Raises InvalidFormatError with the place and what was found there.
    """
    if len(raw) > max_bytes:
        raise errors.body_too_large(max_bytes)
    if not raw.strip():
        raise errors.invalid_format("The body is empty: expected a JSON object.")
    try:
        parsed = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        hint = _hint(raw, str(error))
        raise errors.invalid_format(f"The body is not valid JSON: {error}. {hint}") from None
    if not isinstance(parsed, dict):
        raise errors.invalid_format(f"The body must be a JSON object, but it is {describe(parsed)}.")
    return parsed


def _hint(raw: bytes, complaint: str) -> str:
    """What to change in a body that is no JSON."""
    for mark, hint in _NOT_UTF8:
        if raw.startswith(mark):
            return hint
    if b"\0" in raw[:4]:
        return "It looks like UTF-16 or UTF-32: send UTF-8."
    for words, hint in _HINTS:
        if words in complaint:
            return hint
    if (place := _PLACE.search(complaint)) is not None:
        line, column = int(place[1]), int(place[2])
        found = raw.split(b"\n", line)[line - 1][max(0, column - 2) : column + 9].lstrip()
        if found.lstrip(b":[,").startswith(_NO_NUMBERS):
            return "NaN and Infinity are no JSON: send a number, or leave the field out."
        if found.startswith(b"'"):
            return "Names and strings are in double quotes."
    return "Expected one JSON object."


def describe(value: object) -> str:
    """A JSON value in a few words for an error message: its type, and the value itself when it is short."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"the boolean {'true' if value else 'false'}"
    if isinstance(value, int):
        return f"the integer {value}" if abs(value) < 10**20 else "an integer of more than 20 digits"
    if isinstance(value, float):
        return f"the number {value!r}"
    if isinstance(value, str):
        return f"the string {quote(value)}"
    if isinstance(value, list):
        return f"an array of {len(value)}"
    return "an object"


def quote(text: str) -> str:
    """Text as a short JSON string for an error message."""
    return _encode_str(text if len(text) <= 40 else text[:37] + "...")


def encode(value: Any) -> bytes:
    """JSON without spaces, as UTF-8. A lone surrogate becomes U+FFFD, a pair of them the character that it spells."""
    return _utf8(_encode(value))


def encode_text(text: str) -> bytes:
    """One JSON string, as UTF-8, without anything that a line splitter could take for a line end."""
    return _utf8(_unbroken(_encode_str(text)))


def encode_line(value: Any) -> bytes:
    """JSON as `encode` has it, without anything that a line splitter could take for a line end."""
    return _utf8(_unbroken(_encode(value)))


def _unbroken(encoded: str) -> str:
    if not encoded.isascii():
        for character, escape in _LINE_ENDS.items():
            encoded = encoded.replace(character, escape)
    return encoded


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
