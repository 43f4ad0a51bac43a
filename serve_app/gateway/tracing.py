"""Builds the trace of a request as its gateway saw it: a span for the request, and one per call to another process.

A trace is kept if the client asks for it, if the request is in the random sample, or if it failed or was slow. Whether
it failed or was slow is known only at the end, so all spans are built then. The spans of the replica
(`model/reply_trace.py`) are children of `generate`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Final

from serve_app.contracts.books import Outcome
from serve_app.contracts.money import format_amount
from serve_app.contracts.spans import SpanData, SpanExport
from serve_app.contracts.trace_context import TraceCall
from serve_app.gateway.record import RequestRecord

CHOSEN_BY_CLIENTS: Final = 20  # maximum traces per second that clients' headers may choose, in each gateway


class Tracing:
    """Passes the spans of ended requests to `export`, if their trace is kept.

    `share` returns the random sample's share of all requests (0 to 1). Requests of at least `slow_s` seconds are slow.
    """

    def __init__(
        self,
        export: SpanExport,
        share: Callable[[], float],
        slow_s: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._second, self._chosen = 0.0, 0  # start of the current second, and the traces that clients chose in it
        self._export = export
        self._share = share
        self._slow_s = slow_s
        self._clock = clock
        self._wall = wall

    def begin_call(self, record: RequestRecord) -> TraceCall:
        """Returns the tracing data to send with the call to the replica."""
        record.call_span_id = record.call_span_id or secrets.token_hex(8)  # a repeated call keeps the id
        is_chosen = self._is_chosen(record)
        return TraceCall(record.trace.trace_id, record.call_span_id, 0.0 if is_chosen else self._slow_s())

    def __call__(self, record: RequestRecord) -> None:
        failed = record.status >= 500 or record.outcome is Outcome.FAILED
        if failed or record.total_s >= self._slow_s() or self._is_chosen(record):
            self._export.add(record.trace.trace_id, self._spans(record, failed))

    def _is_chosen(self, record: RequestRecord) -> bool:
        if record.is_traced is None:
            wanted = record.trace.is_sampled and bool(record.account_id) and self._may_be_chosen_by_clients()
            record.is_traced = wanted or record.trace.is_among(self._share())
        return record.is_traced

    def _may_be_chosen_by_clients(self) -> bool:
        """Returns whether a client may choose one more trace in this second. SDKs choose every trace by default.

        The limit leaves room in the queue for errors and slow requests.
        """
        if self._clock() - self._second > 1.0:
            self._second, self._chosen = self._clock(), 0
        self._chosen += 1
        return self._chosen <= CHOSEN_BY_CLIENTS

    def _spans(self, record: RequestRecord, failed: bool) -> list[SpanData]:
        began, phases = record.arrived_at, record.phases
        root = SpanData(
            f"POST {record.path}",
            record.trace.span_id,
            record.trace.parent_id,
            began,
            began + record.total_s,
            "server",
            {
                "operation": "chat",
                "door": record.path,
                "provider": "serve-app",
                "request_id": record.request_id,
                "client_request_id": record.client_request_id,
                "account": record.account_id,
                "model": record.model,
                "backend": record.backend,
                "finish": (record.finish,) if record.finish else None,
                "prompt_tokens": record.prompt_tokens,
                "cached_tokens": record.cached_tokens,
                "completion_tokens": record.completion_tokens,
                "status": record.status,
                "code": record.code,
                "reruns": record.reruns or None,
                "first_token_s": record.first_token_s,
                "per_token_s": phases.per_token_s,
                "price": format_amount(record.charged),
                "outcome": None if record.outcome is None else record.outcome.value,
            },
            failed,
        )
        spans = [root]
        offset = self._wall() - self._clock()  # the phases are on a monotonic clock

        def child(name: str, ended_at: float, seconds: float, span_id: str, **attributes: str) -> None:
            began_at = ended_at - seconds
            spans.append(SpanData(name, span_id, root.span_id, began_at, ended_at, "client", attributes))

        if record.admit_s is not None:
            child("admit", record.admitted_at, record.admit_s, secrets.token_hex(8))
        if phases.called_at is not None:
            ended = phases.ended_at or self._clock()
            child("generate", ended + offset, ended - phases.called_at, record.call_span_id, replica=record.replica)
        if record.settle_s is not None:
            child("settle", record.settled_at, record.settle_s, secrets.token_hex(8))
        return spans
