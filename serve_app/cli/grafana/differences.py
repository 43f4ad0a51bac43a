"""What differs between two JSON documents, path by path, for people to read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

#: What names an item of a list, the most readable first: dashboards have panels, targets, variables.
_NAMES = ("title", "refId", "name", "uid", "id")
_SHOWN = 60  # characters of a value
_LEAD = 12  # equal characters that are shown before those that differ


@dataclass(frozen=True)
class Difference:
    """At `path`; a value that is missing is None."""

    path: str
    before: Any
    after: Any

    def line(self) -> str:
        if self.before is None:
            return f"{self.path}: + {_short(self.after)}"
        if self.after is None:
            return f"{self.path}: - {_short(self.before)}"
        before, after = self.before, self.after
        if isinstance(before, str) and isinstance(after, str):
            # Long expressions differ somewhere behind.
            equal = takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))
            start = len(list(equal)) - _LEAD
            before, after = (f"…{text[start:]}" if start > _LEAD else text for text in (before, after))
        return f"{self.path}: {_short(before)} → {_short(after)}"


def differences(before: Any, after: Any, path: str = "") -> Iterator[Difference]:
    """None where the documents are equal. A missing key equals null.

    Items of lists are matched by name where all have one, so that an inserted panel is one difference.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            yield from differences(before.get(key), after.get(key), f"{path}.{key}" if path else key)
    elif isinstance(before, list) and isinstance(after, list):
        yield from _of_lists(before, after, path)
    elif before != after:
        yield Difference(path, before, after)


def _of_lists(before: list[Any], after: list[Any], path: str) -> Iterator[Difference]:
    key = next((name for name in _NAMES if _all_named(before, name) and _all_named(after, name)), None)
    if key is None:
        for index in range(max(len(before), len(after))):
            was, will = (items[index] if index < len(items) else None for items in (before, after))
            yield from differences(was, will, f"{path}[{index}]")
        return
    old, new = ({str(item[key]): item for item in items} for items in (before, after))
    for name in dict.fromkeys([*new, *old]):
        yield from differences(old.get(name), new.get(name), f"{path}[{name}]")
    order = [[name for name in own if name in other] for own, other in ((old, new), (new, old))]
    if order[0] != order[1]:
        yield Difference(f"{path} (order)", order[0], order[1])


def _all_named(items: list[Any], key: str) -> bool:
    names = [str(item[key]) for item in items if isinstance(item, dict) and item.get(key)]
    return len(set(names)) == len(items)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
