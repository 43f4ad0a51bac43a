"""Text as it arrives, for grammars written as generators that yield whenever they need more of it.

What a grammar steps over flows into the source's sink; by default it is held, to be released as plain text or dropped
once the grammar knows. Nothing is looked at twice, so a reply takes linear time however it is cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
Sink = Callable[[str, str], None]

_BLANKS = " \t\r\n"
_SPACE = re.compile(f"[{_BLANKS}]*")


class Source:
    """The text that has arrived and was not stepped over: `text[at:]`."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self._from = 0  # text[_from:at] was stepped over and is not in the sink yet
        self._held: list[str] = []
        self._sink: Sink = self._hold

    def append(self, text: str) -> None:
        """More text has arrived."""
        self.flush()
        self.text = self.text[self.at :] + text
        self.at = self._from = 0

    def drain_into(self, sink: Sink | None) -> None:
        """Send what is stepped over from here on to `sink(as it was, as it is to be passed on)`; None holds it."""
        self.flush()
        self._sink = sink or self._hold

    def hold_and_copy(self, copy: list[str]) -> None:
        """Hold what is stepped over from here on, and append what is to be passed on to `copy`."""

        def both(text: str, other: str) -> None:
            self._held.append(text)
            copy.append(other)

        self.drain_into(both)

    @property
    def over(self) -> bool:
        """Whether the reply has ended and all of it was stepped over."""
        return self.ended and self.at == len(self.text)

    def step_over_as(self, other: str) -> None:
        """Step over one character for which `other` is passed on."""
        self.flush()
        self._sink(self.text[self.at], other)
        self.at += 1
        self._from = self.at

    def take_held(self) -> str:
        """What was stepped over and held; it is held no more."""
        self.flush()
        held = "".join(self._held)
        self._held.clear()
        return held

    def holds_beginning_of(self, constants: tuple[str, ...]) -> bool:
        """Whether what is held begins one of `constants`, white space around it aside."""
        self.flush()
        held = "".join(self._held).strip(_BLANKS)
        return any(constant.startswith(held) for constant in constants)

    def flush(self) -> None:
        """What was stepped over so far goes into the sink."""
        if self.at > self._from:
            piece = self.text[self._from : self.at]
            self._sink(piece, piece)
            self._from = self.at

    def _hold(self, text: str, _: str) -> None:
        self._held.append(text)

    # What follows are steps of a grammar. At the end of the reply they fail as if another character were there.

    def more(self) -> Steps[bool]:
        """Wait for a character; False at the end of the reply."""
        while self.at == len(self.text):
            if self.ended:
                return False
            yield
        return True

    def peek(self) -> Steps[str]:
        """The next character, not stepped over; empty at the end of the reply."""
        if self.at < len(self.text) or (yield from self.more()):
            return self.text[self.at]
        return ""

    def space(self) -> Steps[str]:
        """Step over JSON white space; the character after it, as `peek` says."""
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

    def constant(self, wanted: str) -> Steps[bool]:
        """Step over `wanted`. On failure, what was alike has been stepped over, the first other character not."""
        done = 0
        while done < len(wanted):
            if self.at == len(self.text) and not (yield from self.more()):
                return False
            if self.text[self.at] != wanted[done]:
                return False
            self.at += 1
            done += 1
        return True

    def run(self, of: re.Pattern[str], most: int) -> Steps[str]:
        """Step over the longest run that matches `of`, which says one or more of some characters; at most `most`."""
        run = ""
        while len(run) < most and (self.at < len(self.text) or (yield from self.more())):
            found = of.match(self.text, self.at, self.at + most - len(run))
            if not found:
                break
            run += found[0]
            self.at = found.end()
        return run

    def any_of(self, constants: tuple[str, ...]) -> Steps[str]:
        """Step over the one of `constants` that comes, empty when none does; none may be another's beginning."""
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
