"""Records a reply's spans in the replica: the time in the queue, the prefill and the decoding."""

from __future__ import annotations

import secrets
import time

from serve_app.contracts.generation import OF_THE_BACKEND, Finished, FinishReason, GenerateCall, Rejected
from serve_app.contracts.phases import Phases
from serve_app.contracts.spans import SpanData, SpanExport


class ReplyTrace:
    """The trace of one call. It is kept if the gateway has chosen the trace, or if the reply fails or is slow."""

    def __init__(self, export: SpanExport, call: GenerateCall, replica: str, phases: Phases) -> None:
        """Reads the times from `phases`, to which the caller passes the reply's events."""
        self._export = export
        self._call = call
        self._replica = replica
        self._phases = phases
        self._failed = False

    def take(self, event: object) -> None:
        if isinstance(event, Finished):
            self._failed = event.reason not in (FinishReason.STOP, FinishReason.LENGTH)
        if isinstance(event, Rejected):  # a failure only if the backend caused the rejection, not the request
            self._failed = event.reason in OF_THE_BACKEND

    def end(self, *, failed: bool = False) -> None:
        """Exports the spans if the trace is kept. Must be called when the call ends, even if it fails."""
        trace, phases = self._call.trace, self._phases
        assert trace is not None
        assert phases.called_at is not None
        now, failed = time.monotonic(), failed or self._failed
        if now - phases.called_at < trace.slow_s and not failed:
            return
        offset = time.time() - now
        marks = [("queue", phases.called_at), ("prefill", phases.started_at), ("decode", phases.first_at)]
        reached = [(name, at) for name, at in marks if at is not None]
        ends = [at for _, at in reached[1:]] + [phases.ended_at or now]
        attributes = {"replica": self._replica, "backend": self._call.bill.backend}
        self._export.add(
            trace.trace_id,
            [
                SpanData(
                    name,
                    secrets.token_hex(8),
                    trace.parent_id,
                    at + offset,
                    end + offset,
                    attributes=attributes,
                    is_error=failed and name == reached[-1][0],
                )
                for (name, at), end in zip(reached, ends, strict=True)
            ],
        )
