"""Secrets that the ledger stores sealed (`storage.sealing`), and the operations that rotate the key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from serve_app.contracts.commands import Command


@dataclass(frozen=True, slots=True)
class SealedSecret:
    """A secret as stored in a row of a table."""

    table: Literal["users", "alerts", "notices"]
    row_id: str
    purpose: str
    stored: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ListSealed(Command[tuple[list[SealedSecret], str | None]]):
    """Returns up to 200 sealed secrets in use, and `after` for the next page; None at the end."""

    after: str = ""


@dataclass(frozen=True, slots=True)
class Reseal(Command[int]):
    """Replaces secrets that have not changed since they were listed. Returns the number of replaced secrets.

    `resealed` has one text for each of `sealed`. Raises InvalidValue.
    """

    sealed: tuple[SealedSecret, ...]
    resealed: tuple[str, ...] = field(repr=False)
