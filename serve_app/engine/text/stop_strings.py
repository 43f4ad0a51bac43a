"""Finds stop strings and marks in text that arrives in pieces, and holds back the start of a stop string."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Releases text up to the first stop string, and holds back text that may be the start of one.

    With `keeps_stop`, it also releases the stop string.

    The first stop string is the string that completes first; if several complete with the same character, the longest
    of them. So the result does not depend on how the text is divided into pushes.

    Holds back at most the length of the longest stop string. Clients choose the strings, so the cost must not
    depend on their content: a push costs O(its text) per stop string, plus a copy of the held text (Knuth, Morris and
    Pratt, SIAM J. Comput. 6, 1977).
    """

    def __init__(self, stops: Sequence[str], *, keeps_stop: bool = False) -> None:
        self._keeps_stop = keeps_stop
        self._matches = [_Match(stop) for stop in stops if stop]
        self._begins = frozenset(match.stop[0] for match in self._matches)
        self._held = ""
        self.stop: str | None = None  # the string that was found

    @property
    def found(self) -> bool:
        return self.stop is not None

    def push(self, text: str) -> str:
        """Text that is safe to release; empty after a stop string was found."""
        if self.found or not self._matches:
            return "" if self.found else text
        if not self._held and self._begins.isdisjoint(text):
            return text
        end = len(self._held)
        text, new = self._held + text, text
        for character in new:
            end += 1
            complete = [match.stop for match in self._matches if match.push(character)]
            if complete:
                self.stop, self._held = max(complete, key=len), ""
                return text[: end if self._keeps_stop else end - len(self.stop)]
        num_held = max(match.length for match in self._matches)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """The held text. Called at the end, when it can no longer become a stop string."""
        held, self._held = self._held, ""
        return held


class _Match:
    """Tracks the longest prefix of one stop string that the text ends with; `length` is its length.

    `_borders[n]` is the length of the longest proper prefix of the first n characters that is also their suffix. The
    list grows with the longest match, so a stop string of a megabyte costs nothing while the text does not match.
    """

    __slots__ = ("_borders", "length", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        self._borders = [0, 0]

    def push(self, character: str) -> bool:
        """Whether this character completes the string. If it does, this must be the last push."""
        self.length = self._longer(self.length, character)
        if self.length == len(self.stop):
            return True
        if self.length == len(self._borders):
            self._borders.append(self._longer(self._borders[-1], self.stop[self.length - 1]))
        return False

    def _longer(self, length: int, character: str) -> int:
        stop, borders = self.stop, self._borders
        while length and stop[length] != character:
            length = borders[length]
        return length + 1 if stop[length] == character else 0


class MarkFinder:
    """Finds the token that completes the first occurrence of a mark. A push costs O(its text + the mark)."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._tail = ""  # the end of the text, one character shorter than the mark
        self._tokens = 0
        self.found_at: int | None = None  # number of tokens, including the token that completed the mark

    def push(self, text: str, tokens: int = 1) -> None:
        self._tokens += tokens
        if self.found_at is None:
            text = self._tail + text
            if self._mark in text:
                self.found_at = self._tokens
            self._tail = text[max(0, len(text) - len(self._mark) + 1) :]
