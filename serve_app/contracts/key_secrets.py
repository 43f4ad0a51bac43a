"""Moving keys and sealed secrets from the key secret before to the current one, while both are valid.

A key has at most two digests: `digest`, and `moved_digest` under the secret that replaced that of `digest`. It is found
by either, so processes that know only one of the two secrets work beside those that know both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from serve_app.contracts.commands import Command
from serve_app.contracts.key_format import Hashed

MAX_MOVES: Final = 200  # of one command


@dataclass(frozen=True, slots=True)
class KeyMove:
    """A key that was found by `before` is to be found by `after` as well."""

    before: Hashed
    after: Hashed


@dataclass(frozen=True, slots=True)
class MoveKeys(Command[list[bool]]):
    """Moves API keys and management keys, up to MAX_MOVES: whether each has its new digest now.

    What has it already stays unchanged, and so does a key that has neither digest any more. Raises InvalidValue.
    """

    moves: tuple[KeyMove, ...]


@dataclass(frozen=True, slots=True)
class UnmovedKey:
    """An active key without a digest under the current secret."""

    kind: Literal["api", "management"]
    key_id: str
    account_id: str
    account_name: str
    name: str
    hint: str
    created_at: float
    mark: str | None  # of the secret that it is under; None: it is of a release that wrote no marks
    last_day: str | None  # with a settled request, YYYY-MM-DD; None: never, or a management key


@dataclass(frozen=True, slots=True)
class UnmovedKeys:
    """How many active keys have a digest under the secret with the mark, how many do not, and a page of the latter."""

    moved: int
    unmoved: int
    rows: tuple[UnmovedKey, ...]
    next: str | None = None  # `after` of the next page


@dataclass(frozen=True, slots=True)
class ListUnmoved(Command[UnmovedKeys]):
    """In the order of the keys' ids. A key that is revoked or has expired is not active. Raises InvalidValue."""

    mark: str
    after: str = ""
    limit: int = 100


@dataclass(frozen=True, slots=True)
class SealedSecret:
    """A secret of `table`'s row `row_id` as it is stored; see `contracts.sealed` for its purpose."""

    table: Literal["users", "alerts", "notices"]
    row_id: str
    purpose: str
    stored: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ListSealed(Command[tuple[list[SealedSecret], str | None]]):
    """Up to 200 sealed secrets in use, and where to go on; None at the end."""

    after: str = ""


@dataclass(frozen=True, slots=True)
class Reseal(Command[int]):
    """Replaces what is stored, where it is still what was listed; returns how many. `anew` belongs to `sealed`."""

    sealed: tuple[SealedSecret, ...]
    anew: tuple[str, ...] = field(repr=False)
