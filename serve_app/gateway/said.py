"""What a stream's client has of the reply, in tokens: what another replica is to continue if the first one is lost."""

from __future__ import annotations

from serve_app.contracts.generation import ChoiceEnded, Delta, ReplyParts


class Said:
    """The tokens of one stream whose replica reports them.

    The end of a reply also brings text that no token follows, which had been held back. A replica that continues these
    tokens would send it again. So what is last is kept here until the reply is known to have ended; if its replica is
    lost before, it has not been sent, and is made again.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.is_complete = True  # the replica reports tokens; one of an earlier release does not
        self.kept: list[Delta | ReplyParts] = []  # which wait for the end

    def take(self, event: Delta | ReplyParts | ChoiceEnded) -> bool:
        """Whether to send it now."""
        if isinstance(event, ChoiceEnded):
            return True
        if event.is_last:
            self.kept.append(event)
            return False
        self.tokens.extend(event.token_ids)
        self.is_complete = len(self.tokens) == event.completion_tokens
        return True

    def clear(self) -> None:
        """Nothing of it was sent: the reply begins anew."""
        self.tokens, self.is_complete = [], True
