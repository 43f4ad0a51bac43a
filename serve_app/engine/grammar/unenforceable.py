"""Finds the parts of a JSON schema that the grammar engine cannot enforce, to drop them or to report their path.

llguidance can ignore unknown keywords, but not keywords that it knows and cannot build: a pattern with look-around, or
a pattern combined with a length. This module tries the keywords of each subschema separately.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

Complaint = Callable[[Mapping[str, Any]], str]
"""Returns the grammar engine's objection to a schema; an empty string if the engine can enforce the schema."""

MAX_TRIES: Final = 400  # per schema; each try takes less than a millisecond
_STRINGS: Final = ("pattern", "format", "minLength", "maxLength")  # in the order in which they are dropped
_NUMBERS: Final = ("multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions")
_LISTS: Final = ("anyOf", "allOf", "oneOf", "prefixItems")
_SINGLE: Final = ("items", "additionalItems", "additionalProperties")

# Parts of objections to schemas that cannot be built. Other objections mean that no value fits the schema, or that the
# schema is invalid.
_CANNOT_BUILD: Final = (
    "regex parse error",
    "lookarounds not supported",
    "Unable to determine if regex is empty",
    "Failed to generate regex",
    "has too many digits",
    "Unknown format",
    "too many",
)


class TooManyTries(Exception):
    """The schema has more keywords than can be tried in time."""


def enforceable(schema: Any, complaint: Complaint) -> Any:
    """A copy of the schema without the keywords that keep it from being enforced. Raises TooManyTries."""
    return _enforceable(schema, _Tried(complaint))


def place_of(schema: Any, complaint: Complaint) -> str:
    """The path of the first keyword that `enforceable` drops; empty if it drops none or needs too many tries."""
    tried = _Tried(complaint)
    try:
        for path, part in parts(schema):
            for keyword in (*_faulty_keywords(part, tried), *_faulty_names(part, tried)):
                return f"{path}.{keyword}".removeprefix(".")
    except TooManyTries:
        pass
    return ""


def place_of_keyword(schema: Any, keyword: str) -> str:
    """The path of the keyword in the first subschema that has it; empty if there is none."""
    found = (path for path, part in parts(schema) if keyword in part)
    return next((f"{path}.{keyword}".removeprefix(".") for path in found), "")


def parts(schema: Any, path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each subschema that is an object, with its path; the whole schema comes first."""
    if not isinstance(schema, Mapping):
        return
    yield path, schema
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, Mapping):
            for name, part in value.items():
                yield from parts(part, f"{path}.{key}.{name}".removeprefix("."))
        elif key in _LISTS and isinstance(value, list):
            for number, part in enumerate(value):
                yield from parts(part, f"{path}.{key}[{number}]".removeprefix("."))
        elif key in _SINGLE:
            yield from parts(value, f"{path}.{key}".removeprefix("."))


class _Tried:
    """Remembers whether small schemas can be built; each is tried once."""

    def __init__(self, complaint: Complaint) -> None:
        self._complaint = complaint
        self._known: dict[str, bool] = {}

    def is_faulty(self, schema: Mapping[str, Any]) -> bool:
        text = json.dumps(schema, sort_keys=True)
        if text not in self._known:
            if len(self._known) >= MAX_TRIES:
                raise TooManyTries
            objection = self._complaint(schema)
            self._known[text] = any(words in objection for words in _CANNOT_BUILD)
        return self._known[text]


def _enforceable(schema: Any, tried: _Tried) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    dropped = set(_faulty_keywords(schema, tried))
    names = _faulty_names(schema, tried)
    # If a name's pattern cannot be enforced, any name must be allowed.
    kept: dict[str, Any] = {"additionalProperties": True} if names else {}
    for key, value in schema.items():
        if key in dropped or key in kept:
            continue
        if key in _BY_NAME and isinstance(value, Mapping):
            faulty = {name.partition(".")[2] for name in names} if key == "patternProperties" else ()
            kept[key] = {name: _enforceable(part, tried) for name, part in value.items() if name not in faulty}
        elif key in _LISTS and isinstance(value, list):
            kept[key] = [_enforceable(part, tried) for part in value]
        elif key in _SINGLE:
            kept[key] = _enforceable(value, tried)
        else:
            kept[key] = value
    return kept


def _faulty_keywords(part: Mapping[str, Any], tried: _Tried) -> list[str]:
    """Keywords to drop from this subschema so that the rest can be enforced. Does not look into nested schemas."""
    faulty = []
    for kinds, names in ((("string",), _STRINGS), (("number", "integer"), _NUMBERS)):
        left = {name: part[name] for name in names if name in part}
        allowed = part.get("type", kinds[0])
        kind = next((kind for kind in kinds if kind in (allowed if isinstance(allowed, list) else [allowed])), None)
        for name in list(left) if kind else ():
            if not tried.is_faulty({"type": kind, **left}):
                break
            del left[name]
            faulty.append(name)
    return faulty


def _faulty_names(part: Mapping[str, Any], tried: _Tried) -> list[str]:
    patterns = part.get("patternProperties")
    names = patterns if isinstance(patterns, Mapping) else ()
    return [f"patternProperties.{name}" for name in names if tried.is_faulty({"type": "string", "pattern": name})]
