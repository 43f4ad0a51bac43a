"""Collects the facts of one chat request, for its log line, its metrics and its trace."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from serve_app.contracts import metrics
from serve_app.contracts.books import Outcome, Settlement
from serve_app.contracts.generation import CallStarted, Delta, Finished, ReplyParts, Started
from serve_app.contracts.phases import Phases
from serve_app.contracts.trace_context import TraceContext


@dataclass(slots=True, eq=False)
class RequestRecord:
    """The facts of one request, filled in while it runs.

    `open` counts the tasks that may still fill it in. The last one to close passes the record to `sink`. For example, a
    request whose client hangs up is settled after its connection has ended, and only then is its cost known.
    """

    request_id: str
    client_request_id: str  # `x-request-id`
    trace: TraceContext
    sink: Callable[[RequestRecord], None]
    phases: Phases
    path: str = ""  # the door's path
    arrived_at: float = field(default_factory=time.time)  # Unix seconds
    stream: bool = False
    model: str = metrics.NONE
    backend: str = metrics.NONE
    replica: str = ""
    reruns: int = 0  # after a lost replica or a backend that does not run; `request_id` is that of the last run
    account_id: str = ""
    key_id: str = ""
    status: int = 500
    code: str = ""  # error code
    reason: str = ""  # error message, if it reveals nothing about the request's content
    wanted_tokens: int = 0  # prompt plus maximum output
    outcome: Outcome | None = None  # None: nothing was settled
    finish: str = ""
    called_tools: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    charged: int = 0  # nano-units
    first_token_s: float | None = None  # time from the request's arrival to the first token
    admit_s: float | None = None  # time to the limiter's answer, which came at `admitted_at` in Unix seconds
    admitted_at: float = 0.0
    settle_s: float | None = None
    settled_at: float = 0.0
    call_span_id: str = ""
    is_traced: bool | None = None  # the decision of `Tracing`; None: not decided yet
    total_s: float = 0.0
    messages: object = None  # like `reply`, filled in only for accounts in `logged_texts`
    reply: list[str] | None = None
    leave: Callable[[], None] | None = None  # ends a call that waits for a backend without replicas; see `Lifecycle`
    open: int = 1

    def close(self) -> None:
        self.open -= 1
        if self.open == 0:
            self.phases.end()
            self.sink(self)

    def admitted(self, account_id: str, key_id: str) -> None:
        """Records the request's account and key."""
        self.account_id, self.key_id = account_id, key_id

    @property
    def first_request_id(self) -> str | None:
        """The id of the first run, which a resumed stream keeps; None if there was only one run."""
        return self.request_id.rpartition("-")[0] if self.reruns else None

    def run_again(self, request_id: str, *, continues: bool) -> RequestRecord:
        """Continues or restarts the reply under another id. Returns the record of the lost run."""
        lost = replace(self)
        self.phases = self.phases.anew()
        self.request_id, self.reruns = request_id, self.reruns + 1
        self.replica, self.finish = "", ""
        if not continues:
            self.called_tools, self.reply = False, None if self.reply is None else []
        return lost

    def settled(self, settlement: Settlement, seconds: float) -> None:
        """Records the settlement as it was sent to the ledger or written to the spool."""
        self.settle_s, self.settled_at = seconds, time.time()
        self.outcome, self.charged = settlement.outcome, settlement.cost
        self.prompt_tokens, self.cached_tokens = settlement.prompt_tokens, settlement.cached_tokens
        self.completion_tokens = settlement.completion_tokens

    def take(self, event: object) -> None:
        """Records an event's replica, tool calls, text and finish reason. Its tokens are counted elsewhere."""
        if isinstance(event, Started):
            self.replica = event.replica
        elif isinstance(event, ReplyParts):
            self.called_tools = self.called_tools or any(isinstance(part, CallStarted) for part in event.parts)
            if self.reply is not None:
                self.reply += [text for part in event.parts if (text := getattr(part, "text", ""))]
        elif isinstance(event, Delta) and self.reply is not None:
            self.reply.append(event.text)
        elif isinstance(event, Finished):
            self.finish = "tool_calls" if self.called_tools and event.reason == "stop" else event.reason.value
