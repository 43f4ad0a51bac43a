"""Turns tokens into text as they come: never half a character, never any part of a stop string."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence as Seq
from typing import Any, Protocol

_LONGEST_CHARACTER = 4  # bytes, in UTF-8


class TokenDecoder(Protocol):
    """Text of one sequence, token by token.

    All parts together equal the tokenizer's own decoding, except that the beginning of a character at the very end,
    where a reply was cut, is no text: it would be a broken character.
    """

    def push(self, token: int) -> str:
        """Text that the token completes; empty while a character is unfinished."""

    def show(self, token: int) -> str:
        """Text held back, and then the name of this special token."""

    def flush(self) -> str:
        """Text held back, without a character that was not completed; call once, at the end."""


def bytes_of_unicode() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes, backwards (`bytes_to_unicode` in openai/gpt-2, encoder.py)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class ByteLevelDecoder:
    """For byte-level BPE: every token is a string of bytes, so decoding is exact and O(1) per token."""

    _BYTES = bytes_of_unicode()

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Text that the token completes."""
        return self._utf8.decode(self._vocabulary.token_bytes(token))

    def show(self, token: int) -> str:
        """The replacement character for what is unfinished, as the tokenizer has it, and then the token's name."""
        return self._utf8.decode(b"", final=True) + self._vocabulary.name(token)

    def flush(self) -> str:
        """Nothing: only bytes of an unfinished character are ever held back."""
        return ""


class WindowDecoder:
    """For any other tokenizer: decodes a short window of tokens and takes what is new.

    The window keeps the tokens of the text released last, because decoders look at neighbours (the space before a
    word, bytes of one character).
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._window: list[int] = []
        self._context = 0  # tokens at the window's start whose text is out
        self._released = ""  # their text

    def push(self, token: int) -> str:
        """Text that the token completes."""
        if token in self._vocabulary.special:
            return ""
        self._window.append(token)
        text = self._vocabulary.decode(self._window)
        # A trailing replacement character is a character that later tokens may complete.
        if text.endswith("\ufffd") or len(text) <= len(self._released):
            return ""
        new = text[len(self._released) :]
        self._window = self._window[self._context :]
        self._context = len(self._window)
        self._released = self._vocabulary.decode(self._window)
        return new

    def show(self, token: int) -> str:
        """Text held back, and then the token's name; the window begins anew with it, as what its neighbours look at."""
        text = self._held(self._window) + self._vocabulary.name(token)
        self._window, self._context = [token], 1
        self._released = self._vocabulary.decode(self._window)
        return text

    def flush(self) -> str:
        """What was held back, replacement characters of the model's own included."""
        return self._held(self._window[: len(self._window) - self._unfinished()])

    def _held(self, window: list[int]) -> str:
        return self._vocabulary.decode(window)[len(self._released) :]

    def _unfinished(self) -> int:
        """How many byte tokens at the window's end are the beginning of a character."""
        run = b""
        for token in reversed(self._window):
            byte = self._vocabulary.byte_of(token)
            if byte is None or len(run) == _LONGEST_CHARACTER:
                break
            run = byte + run
        for start in range(len(run)):
            if _begins_character(run[start:]):
                return len(run) - start
        return 0


class Vocabulary:
    """What detokenizing needs of a tokenizer, shared by all sequences. Safe to use from several threads."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.special = frozenset(tokenizer.all_special_ids) | frozenset(
            i for i, added in tokenizer.added_tokens_decoder.items() if added.special
        )
        self.special_names = {str(tokenizer.convert_ids_to_tokens(token)): token for token in self.special}
        self.is_byte_level = _is_byte_level(tokenizer)
        self._bytes: dict[int, bytes] = {}

    def decoder(self) -> TokenDecoder:
        """A decoder for a new sequence."""
        return ByteLevelDecoder(self) if self.is_byte_level else WindowDecoder(self)

    def decode(self, tokens: Seq[int]) -> str:
        """The tokenizer's own decoding of a few tokens, special ones by their names."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def name(self, token: int) -> str:
        """A special token's name."""
        return str(self.tokenizer.convert_ids_to_tokens(token))

    def special_among(self, names: Seq[str]) -> frozenset[int]:
        """The special tokens that have one of these names; others name none."""
        return frozenset(self.special_names[name] for name in names if name in self.special_names)

    def token_bytes(self, token: int) -> bytes:
        """The bytes a byte-level token stands for; none for special tokens and ids without a token."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._find_bytes(token)
        return known

    def spelling(self, token: int) -> bytes:
        """The bytes that a token shows to people: its text, blanks included, or a special token's name."""
        if self.is_byte_level and token not in self.special:
            return self.token_bytes(token)
        name = self.tokenizer.convert_ids_to_tokens(token)
        if name is None or token in self.special:
            return str(name or "").encode()
        # As sentencepiece writes bytes and blanks.
        return self.byte_of(token) or str(name).replace("\u2581", " ").encode()

    def byte_of(self, token: int) -> bytes | None:
        """The byte of a sentencepiece token that stands for one; None for other tokens."""
        match = re.fullmatch("<0x([0-9A-F]{2})>", str(self.tokenizer.convert_ids_to_tokens(token)))
        return bytes.fromhex(match[1]) if match else None

    def _find_bytes(self, token: int) -> bytes:
        if token in self.special:
            return b""
        text = self.tokenizer.convert_ids_to_tokens(token)
        if text is None:
            return b""
        stand_ins = ByteLevelDecoder._BYTES
        if any(c not in stand_ins for c in text):
            # As the tokenizers library does: a token with a foreign character, an added one, stands for itself.
            return str(text).encode()
        return bytes(stand_ins[c] for c in text)


