"""A request whose replica is lost runs again on another one: how often, after what pause, and under what id.

A run makes the reply anew, or continues what was sent of a stream that asks for it (`said.py`).

For limiter, replicas and ledger each run is a request of its own, with an id of its own. Before the next run is
admitted, the ledger has the lost one as failed, under the id that its replica knows: then whatever the replica left
behind, a line in its spool or a stream that it believes to be cut by a dead gateway, finds its id settled and bills
nothing. The next run's id is new to all of them. So at each moment one run at most can be billed, whoever dies then.

That must be the ledger's own answer. A failure that is only in this gateway's spool, or that comes after a settlement
of the replica, could leave two runs to be billed: then the request fails, and its client sends it again.

The lost run gives back its hold and its rates, and the next one is admitted, in two messages that follow each other
in the ordered stream to the limiter. So the account's other requests find no gap in between, and nothing counts twice.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from serve_app.contracts.generation import ChoiceEnded, Delta, ReplyParts
from serve_app.gateway.record import RequestRecord
from serve_app.gateway.said import Said

# Before each run but the first. Serve may not know yet that the replica is gone, and choose it again: its controller
# looks once a second.
PAUSES_S: Final = [0.0, 1.0]


@dataclass(frozen=True, slots=True)
class RunsAgain:
    """In the place of an event of the reply: it is continued, or what came of it so far is void and it begins anew."""

    continues: bool


class Runs:
    """The runs of one request, and what its client has of the reply. `resumable`: the replica reports tokens."""

    def __init__(self, record: RequestRecord, *, resumable: bool) -> None:
        self._record = record
        self._said = Said() if resumable else None
        self.has_sent = False  # some of the reply may have reached the client
        self.reply_id = record.request_id  # of the run that began what the client gets
        self.first_token_by = 0.0  # of the monotonic clock; 0: not known yet

    @property
    def left_s(self) -> float:
        """Seconds until the first token is due."""
        return max(0.0, self.first_token_by - time.monotonic())

    @property
    def to_continue(self) -> tuple[int, ...]:
        """Tokens that the next replica is to continue."""
        return tuple(self._said.tokens) if self._said is not None and self.has_sent else ()

    def passes(self, event: Delta | ReplyParts | ChoiceEnded) -> bool:
        """Whether an event is to be sent now. One that only counts tokens, whose text is held back, is not."""
        if self._said is not None and not self._said.take(event):
            return False
        match event:
            case Delta():
                return bool(event.text or event.tokens)
            case ReplyParts():
                return bool(event.parts or event.tokens)
        return True

    def pop_kept(self) -> Delta | ReplyParts | None:
        """What was not to be sent before the reply has ended."""
        return self._said.kept.pop(0) if self._said is not None and self._said.kept else None

    def pause_after_loss(self, queue_timeout_s: float) -> float | None:
        """Seconds until the next run; None: none can begin any more, or in time."""
        said, number = self._said, self._record.reruns
        if said is not None:
            said.kept.clear()
        if self.has_sent:
            if said is None or not said.is_complete:
                return None
            self.first_token_by = time.monotonic() + queue_timeout_s  # the first one came: its sequel has as long again
        elif said is not None:
            said.clear()
        return PAUSES_S[number] if number < len(PAUSES_S) and PAUSES_S[number] < self.left_s else None

    def begin_next(self) -> RequestRecord:
        """Gives the next run its id. Returns what is known of the lost one."""
        first = self._record.first_request_id or self._record.request_id
        lost = self._record.run_again(f"{first}-{self._record.reruns + 2}", continues=self.has_sent)
        if not self.has_sent:
            self.reply_id = self._record.request_id
        return lost
