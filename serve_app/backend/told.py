"""Which tokens of a reply may be told: those that its text is made of, and no token of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.engine.request import TokenLogprob


class ToldTokens:
    """Keeps the tokens of one reply in step with its text.

    A token goes with the text that its first byte lies in. Tokens that are ahead of the text wait: what they spell
    may be the beginning of a stop string, of which neither text nor tokens leave. So the same tokens are told however
    the engine cut the reply into deltas, and those that still wait at its end are those of a stop string. A blank that
    begins the first word of a reply is in its token alone, with the tokenizers that mark words by blanks.

    Where tokens do not spell the text byte by byte (special tokens have a name and no text, halves of a character
    that never was completed become U+FFFD), all that wait go with the text that shows it, and the next are in step.
    """

    __slots__ = ("_ahead", "_may_drop", "_waiting")

    def __init__(self) -> None:
        self._waiting: list[TokenLogprob] = []
        self._ahead = b""  # what the tokens so far spell beyond the text so far
        self._may_drop = True  # the reply's first blank is not known to be in the text

    def take(self, text: str, tokens: Sequence[TokenLogprob]) -> tuple[TokenLogprob, ...]:
        """The tokens to tell with this text, of those that came with it or before."""
        self._waiting += tokens
        out = text.encode(errors="replace")
        spelled = self._ahead + b"".join(token.raw for token in tokens)
        if self._may_drop and not spelled.startswith(out) and spelled.startswith(b" " + out):
            self._may_drop, spelled = False, spelled[1:]
        self._ahead = spelled[len(out) :] if spelled.startswith(out) else b""
        return self._take(self._begun())

    def _begun(self) -> int:
        """How many of the waiting tokens have their first byte in the text."""
        left = len(self._ahead)
        if not left:
            return len(self._waiting)
        for count in range(len(self._waiting), 0, -1):
            left -= len(self._waiting[count - 1].raw)
            if left < 0:
                return count
        return 0

    def _take(self, count: int) -> tuple[TokenLogprob, ...]:
        told, self._waiting = tuple(self._waiting[:count]), self._waiting[count:]
        return told
