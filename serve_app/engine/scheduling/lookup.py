"""Guesses what a sequence says next from where it said the same before: speculation without a draft model.

The last tokens are looked for further up in prompt and output, and what followed them there is the guess (LLMA, arXiv
2304.04487). The model verifies it in one step (speculative decoding, arXiv 2211.17192), so a wrong guess costs a wider
step and never a different text. Pure Python.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

_SHORTEST = 2  # tokens that must agree before what followed them is worth a guess
_LONGEST = 4  # more of them tell no better which place is meant
_CANDIDATES = 16  # places looked at for a longer agreement, latest first
_FIRST_GUESS = 2
_LONGEST_PAUSE = 64


class PairIndex:
    """Where each pair of neighbouring tokens has ended before: the hash chains of LZ77 over a growing sequence.

    `tokens` is the sequence's own list, which may only grow. A token costs one dictionary entry at most, about 100
    bytes, when it is first looked past; a look-up is O(1).
    """

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._latest: dict[int, int] = {}  # pair → where it ended last
        self._before = array("i", [-1] if tokens else [])  # place → where the pair that ends there ended before

    def continuation(self, count: int) -> tuple[int, ...]:
        """What followed the longest earlier occurrence of the last tokens, the latest among equals; maybe nothing.

        `count` tokens of it, or none. An occurrence that runs into the end is a cycle, and is continued as one.
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
    """How many tokens are worth guessing next, judged by how the last guesses fared: 0 to `most`.

    Twice as many as last time when all were right, else one more than were right. When none was, the next guess waits,
    each time twice as long: text that never repeats itself costs one row in every 64 steps.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._length = min(_FIRST_GUESS, most)
        self._misses = 0
        self._pause = 0

    def next(self) -> int:
        """Tokens to guess in this step; a pause gets shorter with every call."""
        if self._pause:
            self._pause -= 1
            return 0
        return self._length

    def judge(self, guessed: int, right: int) -> None:
        """Learn that the first `right` of `guessed` tokens, at least one, were what the model said."""
        if right:
            self._misses = 0
            self._length = min(self._most, 2 * self._length if right == guessed else right + 1)
        else:
            self._length = min(1, self._most)
            self._pause = min(_LONGEST_PAUSE, 1 << self._misses)
            self._misses = min(self._misses + 1, _LONGEST_PAUSE.bit_length())


class PromptLookup:
    """The guesses of one sequence of `tokens`: at most `most` at a time."""

    def __init__(self, tokens: list[int], most: int) -> None:
        self._index = PairIndex(tokens)
        self._length = GuessLength(most)

    def guess(self, limit: int) -> tuple[int, ...]:
        """At most `limit` tokens that may come next."""
        return self._index.continuation(min(limit, self._length.next()))

    def judge(self, guess: Seq[int], right: int) -> None:
        """Learn how many tokens of a guess that was verified were right."""
        self._length.judge(len(guess), right)
