"""Guesses a sequence's next tokens from an earlier occurrence of its last tokens: speculation without a draft model.

The search covers the prompt and the output. The guess consists of the tokens that follow the earlier occurrence (LLMA,
arXiv 2304.04487). The model verifies it in one step (speculative decoding, arXiv 2211.17192), so a wrong guess costs a
wider step but never changes the text. Pure Python.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

_SHORTEST = 2  # tokens that must match before a guess is worthwhile
_LONGEST = 4  # tokens; a longer match gives no better guess
_CANDIDATES = 16  # earlier places that are checked for a longer match, latest first
_FIRST_GUESS = 2  # tokens
_LONGEST_PAUSE = 64  # steps


class PairIndex:
    """An index of the places where each pair of adjacent tokens occurred earlier, like the hash chains of LZ77.

    `tokens` is the sequence's list, which may only grow. A token costs at most one dictionary entry, about 100 bytes. A
    look-up is O(1).
    """

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._latest: dict[int, int] = {}  # pair → index at which it last ended
        # Index at which a pair ends → index at which it ended before; -1: never.
        self._before = array("i", [-1] if tokens else [])

    def continuation(self, count: int) -> tuple[int, ...]:
        """The `count` tokens after the longest earlier occurrence of the last tokens; empty if there is none.

        Of equally long occurrences, the latest counts. If fewer than `count` tokens follow it, they are repeated.
        """
        self._catch_up()
        tokens, end = self._tokens, len(self._tokens) - 1
        if count < 1 or end < _SHORTEST:
            return ()
        place, best, agreed = self._before[end], -1, _SHORTEST - 1
        for _ in range(_CANDIDATES):
            if place < 0:
                break
            length = _SHORTEST
            while length < min(_LONGEST, place + 1) and tokens[place - length] == tokens[end - length]:
                length += 1
            if length > agreed:
                best, agreed = place, length
                if length == _LONGEST:
                    break
            place = self._before[place]
        if best < 0:
            return ()
        followed = tokens[best + 1 : best + 1 + count]
        while len(followed) < count:
            followed += followed[: count - len(followed)]
        return tuple(followed)

    def _catch_up(self) -> None:
        tokens, latest, before = self._tokens, self._latest, self._before
        if not before and tokens:
            before.append(-1)
        for place in range(len(before), len(tokens)):
            pair = tokens[place - 1] << 32 | tokens[place]
            before.append(latest.get(pair, -1))
            latest[pair] = place


class GuessLength:
    """The length of the next guess, from 0 to `limit`, based on the results of earlier guesses.

    The length doubles if all guessed tokens were right. Otherwise it becomes the number of right tokens plus one. If
    none was right, guessing pauses, each time for twice as long. If guesses are never right, they soon cost only one
    token in 65 steps.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._length = min(_FIRST_GUESS, limit)
        self._misses = 0
        self._pause = 0

    def next(self) -> int:
        """Number of tokens to guess in this step; each call shortens a pause."""
        if self._pause:
            self._pause -= 1
            return 0
        return self._length

    def learn(self, guessed: int, right: int) -> None:
        """Record that the model confirmed the first `right` of `guessed` >= 1 tokens."""
        if right:
            self._misses = 0
            self._length = min(self._limit, 2 * self._length if right == guessed else right + 1)
        else:
            self._length = min(1, self._limit)
            self._pause = min(_LONGEST_PAUSE, 1 << self._misses)
            self._misses = min(self._misses + 1, _LONGEST_PAUSE.bit_length())


class PromptLookup:
    """Guesses the next tokens of one sequence, at most `limit` at a time. `tokens` is the sequence's list."""

    def __init__(self, tokens: list[int], limit: int) -> None:
        self._index = PairIndex(tokens)
        self._length = GuessLength(limit)

    def guess(self, limit: int) -> tuple[int, ...]:
        return self._index.continuation(min(limit, self._length.next()))

    def learn(self, guess: Sequence[int], right: int) -> None:
        """Record how many tokens of a verified guess were right."""
        self._length.learn(len(guess), right)
