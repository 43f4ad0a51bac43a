"""Text as it arrives, for parsers that are written as generators and yield whenever they need more text.

The source holds the text that a parser skips until the parser knows whether it is plain text or syntax. At most a few
characters are read twice, so a reply takes linear time however it is split.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Final, TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]

MAX_DEPTH: Final = 200  # nesting of arrays and objects; recursive JSON parsers fail at some higher depth

_BLANKS: Final = " \t\r\n"
_SPACE = re.compile(f"[{_BLANKS}]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_HEX = re.compile(r"[0-9a-fA-F]")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_NUMBER_CHARACTERS = re.compile(r"[-+.0-9eE]+")
_LONGEST_NUMBER = 400  # characters; every double needs fewer
_LITERALS = {"t": "true", "f": "false", "n": "null"}


class Source:
    """The text that has arrived. `text[at:]` has not been skipped yet."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self._from = 0  # text[_from:at] was skipped but not passed on yet
        self._held: list[str] = []
        self._holds = True
        self._copy_to: Callable[[str], object] | None = None

    def feed(self, text: str) -> None:
        self.pass_on()
        self.text = self.text[self.at :] + text
        self.at = self._from = 0

    def copy_to(self, receiver: Callable[[str], object] | None, hold: bool = True) -> None:
        """Passes the text skipped from here on to `receiver`, with control characters in strings escaped.

        The unescaped text is also held, unless `hold` is False.
        """
        self.pass_on()
        self._copy_to, self._holds = receiver, hold

    @property
    def is_over(self) -> bool:
        """Whether the reply has ended and all of it was skipped."""
        return self.ended and self.at == len(self.text)

    def take_held(self) -> str:
        """Returns the text that was skipped and held, and stops holding it."""
        self.pass_on()
        held = "".join(self._held)
        self._held.clear()
        return held

    def put_back_held(self) -> None:
        """Makes the held text unread, so that it is read again."""
        self.text = self.take_held() + self.text[self.at :]
        self.at = self._from = 0

    def take_text(self, end: int) -> str:
        """Skips the text up to `end` and returns the held text. White space at the end stays held."""
        text = ""
        solid = self.at + len(self.text[self.at : end].rstrip(_BLANKS))
        if solid > self.at:
            self.at = solid
            text = self.take_held()
        self.at = end
        return text

    def holds_beginning_of(self, constants: tuple[str, ...]) -> bool:
        """Returns whether one of `constants` begins with the held text, without its surrounding white space."""
        self.pass_on()
        held = "".join(self._held).strip(_BLANKS)
        return any(constant.startswith(held) for constant in constants)

    def pass_on(self, escaped: str | None = None) -> None:
        """Holds and copies the text skipped so far. `escaped` replaces the text in the copy."""
        if self.at > self._from:
            piece = self.text[self._from : self.at]
            if self._holds:
                self._held.append(piece)
            if self._copy_to is not None:
                self._copy_to(piece if escaped is None else escaped)
            self._from = self.at

    # The methods below are a parser's steps. They treat the end of the reply like an unexpected character.

    def more(self) -> Steps[bool]:
        """Waits for a character. Returns False at the end of the reply."""
        while self.at == len(self.text):
            if self.ended:
                return False
            yield
        return True

    def next_char(self) -> Steps[str]:
        """Returns the next character without skipping it; empty at the end of the reply."""
        if self.at < len(self.text) or (yield from self.more()):
            return self.text[self.at]
        return ""

    def skip_space(self) -> Steps[str]:
        """Skips JSON white space. Returns the character after it, like `next_char`."""
        if self.at < len(self.text) and self.text[self.at] not in _BLANKS:
            return self.text[self.at]
        while True:
            found = _SPACE.match(self.text, self.at)
            assert found is not None
            self.at = found.end()
            if self.at < len(self.text):
                return self.text[self.at]
            if not (yield from self.more()):
                return ""

    def skip(self, wanted: str) -> Steps[bool]:
        """Skips `wanted`. Returns False if other text comes; the characters that matched stay skipped."""
        return bool((yield from self.skip_any((wanted,))))

    def skip_span(self, characters: re.Pattern[str], limit: int) -> Steps[str]:
        """Skips and returns the longest run of `characters`, a repeated class such as `[a-z]+`, up to `limit`."""
        run = ""
        while len(run) < limit and (self.at < len(self.text) or (yield from self.more())):
            found = characters.match(self.text, self.at, self.at + limit - len(run))
            if not found:
                break
            run += found[0]
            self.at = found.end()
        return run

    def skip_any(self, constants: tuple[str, ...]) -> Steps[str]:
        """Skips and returns the next of `constants`; empty if none comes. No constant may be a prefix of another."""
        left, done = constants, 0
        while left:
            if self.at == len(self.text) and not (yield from self.more()):
                return ""
            left = tuple(c for c in left if c[done] == self.text[self.at])
            if left:
                self.at += 1
                done += 1
                if len(left[0]) == done:
                    return left[0]
        return ""

    # The methods below skip JSON text (RFC 8259). They use no recursion and build no values.

    def json_string(self) -> Steps[bool]:
        """Skips a string, which begins here. Returns False and stops at the first invalid character.

        Models write line breaks and other control characters into strings unescaped. These are passed on escaped.
        """
        self.at += 1
        while True:
            if self.at == len(self.text) and not (yield from self.more()):
                return False
            plain = _PLAIN.match(self.text, self.at)
            if plain:
                self.at = plain.end()
                continue
            c = self.text[self.at]
            if c == '"':
                self.at += 1
                return True
            if c == "\\":
                self.at += 1
                c = yield from self.next_char()
                if not c or c not in '"\\/bfnrtu':
                    return False
                self.at += 1
                if c == "u":
                    for _ in range(4):
                        c = yield from self.next_char()
                        if not _HEX.match(c):
                            return False
                        self.at += 1
            else:
                self.pass_on()
                self.at += 1
                self.pass_on(escaped=f"\\u{ord(c):04x}")

    def json_value(self) -> Steps[bool]:
        """Skips a value, which begins here. Returns False and stops at the first invalid character.

        A number ends before the first character that cannot be part of a number.
        """
        closers: list[str] = []
        wants = "value"  # what may come next; also "value or end", "key", "key or end", "colon", "next"
        while True:
            # A top-level value begins here; the caller has skipped any white space before it.
            c = yield from self.skip_space() if closers else self.next_char()
            if not c:
                return False
            if closers and c == closers[-1] and wants in ("next", "value or end", "key or end"):
                self.at += 1
                closers.pop()
            elif wants in ("value", "value or end"):
                if c in "{[":
                    if len(closers) == MAX_DEPTH:
                        return False
                    self.at += 1
                    closers.append("}" if c == "{" else "]")
                    wants = "key or end" if c == "{" else "value or end"
                    continue
                if not (yield from self._scalar(c)):
                    return False
            elif wants in ("key", "key or end") and c == '"':
                if not (yield from self.json_string()):
                    return False
                wants = "colon"
                continue
            elif (wants, c) in (("colon", ":"), ("next", ",")):
                self.at += 1
                wants = "key" if c == "," and closers[-1] == "}" else "value"
                continue
            else:
                return False
            if not closers:
                return True
            wants = "next"

    def _scalar(self, first: str) -> Steps[bool]:
        if first == '"':
            return (yield from self.json_string())
        if first in _LITERALS:
            return (yield from self.skip(_LITERALS[first]))
        number = yield from self.skip_span(_NUMBER_CHARACTERS, _LONGEST_NUMBER)
        return _NUMBER.fullmatch(number) is not None
