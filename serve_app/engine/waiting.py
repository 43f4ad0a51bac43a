"""The order in which waiting requests are admitted: an interface, and first come, first served."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from serve_app.engine.sequence import Sequence


class WaitingQueue(Protocol):
    """What the scheduler needs of a queue; see `fair_queue` for the one that the engine uses."""

    def push(self, sequence: Sequence) -> None:
        """Add a sequence."""

    def peek(self) -> Sequence | None:
        """The sequence that `pop` would return, None when empty."""

    def pop(self) -> Sequence:
        """Remove and return the next sequence; IndexError when empty."""

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence wherever it stands; KeyError if it is not here."""

    def charge(self, sequence: Sequence, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """Learn what an admitted sequence costs, as it is computed."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]: ...


class FifoQueue:
    """First come, first served, whoever asks. Every operation is O(1)."""

    def __init__(self) -> None:
        self._sequences: OrderedDict[int, Sequence] = OrderedDict()

    def push(self, sequence: Sequence) -> None:
        """Add a sequence at the end."""
        self._sequences[sequence.arrival] = sequence

    def peek(self) -> Sequence | None:
        """The oldest, None when empty."""
        return next(iter(self._sequences.values()), None)

    def pop(self) -> Sequence:
        """Remove and return the oldest; IndexError when empty."""
        try:
            return self._sequences.popitem(last=False)[1]
        except KeyError:
            raise IndexError("pop from an empty queue") from None

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence; KeyError if it is not here."""
        del self._sequences[sequence.arrival]

    def charge(self, sequence: Sequence, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """Nothing: what a sequence costs does not change the order."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())
