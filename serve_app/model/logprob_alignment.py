"""Selects the tokens whose log-probabilities are sent: the tokens of the text, but not those of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.contracts.generation import TokenLogprob


class TokenAligner:
    """Keeps the tokens of one reply aligned with its text.

    A token is sent with the text that contains its first byte. Tokens ahead of the text wait, because they may begin a
    stop string, whose text and tokens are not sent. The tokens sent therefore do not depend on how the engine splits
    the reply into deltas. Tokens that still wait at the end of the reply belong to a stop string. With some tokenizers,
    the first token of a reply begins with a space that the text does not have.

    Sometimes tokens do not spell the text byte by byte: special tokens have a name and no text, and an incomplete
    character becomes U+FFFD. All waiting tokens are then sent with the text that differs, and alignment starts again
    with the next token.
    """

    __slots__ = ("_ahead", "_may_drop", "_waiting")

    def __init__(self) -> None:
        self._waiting: list[TokenLogprob] = []
        self._ahead = b""  # bytes of the tokens received so far that the text received so far does not have yet
        self._may_drop = True  # whether one leading space of a token may still be missing from the text

    def align(self, text: str, tokens: Sequence[TokenLogprob]) -> tuple[TokenLogprob, ...]:
        """Returns the tokens to send with this text: from `tokens`, or waiting since earlier calls."""
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
        """Returns how many of the waiting tokens have their first byte in the text."""
        left = len(self._ahead)
        if not left:
            return len(self._waiting)
        for count in range(len(self._waiting), 0, -1):
            left -= len(self._waiting[count - 1].raw)
            if left < 0:
                return count
        return 0
