"""Turns tokens into text one by one, without partial characters and without any part of a stop string."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import Any

from serve_app.engine.text.stop_strings import MarkFinder, StopFinder

_LONGEST_CHARACTER = 4  # bytes, in UTF-8


def bytes_of_unicode() -> dict[str, int]:
    """Map GPT-2's printable substitutes to bytes: `bytes_to_unicode` in openai/gpt-2 (encoder.py), inverted."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class ByteLevelDecoder:
    """Decodes one sequence of byte-level BPE tokens, one at a time, in O(1), because each token is a byte string.

    All parts together equal the tokenizer's decoding, except that an incomplete character at the end of the reply is
    omitted.
    """

    _BYTES = bytes_of_unicode()

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that the token completes; empty while a character is unfinished."""
        return self._utf8.decode(self._vocabulary.token_bytes(token))

    def show(self, token: int) -> str:
        """The text to release for a special token: U+FFFD if a character is unfinished, then the token's name."""
        return self._utf8.decode(b"", final=True) + self._vocabulary.name(token)

    def flush(self) -> str:
        """The held text, without an unfinished character; called once, at the end."""
        return ""  # only bytes of an unfinished character are ever held back


class WindowDecoder:
    """Decodes one sequence of tokens that are not byte-level: decodes a short window and releases the new text.

    The window keeps the tokens of the most recently released text, because a token's text depends on its neighbours
    (the space before a word, bytes of one character).
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._window: list[int] = []
        self._context = 0  # number of tokens at the window's start whose text was released
        self._released = ""  # the text of these tokens

    def push(self, token: int) -> str:
        if token in self._vocabulary.special:
            return ""
        self._window.append(token)
        text = self._vocabulary.decode(self._window)
        # Later tokens may complete a trailing replacement character.
        if text.endswith("\ufffd") or len(text) <= len(self._released):
            return ""
        new = text[len(self._released) :]
        self._window = self._window[self._context :]
        self._context = len(self._window)
        self._released = self._vocabulary.decode(self._window)
        return new

    def show(self, token: int) -> str:
        # The window restarts with this token, as the neighbour of the tokens that follow.
        text = self._held(self._window) + self._vocabulary.name(token)
        self._window, self._context = [token], 1
        self._released = self._vocabulary.decode(self._window)
        return text

    def flush(self) -> str:
        return self._held(self._window[: len(self._window) - self._unfinished()])

    def _held(self, window: list[int]) -> str:
        return self._vocabulary.decode(window)[len(self._released) :]

    def _unfinished(self) -> int:
        """Number of byte tokens at the window's end that are the start of a character."""
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
    """Turns tokens of one tokenizer into text; shared by all sequences. Safe to use from several threads."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.special = frozenset(tokenizer.all_special_ids) | frozenset(
            i for i, added in tokenizer.added_tokens_decoder.items() if added.special
        )
        self.special_names = {str(tokenizer.convert_ids_to_tokens(token)): token for token in self.special}
        self.is_byte_level = _is_byte_level(tokenizer)
        self._bytes: dict[int, bytes] = {}

    def decoder(self) -> ByteLevelDecoder | WindowDecoder:
        return ByteLevelDecoder(self) if self.is_byte_level else WindowDecoder(self)

    def decode(self, tokens: Sequence[int]) -> str:
        """The tokenizer's decoding of a few tokens; special tokens appear as their names."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def name(self, token: int) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(token))

    def special_among(self, names: Sequence[str]) -> frozenset[int]:
        """The special tokens with these names; unknown names are ignored."""
        return frozenset(self.special_names[name] for name in names if name in self.special_names)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a byte-level token; empty for special tokens and ids without a token."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._find_bytes(token)
        return known

    def spelling(self, token: int) -> bytes:
        """The bytes of a token's visible text, including spaces, or of a special token's name."""
        if self.is_byte_level and token not in self.special:
            return self.token_bytes(token)
        name = self.tokenizer.convert_ids_to_tokens(token)
        if name is None or token in self.special:
            return str(name or "").encode()
        # sentencepiece writes a byte as <0x0A>, and a space as U+2581.
        return self.byte_of(token) or str(name).replace("\u2581", " ").encode()

    def byte_of(self, token: int) -> bytes | None:
        """The byte of a sentencepiece token that represents a single byte; None for other tokens."""
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
            # As in the tokenizers library: an added token with other characters stands for itself.
            return str(text).encode()
        return bytes(stand_ins[c] for c in text)


def _begins_character(data: bytes) -> bool:
    """Whether these bytes are the incomplete beginning of one UTF-8 character."""
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


class Detokenizer:
    """The text of one sequence: a token decoder followed by a stop finder.

    Stop strings are searched for only after the first `min_tokens` tokens. `shown` and `mark` are as in
    `SamplingParams`. With `keeps_stop`, the text ends with the stop string, otherwise before it.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        shown: Sequence[str] = (),
        mark: str = "",
        *,
        keeps_stop: bool = False,
    ) -> None:
        self._decoder = vocabulary.decoder()
        self._stops = StopFinder(stop, keeps_stop=keeps_stop)
        self._unchecked = min_tokens  # number of next tokens that are not searched for stop strings
        self._shown = vocabulary.special_among(shown)
        self._mark = MarkFinder(mark) if mark else None

    @property
    def marked_tokens(self) -> int | None:
        """Number of tokens up to and including the token that completed the mark; None if it has not occurred."""
        return self._mark.found_at if self._mark else None

    @property
    def stop(self) -> str | None:
        """The stop string that was found."""
        return self._stops.stop

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; no text follows it."""
        return self._stops.found

    def push(self, token: int) -> str:
        """The text to release after this token."""
        text = self._decoder.show(token) if token in self._shown else self._decoder.push(token)
        if self._mark is not None:
            self._mark.push(text)
        if self._unchecked > 0:
            self._unchecked -= 1
            return text
        return self._stops.push(text)

    def finish(self) -> str:
        """The remaining held text, checked for stop strings like the rest; called once, at the end."""
        text = self._decoder.flush()
        if self._mark is not None:
            self._mark.push(text, tokens=0)
        text = self._stops.push(text)
        return text if self.stopped else text + self._stops.flush()
