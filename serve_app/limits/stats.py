"""What a limiter holds and has done, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Stats:
    """What the limiter holds now and has done since it started."""

    accounts: int
    keys: int
    open_holds: int
    held: int  # nano-units
    admitted: int
    released: int
    expired: int
    announced: int
    forgotten: int  # keys and accounts
    refused: dict[str, int] = field(default_factory=dict)  # by code
