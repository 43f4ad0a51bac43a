"""Reports a request that has ended: its metrics, its log line and its trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from serve_app.contracts import metrics
from serve_app.contracts.books import Outcome
from serve_app.contracts.metric import Metrics
from serve_app.contracts.money import format_amount
from serve_app.contracts.units import utc_text
from serve_app.gateway.record import RequestRecord
from serve_app.settings import IdentifierSettings

Sink = Callable[[RequestRecord], None]


class Observer:
    """Counts requests that have ended, and passes them to `sinks`. `targets` returns an identifier's settings."""

    def __init__(self, counted: Metrics, targets: Callable[[str], IdentifierSettings | None], *sinks: Sink) -> None:
        self._counted = counted
        self._targets = targets
        self._sinks = sinks

    def ended(self, record: RequestRecord) -> None:
        self._count(record)
        for sink in self._sinks:
            sink(record)

    def answered_for_free(self, path: str) -> None:
        """Counts a request without a price, such as one that counts tokens, by its door's path."""
        self._counted.add(metrics.DOOR_REQUESTS, 1, path)

    def first_token(self, record: RequestRecord, seconds: float) -> None:
        """Records the seconds from arrival to the first token. Called when it arrives: the rest may take minutes."""
        self._counted.observe(metrics.FIRST_TOKEN_SECONDS, seconds, record.model, record.backend)

    def gap(self, record: RequestRecord, seconds: float) -> None:
        """Records the seconds between two pieces of a running reply."""
        self._counted.observe(metrics.INTER_TOKEN_SECONDS, seconds, record.model, record.backend)

    def runs_again(self, record: RequestRecord) -> None:
        """Counts a rerun after a replica of the record's backend was lost."""
        self._counted.add(metrics.RERUNS, 1, record.model, record.backend)

    def _count(self, record: RequestRecord) -> None:
        counted, phases, served = self._counted, record.phases, (record.model, record.backend)
        counted.add(metrics.REQUESTS, 1, *served, str(record.status))
        counted.add(metrics.DOOR_REQUESTS, 1, record.path)
        counted.observe(metrics.REQUEST_SECONDS, record.total_s, *served)
        if record.code:
            counted.add(metrics.REFUSALS, 1, record.model, record.code)
            if record.code in metrics.DEMAND_CODES and record.wanted_tokens:
                counted.add(metrics.REJECTED_DEMAND, record.wanted_tokens, *served, record.code)
        for phase, seconds in (
            ("admit", record.admit_s),
            ("queue", phases.queue_s),
            ("prefill", phases.prefill_s),
            ("decode", phases.decode_s),
        ):
            if seconds is not None:
                counted.observe(metrics.PHASE_SECONDS, seconds, *served, phase)
        if phases.per_token_s is not None:
            counted.observe(metrics.OUTPUT_TOKEN_SECONDS, phases.per_token_s, *served)
        if record.outcome is not None:
            self._count_settled(record, record.outcome)

    def _count_settled(self, record: RequestRecord, outcome: Outcome) -> None:
        counted, served = self._counted, (record.model, record.backend)
        is_complete = outcome is Outcome.COMPLETED
        # A stream that fails after it has sent text is settled as cancelled and billed, but counts as failed here.
        ended = Outcome.FAILED if record.code == "server_error" else outcome
        counted.add(metrics.FINISHES, 1, *served, record.finish if is_complete else ended.value)
        for metric, tokens in (
            (metrics.PROMPT_TOKENS, record.prompt_tokens),
            (metrics.CACHED_TOKENS, record.cached_tokens),
            (metrics.COMPLETION_TOKENS, record.completion_tokens),
        ):
            if tokens:
                counted.add(metric, tokens, *served)
        if not is_complete:
            return
        counted.observe(metrics.PROMPT_LENGTH, record.prompt_tokens, *served)
        counted.observe(metrics.REPLY_LENGTH, record.completion_tokens, *served)
        if (targets := self._targets(record.model)) is not None:
            first = record.first_token_s is None or record.first_token_s <= targets.first_token_target_s
            per_token_s = record.phases.per_token_s
            rest = per_token_s is None or per_token_s <= targets.output_token_target_s
            for target, met in (("first_token", first), ("output_token", rest), ("all", first and rest)):
                counted.add(metrics.LATENCY_TARGETS, 1, *served, target, "yes" if met else "no")


def log_line(record: RequestRecord) -> dict[str, Any]:
    """Returns a request's line in the log."""
    phases = record.phases
    line: dict[str, Any] = {
        "time": utc_text(record.arrived_at, "milliseconds"),
        "event": "request",
        "door": record.path,
        "request_id": record.request_id,
        "first_request_id": record.first_request_id,
        "client_request_id": record.client_request_id,
        "trace_id": record.trace.trace_id,
        "account": record.account_id or None,
        "key": record.key_id or None,
        "model": record.model,
        "backend": record.backend,
        "replica": record.replica or None,
        "stream": record.stream,
        "reruns": record.reruns,
        "status": record.status,
        "code": record.code or None,
        "reason": record.reason or None,
        "outcome": None if record.outcome is None else record.outcome.value,
        "finish_reason": record.finish or None,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.completion_tokens,
        "price": format_amount(record.charged),
        "admit_ms": _ms(record.admit_s),
        "queue_ms": _ms(phases.queue_s),
        "prefill_ms": _ms(phases.prefill_s),
        "decode_ms": _ms(phases.decode_s),
        "settle_ms": _ms(record.settle_s),
        "first_token_ms": _ms(record.first_token_s),
        "total_ms": _ms(record.total_s),
    }
    if record.reply is not None:
        line |= {"messages": record.messages, "reply": "".join(record.reply)}
    return line


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
