"""Reads `response_format`, and the fields with which clients of other servers set the form of a reply.

Forms that the service supports are enforced. Fields for forms that it could not enforce are refused; they are listed in
`refused_fields`.
"""

from __future__ import annotations

import re
from typing import Any, Final, Protocol

from pydantic_core import from_json

from serve_app.api import errors
from serve_app.api.codec import describe_value, quote
from serve_app.api.json_schemas import MAX_BYTES, check_schema

Form = dict[str, Any]
"""A `response_format`, or `{"type": "regex", "pattern": …}` for a reply that matches this regular expression."""

OTHER_FORMS: Final = frozenset({"guided_json", "guided_regex", "guided_choice", "structured_outputs"})
MAX_CHARACTERS: Final = 4 * MAX_BYTES  # maximum length of a schema sent as text, including line breaks


class Sent(Protocol):
    """The fields of a request that set the form of its reply."""

    guided_json: dict[str, Any] | str | None
    guided_regex: str | None
    guided_choice: list[str] | None
    structured_outputs: dict[str, Any] | None

    @property
    def plain_response_format(self) -> Form | None: ...

    @property
    def may_call(self) -> bool: ...


def form_of(sent: Sent) -> Form | None:
    """Returns the form that the request asks for; None for text. Raises ApiError: 400 for a wrong type, else 422."""
    found: dict[str, Form] = {}
    if sent.plain_response_format is not None:
        found["response_format"] = sent.plain_response_format
    if sent.guided_json is not None:
        found["guided_json"] = _json("guided_json", sent.guided_json)
    if sent.guided_regex is not None:
        found["guided_regex"] = _regex("guided_regex", sent.guided_regex)
    if sent.guided_choice is not None:
        found["guided_choice"] = _choice("guided_choice", sent.guided_choice)
    for name, value in (sent.structured_outputs or {}).items():
        field = f"structured_outputs.{name}"
        if value is None or (value is False and name not in ("json", "regex", "choice")):
            continue
        if name not in _KINDS:
            kinds = ", ".join(_KINDS)
            raise errors.invalid_parameters(f"{field} can't be enforced. Send one of {kinds}.", field)
        found[field] = _KINDS[name](field, value)
    if len(found) > 1:
        first, second, *_ = found
        raise errors.invalid_parameters(f"{second} and {first} both set the form of the reply: send only one.", second)
    for field, form in found.items():
        if form["type"] == "regex" and sent.may_call:
            rule = "cannot be combined with tools that may be called. Leave one of them out, or send tool_choice: none"
            raise errors.invalid_parameters(f"{field} {rule}.", field)
    return next(iter(found.values()), None)


def _json(field: str, value: Any) -> Form:
    schema = value
    if isinstance(value, str):
        if len(value) > MAX_CHARACTERS:
            rule = f"has {len(value)} characters: the maximum is {MAX_CHARACTERS}"
            raise errors.invalid_parameters(f"{field} {rule}.", field)
        try:
            schema = from_json(value, allow_inf_nan=False)
        except ValueError:
            raise errors.invalid_parameters(f"{field} is a string but not valid JSON: {quote(value)}.", field) from None
    if not isinstance(schema, dict):
        raise _wrong_type(field, "an object", schema)
    check_schema(field, schema)
    return {"type": "json_schema", "json_schema": {"name": "schema", "schema": schema, "strict": True}}


def _regex(field: str, value: Any) -> Form:
    if not isinstance(value, str):
        raise _wrong_type(field, "a string", value)
    if not value:
        raise errors.invalid_parameters(f"{field} must not be empty.", field)
    check_schema(field, {"pattern": value})
    return {"type": "regex", "pattern": value}


def _choice(field: str, value: Any) -> Form:
    if not isinstance(value, list):
        raise _wrong_type(field, "an array of strings", value)
    for at, text in enumerate(value):
        if not isinstance(text, str):
            raise _wrong_type(f"{field}[{at}]", "a string", text)
        if not text:
            raise errors.invalid_parameters(f"{field}[{at}] must not be empty.", f"{field}[{at}]")
    if not value:
        raise errors.invalid_parameters(f"{field} must have at least one string.", field)
    check_schema(field, {"enum": value})
    return {"type": "regex", "pattern": "|".join(map(re.escape, value))}


def _object(field: str, value: Any) -> Form:
    if value is not True:
        raise _wrong_type(field, "true or false", value)
    return {"type": "json_object"}


def _wrong_type(field: str, expected: str, value: Any) -> errors.ApiError:
    return errors.invalid_format(f"{field} must be {expected}, but it is {describe_value(value)}.", field)


_KINDS: Final = {"json": _json, "regex": _regex, "choice": _choice, "json_object": _object}
