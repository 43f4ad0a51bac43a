"""The order in which waiting requests are admitted: an interface, and first come, first served."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from typing import Protocol

from serve_app.engine.scheduling.sequence import Sequence


class WaitingQueue(Protocol):
    """What the scheduler needs of a queue; see `fair_queue` for the one that the engine uses."""

    def push(self, sequence: Sequence) -> None:
        """Add a sequence."""

    def restore(self, sequence: Sequence) -> None:
        """Put back a sequence that was popped, where it stood: its tenant's later ones come after it."""

    def peek(self) -> Sequence | None:
        """The sequence that `pop` would return, None when empty."""

    def pop(self) -> Sequence:
        """Remove and return the next sequence; IndexError when empty."""

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence wherever it stands; KeyError if it is not here."""

    def charge(self, sequence: Sequence, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """Learn what an admitted sequence costs, as it is computed."""

    def has_share(self, tenant: str, places: int) -> bool:
        """Whether `tenant` waits with less than its even share of `places`, which no other's flood may take."""

    def most_served(self, claimant: str, tenants: Iterable[str]) -> str | None:
        """Of `tenants` the one that was served most, and not less than `claimant`; None where nobody has to yield."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]: ...


class FifoQueue:
    """First come, first served, whoever asks. Finding a place is O(log n), taking it moves n pointers at most."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []  # by arrival

    def push(self, sequence: Sequence) -> None:
        """Add a sequence where its arrival puts it: at the end, unless it was here before."""
        bisect.insort(self._sequences, sequence, key=_arrival)

    restore = push

    def peek(self) -> Sequence | None:
        """The oldest, None when empty."""
        return self._sequences[0] if self._sequences else None

    def pop(self) -> Sequence:
        """Remove and return the oldest; IndexError when empty."""
        return self._sequences.pop(0)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence; KeyError if it is not here."""
        index = bisect.bisect_left(self._sequences, sequence.arrival, key=_arrival)
        if index == len(self._sequences) or self._sequences[index] is not sequence:
            raise KeyError(sequence.request_id)
        del self._sequences[index]

    def charge(self, sequence: Sequence, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """Nothing: what a sequence costs does not change the order."""

    def has_share(self, tenant: str, places: int) -> bool:
        """Never: places are for whoever comes first."""
        return False

    def most_served(self, claimant: str, tenants: Iterable[str]) -> str | None:
        """Nobody: who came first need not yield."""
        return None

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
