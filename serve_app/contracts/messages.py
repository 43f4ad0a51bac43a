"""Reads messages that a process of an earlier release has sent."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any


def set_state(message: Any, state: list[Any]) -> None:
    """Unpickles a message. Fields that an earlier release did not send get their defaults.

    It is the `__setstate__` of a frozen dataclass with slots, whose new fields come last.
    """
    for number, field in enumerate(fields(message)):
        value = state[number] if number < len(state) else field.default
        if value is MISSING:
            raise TypeError(f"{type(message).__name__} comes without {field.name}")
        object.__setattr__(message, field.name, value)