def _begins_character(data: bytes) -> bool:
    """Whether these bytes are the beginning of one UTF-8 character and not all of it."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        return decoder.decode(data) == "" and decoder.getstate()[0] == data
    except UnicodeDecodeError:
        return False


def _is_byte_level(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    return decoder.get("type") == "ByteLevel"


class StopFinder:
    """Releases text up to the first stop string and holds back whatever might become one.

    The first is the one that is complete first, of several that end together the longest: so it does not matter
    how the text is cut into pushes.

    Holds at most the length of the longest stop string. A push costs O(its text) for each stop string and a copy of
    what is held, whatever the strings are: they come from clients (Knuth, Morris and Pratt, SIAM J. Comput. 6, 1977).
    """

    def __init__(self, stops: Seq[str]) -> None:
        self._matches = [_Match(stop) for stop in stops if stop]
        self._begins = frozenset(match.stop[0] for match in self._matches)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Text that is safe to release. After a stop string was found, nothing is."""
        if self.found or not self._matches:
            return "" if self.found else text
        if not self._held and self._begins.isdisjoint(text):
            return text
        end = len(self._held)
        text, new = self._held + text, text
        for character in new:
            end += 1
            complete = [len(match.stop) for match in self._matches if match.push(character)]
            if complete:
                self.found, self._held = True, ""
                return text[: end - max(complete)]
        keep = max(match.length for match in self._matches)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held


class _Match:
    """How much of the start of one stop string the text ends with.

    `_borders[n]` is the length of the longest start of the first n characters, short of all, that they also end with.
    It grows with the longest match, so that a string of a megabyte costs nothing while the text is another.
    """

    __slots__ = ("_borders", "length", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        self._borders = [0, 0]

    def push(self, character: str) -> bool:
        """Whether this character completes the string; nothing may be pushed after that."""
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
    """Says with which token a text first occurred; a push costs O(its text + the mark)."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._tail = ""  # the last of the text, one character short of the mark
        self._tokens = 0
        self.found_at: int | None = None  # tokens, the one that completed the mark included

    def push(self, text: str, tokens: int = 1) -> None:
        """Take the text that so many more tokens came to."""
        self._tokens += tokens
        if self.found_at is None:
            text = self._tail + text
            if self._mark in text:
                self.found_at = self._tokens
            self._tail = text[max(0, len(text) - len(self._mark) + 1) :]


class Detokenizer:
    """The text of one sequence: a token decoder followed by a stop finder.

    Stop strings count from the text of token `min_tokens` on. `shown` and `mark` are as in `SamplingParams`.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        stop: Seq[str] = (),
        min_tokens: int = 0,
        shown: Seq[str] = (),
        mark: str = "",
    ) -> None:
        self._decoder = vocabulary.decoder()
        self._stops = StopFinder(stop)
        self._unchecked = min_tokens
        self._shown = vocabulary.special_among(shown)
        self._mark = MarkFinder(mark) if mark else None

    @property
    def marked_tokens(self) -> int | None:
        """How many tokens it took to complete the mark; None where it has not come."""
        return self._mark.found_at if self._mark else None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; no text follows it."""
        return self._stops.found

    def push(self, token: int) -> str:
        """Text to release after this token."""
        text = self._decoder.show(token) if token in self._shown else self._decoder.push(token)
        if self._mark is not None:
            self._mark.push(text)
        if self._unchecked > 0:
            self._unchecked -= 1
            return text
        return self._stops.push(text)

    def finish(self) -> str:
        """Text still held back, checked for stop strings like the rest. Call once, at the end."""
        text = self._decoder.flush()
        if self._mark is not None:
            self._mark.push(text, tokens=0)
        text = self._stops.push(text)
        return text if self.stopped else text + self._stops.flush()
