"""Messages between processes, which may run different releases."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Immutable data that is encoded as an array: the class's name, then the fields in their order.

    New fields come last and have defaults. A field that an earlier release did not send gets its default. A field that
    only a later release knows is ignored.
    """


def set_state(message: Any, state: list[Any]) -> None:
    """Unpickles a message. Fields that an earlier release did not send get their defaults.

    Use it as the `__setstate__` of a frozen dataclass with slots. New fields of such a class must come last.
    """
    for number, field in enumerate(fields(message)):
        value = state[number] if number < len(state) else field.default
        if value is MISSING:
            raise TypeError(f"{type(message).__name__} was sent without {field.name}")
        object.__setattr__(message, field.name, value)
