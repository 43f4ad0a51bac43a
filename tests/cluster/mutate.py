"""Broken copies of a parsed file: a check must reject each of them."""

from __future__ import annotations

import copy
from typing import Any

REMOVED = object()


def broken(document: Any, path: str, value: Any = REMOVED) -> Any:
    """A copy in which what lies at `path` is `value`, or gone. Parts are joined by slashes, positions are numbers."""
    result = copy.deepcopy(document)
    *parents, last = (int(part) if part.isdigit() else part for part in path.split("/"))
    node = result
    for part in parents:
        node = node[part]
    if value is REMOVED:
        del node[last]
    else:
        node[last] = value
    return result


def renamed(document: Any, path: str, name: str) -> Any:
    """A copy in which the key at `path` is misspelt as `name`."""
    *parents, last = path.split("/")
    node = document
    for part in parents:
        node = node[int(part) if part.isdigit() else part]
    return broken(broken(document, path), "/".join([*parents, name]), node[last])
