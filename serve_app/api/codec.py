"""JSON on the wire: strict parsing in, valid UTF-8 out."""

from __future__ import annotations

import json
from typing import Any, Final

from pydantic_core import from_json

from serve_app.api import errors

_encode_str = json.JSONEncoder(ensure_ascii=False).encode
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

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
        raise errors.invalid_format(f"The body is not valid JSON: {error}. Expected one JSON object.") from None
    if not isinstance(parsed, dict):
        raise errors.invalid_format(f"The body must be a JSON object, but it is {describe(parsed)}.")
    return parsed


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
