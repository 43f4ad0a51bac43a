"""Converts JSON on the wire: bytes to an object, the object to typed fields, and values back to valid UTF-8."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from math import isnan
from typing import Any, Final, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, FailFast, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError, from_json

from serve_app.api import errors

ModelT = TypeVar("ModelT", bound=BaseModel)

_encode_str = json.JSONEncoder(ensure_ascii=False).encode
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
_GREATEST: Final = sys.float_info.max

MAX_ITEMS: Final = 100_000  # per body, see `has_more_items`; any conversation of 32768 tokens has fewer
_MOMENT_BYTES: Final = 64 * 1024
_MOMENT_ITEMS: Final = 500
_PIECE: Final = 64 * 1024
_NO_STRUCTURE: Final = bytes(set(range(256)) - set(b",[{"))

# First bytes of a body that is not plain UTF-8 JSON, and the advice to give to the client.
_NOT_UTF8: Final = (
    (b"\xef\xbb\xbf", "It begins with a byte order mark: send UTF-8 without one."),
    (b"\xff\xfe", "It looks like UTF-16: send UTF-8."),
    (b"\xfe\xff", "It looks like UTF-16: send UTF-8."),
    (b"\x1f\x8b", "It is compressed: send it as it is."),
    (b"--", "It looks like a form with parts: send JSON."),
)

# Words in the parser's error message, and the advice to give to the client.
_HINTS: Final = (
    ("recursion limit", "Arrays and objects may be nested at most 200 deep."),
    ("out of range", "A number may have at most 4300 digits."),
    ("EOF while parsing", "It ends too early: it may have been truncated on the way."),
    ("trailing characters", "There is something after the object: send only one object."),
    ("trailing comma", "Leave out the comma before the closing bracket."),
    ("control character", "In strings, line ends and other control characters are escaped, as in \\n."),
    ("hex escape", "Escapes of surrogates, \\ud800 to \\udfff, come in pairs."),
    ("unicode code point", "Text must be UTF-8."),
    ("invalid escape", "A backslash itself is written \\\\."),
    ("key must be a string", "Names are in double quotes."),
)
_PLACE: Final = re.compile(r"line (\d+) column (\d+)$")
_NO_NUMBERS: Final = (b"NaN", b"Infinity", b"-Infinity")

# JSON strings may contain these characters, but some clients split a stream at them (Python's str.splitlines).
_LINE_ENDS: Final = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}

# For each Pydantic error type: the expected type, as error messages name it.
_EXPECTED: Final = {
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "string_or_parts": "a string or an array of text parts",
    "string_or_array": "a string or an array of strings",
    "string_or_object": "a string or an object",
    "prompts": "a string, token ids, or an array of strings or of arrays of token ids",
    "string_or_ids": "a string or an array of token ids",
    "an_object": "an object",
    "string_or_items": "a string or an array of items",
}

# Tags of the types in unions. Pydantic adds the chosen tag to an error's path; error messages must not show it.
_BRANCHES: Final = frozenset(
    {
        *("<string>", "<array>", "<object>"),
        *("<message>", "<call>", "<output>", "<custom call>", "<custom output>", "<reasoning>", "<reference>"),
        *("<function>", "<custom>", "<namespace>", "<other>"),
    }
)


def parses_in_a_moment(raw: bytes) -> bool:
    """Returns whether a body is small enough to parse and check in one or two milliseconds, whatever its content."""
    return len(raw) <= _MOMENT_BYTES and len(raw.translate(None, _NO_STRUCTURE)) <= _MOMENT_ITEMS


def has_more_items(raw: bytes, most: int) -> bool:
    """Returns whether JSON text has more than `most` items: opening brackets and commas outside strings.

    Their number limits the number of values that a parser creates. The count is exact for valid JSON, and for the text
    before the first error. Counting takes milliseconds, and other threads run meanwhile. Parsing a million items would
    block them for a second.
    """
    return have_more_items([raw], most)


def have_more_items(texts: Sequence[bytes], most: int) -> bool:
    """Returns whether several JSON texts together have more than `most` items. See `has_more_items`."""
    if sum(len(raw.translate(None, _NO_STRUCTURE)) for raw in texts) <= most:  # an upper bound: it counts strings, too
        return False
    items = 0
    for raw in texts:
        is_inside, is_escaped = False, False
        for start in range(0, len(raw), _PIECE):
            piece = raw[start + is_escaped : start + _PIECE].replace(rb"\\", b"")
            is_escaped = piece.endswith(b"\\")  # the last character of the piece escapes the next piece's first
            parts = piece.replace(rb"\"", b"").split(b'"')
            outside = parts[1::2] if is_inside else parts[::2]
            is_inside ^= len(parts) % 2 == 0
            items += len(b"".join(outside).translate(None, _NO_STRUCTURE))
            if items > most:
                return True
    return False


def parse_object(raw: bytes, max_bytes: int, max_items: int = MAX_ITEMS) -> dict[str, Any]:
    """Returns the JSON object in `raw`. The last occurrence of a repeated member counts.

    Raises ApiError (400) for a body that is too large or has too many items, before parsing it. Then raises ApiError
    (400) for anything that RFC 8259 does not allow, and for NaN, Infinity, lone surrogates and nesting deeper than 200
    levels. The message has the position and advice on what to change.
    """
    if len(raw) > max_bytes:
        raise errors.body_too_large(max_bytes)
    if has_more_items(raw, max_items):
        raise errors.invalid_format(f"The body has more than {max_items} values. Send shorter arrays and objects.")
    if not raw.strip():
        raise errors.invalid_format("The body is empty: expected a JSON object.")
    try:
        parsed = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        hint = _hint(raw, str(error))
        raise errors.invalid_format(f"The body is not valid JSON: {error}. {hint}") from None
    if not isinstance(parsed, dict):
        raise errors.invalid_format(f"The body must be a JSON object, but it is {describe_value(parsed)}.")
    return parsed


def _hint(raw: bytes, complaint: str) -> str:
    """Returns advice on what to change in a body that is not JSON."""
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
            return "NaN and Infinity are not valid JSON: send a number, or leave the field out."
        if found.startswith(b"'"):
            return "Names and strings are in double quotes."
    return "Expected one JSON object."


class Shape(BaseModel):
    """A JSON object with typed members. Types are strict: true is not a number, and 1.0 is not an integer."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, use_attribute_docstrings=True)


