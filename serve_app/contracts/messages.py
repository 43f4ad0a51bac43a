"""Messages between processes, also between those of two releases."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Immutable data that is encoded as an array: the class's name, then the fields in their order.

    New fields come last and have defaults: those that an earlier release does not send get them, and those that a later
    release sends are ignored.
    """


def set_state(message: Any, state: list[Any]) -> None:
    """Unpickles a message. Fields that an earlier release did not send get their defaults.

    It is the `__setstate__` of a frozen dataclass with slots, whose new fields come last.
    """
    for number, field in enumerate(fields(message)):
        value = state[number] if number < len(state) else field.default
        if value is MISSING:
            raise TypeError(f"{type(message).__name__} comes without {field.name}")
        object.__setattr__(message, field.name, value)
