"""Runs a request again on another replica after its replica is lost: how often, after what pause, and under what id.

The new run produces the reply from the start or, if the client has asked for `resume`, continues the text that was sent
(`sent_tokens.py`). A run also counts as lost if its backend does not run but another backend does (`NotRunning`).

For the limiter, the replicas and the ledger, each run is a separate request with a separate id. Before the next run is
admitted, the ledger records the lost run as failed, under the id that its replica knows. The lost replica may still try
to settle that run later: from a line in its spool, or for a stream whose gateway it believes dead. It then finds the id
settled and bills nothing. The next run has a new id, which no other process knows. So at each moment at most one run
can be billed, whichever process dies.

The next run starts only when the ledger has confirmed the failure. If the failure is only in this gateway's spool, or
if the replica has settled the run first, two runs could be billed. In these cases the request fails, and its client
must send it again.

The gateway sends the limiter two consecutive messages in one ordered stream. The first releases the lost run's hold and
gives back what the run had used of the rate limits; the second admits the next run. No other request of this gateway
comes in between, and nothing counts twice.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from serve_app.contracts.generation import ChoiceEnded, Delta, ReplyParts
from serve_app.gateway.record import RequestRecord
from serve_app.gateway.sent_tokens import SentTokens

# Seconds to wait before each run after the first. Serve may choose the lost replica again, because its controller
# checks only once a second whether replicas live.
PAUSES_S: Final = [0.0, 1.0]


@dataclass(frozen=True, slots=True)
class RunsAgain:
    """An event after a lost run. If not `continues`, the reply starts again: discard the events received so far."""

    continues: bool


class Runs:
    """The runs of one request, and the part of the reply that its client has.

    `resumable`: whether the replica reports tokens.
    """

    def __init__(self, record: RequestRecord, *, resumable: bool) -> None:
        self._record = record
        self._sent = SentTokens() if resumable else None
        self.has_sent = False  # some of the reply may have reached the client
        self.reply_id = record.request_id  # the id of the run that began the client's reply
        # When a replica must have started the prompt's computation, on the monotonic clock; 0: not set.
        self.first_token_by = 0.0

    @property
    def left_s(self) -> float:
        """Seconds in which a replica must start the prompt's computation."""
        return max(0.0, self.first_token_by - time.monotonic())

    @property
    def to_continue(self) -> tuple[int, ...]:
        """Tokens that the next replica must continue."""
        return tuple(self._sent.tokens) if self._sent is not None and self.has_sent else ()

    def passes(self, event: Delta | ReplyParts | ChoiceEnded) -> bool:
        """Returns whether to send an event now. An event that has only a token count is not sent."""
        if type(event) is Delta and event.text and self._sent is None:
            return True
        if self._sent is not None and not self._sent.take(event):
            return False
        has_ids = self._sent is None and not isinstance(event, ChoiceEnded) and bool(event.token_ids)
        match event:
            case Delta():
                return has_ids or bool(event.text or event.tokens)
            case ReplyParts():
                return has_ids or bool(event.parts or event.tokens)
        return True

    def pop_kept(self) -> Delta | ReplyParts | None:
        """Returns an event that had to wait for the end of the reply, or None."""
        return self._sent.kept.pop(0) if self._sent is not None and self._sent.kept else None

    def pause_after_loss(self, queue_timeout_s: float) -> float | None:
        """Returns the seconds until the next run; None if no further run is possible or it would be too late."""
        sent, number = self._sent, self._record.reruns
        if sent is not None:
            sent.kept.clear()
        if self.has_sent:
            if sent is None or not sent.is_complete:
                return None
            # A run that continues a begun reply gets the whole queue timeout.
            self.first_token_by = time.monotonic() + queue_timeout_s
        elif sent is not None:
            sent.clear()
        return PAUSES_S[number] if number < len(PAUSES_S) and PAUSES_S[number] < self.left_s else None

    def begin_next(self) -> RequestRecord:
        """Gives the next run its id. Returns the record of the lost run."""
        first = self._record.first_request_id or self._record.request_id
        lost = self._record.run_again(f"{first}-{self._record.reruns + 2}", continues=self.has_sent)
        if not self.has_sent:
            self.reply_id = self._record.request_id
        return lost