class FirstFault(FailFast):
    """Stops at a list's first bad item: a body with a million bad items must not cost a million error reports."""

    __hash__ = object.__hash__  # pydantic's FailFast is not hashable, but annotations in a union must be


def keywords(**more: Any) -> Any:
    """Adds JSON Schema keywords to those of a field's type, for the OpenAPI document."""
    return Field(json_schema_extra=more)


def either(error: str) -> Discriminator:
    """Returns the discriminator for a union whose types have the tags <string>, <array> and <object>.

    A value of any other type causes a Pydantic error of the type `error`.
    """
    return Discriminator(_branch, custom_error_type=error, custom_error_message=error)


def _branch(value: Any) -> str | None:
    if isinstance(value, str):
        return "<string>"
    if isinstance(value, list):
        return "<array>"
    return "<object>" if isinstance(value, dict) else None


def missing(field: str) -> NoReturn:
    """Raises a validator's error: `field` of the current object is missing."""
    raise PydanticCustomError("missing_field", "missing", {"field": field})


def wrong_type(kind: str, field: str, value: Any) -> NoReturn:
    """Raises a validator's error: `field` of the current object has a wrong type. `kind` is a key of `_EXPECTED`."""
    raise PydanticCustomError(kind, "type", {"field": field, "input": value})


def wrong_item(kind: str, steps: list[int], value: Any) -> NoReturn:
    """Raises the same error as `wrong_type` for an item of an array. `steps` are the indices that lead to the item."""
    raise PydanticCustomError(kind, "type", {"steps": steps, "input": value})


def typed(kind: type[ModelT], parsed: Mapping[str, Any]) -> ModelT:
    """Checks the object's types and returns it. Raises ApiError (400) for the first field that is missing or wrong."""
    try:
        return kind.model_validate(parsed)
    except ValidationError as error:
        raise _as_api_error(error.errors(include_url=False)[0]) from None


def _as_api_error(error: ErrorDetails) -> errors.ApiError:
    context = error.get("ctx", {})
    path = [step for step in error["loc"] if step not in _BRANCHES] + context.get("steps", [])
    field = _dotted([*path, context["field"]] if "field" in context else path)
    found = context.get("input", error["input"])
    kind = error["type"]
    if kind in ("missing", "missing_field") or found is None:
        return errors.invalid_format(f"{field} is missing (null counts as missing): it is required here.", field)
    expected = _EXPECTED.get(kind, "another type")
    return errors.invalid_format(f"{field} must be {expected}, but it is {describe_value(found)}.", field)


def _dotted(path: list[Any]) -> str:
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            step = step if len(step) <= 60 and step.isprintable() else quote(step)
            text += f".{step}" if text else step
    return text


def describe_value(value: object) -> str:
    """Describes a JSON value for an error message: its type, and the value itself if it is short."""
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
    """Returns text as a short JSON string for an error message."""
    return _encode_str(text if len(text) <= 40 else text[:37] + "...")


def encode_json(value: Any) -> bytes:
    """Encodes JSON without spaces, as UTF-8. Replaces a surrogate pair with its character, a lone one with U+FFFD."""
    return _utf8(_encoded(value))


def encode_text(text: str) -> bytes:
    """Encodes one JSON string as UTF-8. Escapes every character that a line splitter could read as a line end."""
    return _utf8(_unbroken(_encode_str(text)))


def encode_line(value: Any) -> bytes:
    """Same as `encode_json`, but escapes every character that a line splitter could read as a line end."""
    return _utf8(_unbroken(_encoded(value)))


def _encoded(value: Any) -> str:
    try:
        return _encode(value)
    except ValueError:
        return _encode(_with_finite(value))


def _with_finite(value: Any) -> Any:
    """Replaces infinity, which the parser returns for numbers such as 1e999, with the largest finite number."""
    if isinstance(value, float):
        return None if isnan(value) else min(max(value, -_GREATEST), _GREATEST)
    if isinstance(value, dict):
        return {name: _with_finite(one) for name, one in value.items()}
    return [_with_finite(one) for one in value] if isinstance(value, list | tuple) else value


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
