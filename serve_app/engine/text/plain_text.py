"""Encodes clients' text so that it yields no control tokens, such as the marker that ends a message.

If the text contains a control token's name, the name is encoded as ordinary tokens.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any


class Names:
    """Finds the names of control tokens in text. Its cost hardly grows with their number, which may be thousands.

    Names of one character are ignored, because no other tokens spell them.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.first_characters = sorted({name[0] for name in names if len(name) > 1})
        pattern = _any_of(sorted({name for name in names if len(name) > 1})) if self.first_characters else "(?!)"
        self._name = re.compile(pattern)
        self._begin = re.compile(f"(?={pattern}).", re.DOTALL)  # also finds names that overlap

    def begins(self, text: str) -> list[int]:
        """The positions at which a name begins."""
        if self._name.search(text) is None:
            return []
        return [match.start() for match in self._begin.finditer(text)]


class PlainText:
    """Encodes text with a fast tokenizer's `core`. `names` in the text become ordinary tokens. Thread-safe."""

    def __init__(self, core: Any, names: Iterable[str]) -> None:
        self._core = core
        self._names = Names(names)
        # Some tokenizers put a space before every text, except after a line break. For these, `encode_piece` encodes a
        # line break before the text, and removes that line break's tokens, `_before`.
        line_break = self._encode("\n")
        self._before = line_break if self._encode("\nx")[len(line_break) :] != self._encode("x") else []

    def encode(self, text: str) -> list[int]:
        """Token ids of a text that follows other text."""
        cuts = [0, *(begin + 1 for begin in self._names.begins(text)), len(text)]
        pieces = [text[start:end] for start, end in itertools.pairwise(cuts)]
        return [token for piece in pieces for token in self.encode_piece(piece)]

    def encode_piece(self, text: str) -> list[int]:
        """Token ids of a text that follows other text; names in it become control tokens."""
        if self._before:
            ids = self._encode(f"\n{text}")
            if ids[: len(self._before)] == self._before:
                return ids[len(self._before) :]
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        return token_ids(self._core, text)


def token_ids(core: Any, text: str, special_tokens: bool = False) -> list[int]:
    """Token ids of `text`, by a fast tokenizer's `core`.

    `special_tokens` adds the tokens that the tokenizer puts around a text by default.

    Encodes a batch of one text, because `encode` would hold the GIL: all other threads would wait for 30 ms if the text
    has 60 KB.
    """
    return list(core.encode_batch_fast([text], add_special_tokens=special_tokens)[0].ids)


def _any_of(texts: Sequence[str]) -> str:
    by_first: dict[str, list[str]] = {}
    for text in texts:
        if not text:
            return ""  # finding the shortest of several names that begin alike is enough
        by_first.setdefault(text[0], []).append(text[1:])
    ways = [re.escape(first) + _any_of(rest) for first, rest in by_first.items()]
    return ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})"
