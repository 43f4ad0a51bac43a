"""Tracks the tokens that a stream's client has, so that another replica can continue the reply after a loss."""

from __future__ import annotations

from serve_app.contracts.generation import ChoiceEnded, Delta, ReplyParts


class SentTokens:
    """The tokens of one stream whose replica reports them.

    The last event of a reply may contain text that was held back and belongs to earlier tokens. A replica that
    continues from these tokens would send that text again. So the last event is kept here until the reply is known to
    have ended. If the replica is lost before that, the event has not been sent, and the next replica produces it again.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.is_complete = True  # whether `tokens` has all output tokens; replicas of an earlier release report none
        self.kept: list[Delta | ReplyParts] = []  # events that are sent only at the end of the reply

    def take(self, event: Delta | ReplyParts | ChoiceEnded) -> bool:
        """Returns whether to send the event now."""
        if isinstance(event, ChoiceEnded):
            return True
        if event.is_last:
            self.kept.append(event)
            return False
        self.tokens.extend(event.token_ids)
        self.is_complete = len(self.tokens) == event.completion_tokens
        return True

    def clear(self) -> None:
        """Clears the tokens: nothing was sent, and the reply starts again."""
        self.tokens, self.is_complete = [], True
