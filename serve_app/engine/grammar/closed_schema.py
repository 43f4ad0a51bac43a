"""Closes the objects of a JSON schema: properties that an object's schema does not mention are not allowed.

JSON Schema allows them by default, and models then invent properties. A schema with `additionalProperties` or a similar
keyword stays as it is. Schemas that apply to the same object are closed together: the parts of an `allOf`, or a `$ref`,
`anyOf` or `oneOf` beside `properties`. The object may have the properties of all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

# An object's schema with one of these keywords already restricts the other properties, or the whole object.
_DECIDES: Final = frozenset(
    {
        "additionalProperties", "const", "$dynamicRef", "dependentRequired", "dependentSchemas", "else", "enum", "if",
        "not", "propertyNames", "then", "unevaluatedProperties",
    }
)  # fmt: skip
_MAX_STEPS: Final = 20_000  # per schema, to find property names; a schema that needs more stays open
_BRANCHES: Final = ("allOf", "anyOf", "oneOf")
_BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions")
_LISTS: Final = ("prefixItems", *_BRANCHES)
_SINGLE: Final = ("items", "additionalItems", "additionalProperties")


def closed(schema: Any) -> Any:
    """A copy of a schema with closed objects. The schema of an object stays open if it mentions no properties."""
    return _Closing(schema).closed(schema, False)


class _Closing:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps = _MAX_STEPS
        self._merged: set[int] = set()  # ids of schemas that are merged with others somewhere
        self._find_merged()

    def closed(self, schema: Any, is_merged: bool) -> Any:
        if not isinstance(schema, dict):
            return schema
        is_merged = is_merged or id(schema) in self._merged
        merges = is_merged or _merges(schema)
        is_described = "properties" in schema or "patternProperties" in schema or merges
        names = self._names([schema], merges) if is_described and not is_merged else None
        others = self._names(self._parts(schema)) or {} if "properties" in schema and merges else {}
        result: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _BY_NAME and isinstance(value, dict):
                own = key == "properties"
                result[key] = {k: self.closed(part, own and (is_merged or k in others)) for k, part in value.items()}
            elif key in _LISTS and isinstance(value, list):
                result[key] = [self.closed(part, key in _BRANCHES and merges) for part in value]
            else:
                result[key] = self.closed(value, False) if key in _SINGLE else value
        minimum, listed = schema.get("minProperties"), result.get("properties", {})
        if names is None or not isinstance(listed, dict) or (merges and not names):
            return result
        if isinstance(minimum, int) and minimum > len(names):
            return result
        return {**result, "properties": {**{name: {} for name in names}, **listed}, "additionalProperties": False}

    def _names(self, schemas: Iterable[Any], merged: bool = True) -> dict[str, None] | None:
        """The property names in `schemas` and in schemas merged with them; None if `schemas` must stay open."""
        names: dict[str, None] = {}
        left, seen = list(schemas), set[int]()
        while left:
            schema = left.pop(0)
            self._steps -= 1
            if id(schema) in seen:
                continue
            seen.add(id(schema))
            if not isinstance(schema, dict) or not _DECIDES.isdisjoint(schema) or self._steps < 0:
                return None
            if merged and "patternProperties" in schema:
                return None  # the other schemas, once closed, would forbid what the pattern allows
            if _allows_object(schema):
                names |= dict.fromkeys(_mapping(schema.get("properties")))
                names |= dict.fromkeys(name for name in _list(schema.get("required")) if isinstance(name, str))
                left = [*self._parts(schema), *left]
        return names

    def _parts(self, schema: Mapping[str, Any]) -> Iterator[Any]:
        for key in _BRANCHES:
            yield from _list(schema.get(key))
        if isinstance(reference := schema.get("$ref"), str):
            yield self._target(reference)

    def _target(self, reference: str) -> Any:
        found = self._root if reference.startswith("#") else None
        for step in reference.removeprefix("#").split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            found = found.get(step) if isinstance(found, dict) else None
        return found

    def _find_merged(self) -> None:
        """Finds all schemas that some `$ref` merges with other schemas."""
        left: list[tuple[Any, bool]] = [(self._root, False)]
        while left:
            schema, is_merged = left.pop()
            if isinstance(schema, list):
                left += [(part, is_merged) for part in schema]
            if not isinstance(schema, dict):
                continue
            is_merged = is_merged or _merges(schema)
            if is_merged and isinstance(reference := schema.get("$ref"), str):
                target = self._target(reference)
                if id(target) not in self._merged:
                    self._merged.add(id(target))
                    left.append((target, True))
            for key, value in schema.items():
                if key in _BRANCHES:
                    left.append((value, is_merged))
                elif key in _BY_NAME and isinstance(value, dict):
                    left.append((list(value.values()), False))
                elif key in _LISTS or key in _SINGLE:
                    left.append((value, False))


def _merges(schema: Mapping[str, Any]) -> bool:
    """Whether several subschemas apply to the same object. The alternatives of one `anyOf` or `oneOf` count as one."""
    branches = [_list(schema.get(key)) for key in _BRANCHES if key in schema]
    ways = len(branches) + ("$ref" in schema) + ("properties" in schema or "required" in schema)
    return bool(branches or "$ref" in schema) and (ways > 1 or len(_list(schema.get("allOf"))) > 1)


def _allows_object(schema: Mapping[str, Any]) -> bool:
    kind = schema.get("type", "object")
    return kind == "object" or (isinstance(kind, list) and "object" in kind)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
