"""Which tokens of a reply are sent with their log-probabilities: those of its text, and none of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.contracts.generation import TokenLogprob


class TokenAligner:
    """Keeps the tokens of one reply in step with its text.

    A token is sent with the text that its first byte lies in. Tokens that are ahead of the text wait: they may be the
    beginning of a stop string, of which neither text nor tokens are sent. So the same tokens are sent however the
    engine cuts the reply into deltas, and those that still wait at its end belong to a stop string. With tokenizers
    that mark words by blanks, the blank before the first word of a reply is in its token and not in the text.

    Where tokens do not spell the text byte by byte (special tokens have a name and no text, halves of a character
    that was never completed become U+FFFD), all that wait are sent with the text that shows it, and the next ones are
    in step again.
    """

    __slots__ = ("_ahead", "_may_drop", "_waiting")

    def __init__(self) -> None:
        self._waiting: list[TokenLogprob] = []
        self._ahead = b""  # what the tokens so far spell beyond the text so far
        self._may_drop = True  # the reply's first blank is not known to be in the text

    def align(self, text: str, tokens: Sequence[TokenLogprob]) -> tuple[TokenLogprob, ...]:
        """The tokens to send with this text, of those that came with it or before."""
        self._waiting += tokens
        sent = text.encode(errors="replace")
        spelled = self._ahead + b"".join(token.raw for token in tokens)
        if self._may_drop and not spelled.startswith(sent) and spelled.startswith(b" " + sent):
            self._may_drop, spelled = False, spelled[1:]
        self._ahead = spelled[len(sent) :] if spelled.startswith(sent) else b""
        count = self._begun()
        due, self._waiting = tuple(self._waiting[:count]), self._waiting[count:]
        return due

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
