"""Registers the functions that run the ledger's commands. A function registers itself where it is defined.

Each function takes its data source, the command, and the time in Unix seconds. The source is a connection with a
snapshot (`reads`), an open transaction (`writes`), or the database, for several short transactions (`runs_in_steps`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Connection

from serve_app.accounting.database import Database, Transaction
from serve_app.contracts.commands import Command

Read = TypeVar("Read", bound=Callable[[Connection, Any, float], Any])
Write = TypeVar("Write", bound=Callable[[Transaction, Any, float], Any])
Steps = TypeVar("Steps", bound=Callable[[Database, Any, float], Any])

LONG_S = 60.0  # for reads of many rows; a hanging connection is detected only after this time


@dataclass(frozen=True, slots=True)
class Reading:
    """A function that reads. `timeout_s` is None if the ledger's timeout applies."""

    run: Callable[[Connection, Any, float], Any]
    timeout_s: float | None


READS: dict[type[Command[Any]], Reading] = {}
WRITES: dict[type[Command[Any]], Callable[[Transaction, Any, float], Any]] = {}
STEPS: dict[type[Command[Any]], Callable[[Database, Any, float], Any]] = {}


def reads(command: type[Command[Any]], *, timeout_s: float | None = None) -> Callable[[Read], Read]:
    """Registers a function that reads one snapshot."""

    def register(function: Read) -> Read:
        READS[command] = Reading(function, timeout_s)
        return function

    return register


def writes(command: type[Command[Any]]) -> Callable[[Write], Write]:
    """Registers a function that runs in one write transaction."""

    def register(function: Write) -> Write:
        WRITES[command] = function
        return function

    return register


def runs_in_steps(command: type[Command[Any]]) -> Callable[[Steps], Steps]:
    """Registers a function that opens several short transactions."""

    def register(function: Steps) -> Steps:
        STEPS[command] = function
        return function

    return register
