"""Which traces are kept, and how their spans hang together. The collector is a list here."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.contracts.books import Outcome
from serve_app.contracts.generation import Delta, Finished, FinishReason, Started
from serve_app.contracts.phases import Phases
from serve_app.contracts.spans import ATTRIBUTES, SpanData
from serve_app.contracts.trace_context import TraceContext
from serve_app.gateway.record import RequestRecord
from serve_app.gateway.tracing import CHOSEN_BY_CLIENTS, Tracing

PLAIN = "5" * 32
AMONG_NONE = "f" * 16  # a span id that is among no share
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Collected:
    def __init__(self) -> None:
        self.traces: dict[str, list[SpanData]] = {}

    def add(self, trace_id: str, spans: list[SpanData]) -> None:
        assert trace_id not in self.traces
        self.traces[trace_id] = spans


def record_of(trace: TraceContext, **known: Any) -> RequestRecord:
    clock = iter((50.0, 51.0, 53.0, 54.0))  # called, started, first token, end
    phases = Phases(None, lambda: next(clock))
    record = RequestRecord("chatcmpl-1", "mine", trace, lambda _: None, phases, "/chat/completions", 1049.0)
    values = {
        "status": 200,
        "total_s": 6.0,
        "model": "svc-chat",
        "backend": "b",
        "replica": "r",
        "account_id": "acct_1",
    }
    for name, value in (values | known).items():
        setattr(record, name, value)
    return record


def run(record: RequestRecord) -> None:
    record.admit_s, record.admitted_at = 0.5, 1049.75
    record.phases.called()
    for event in (Started(1, 0), Delta("a", 1), Finished(FinishReason.STOP, 1, 0, 1)):
        record.phases.take(event)
    record.settle_s, record.settled_at = 0.25, 1054.5
    record.outcome = Outcome.COMPLETED


def tracing(collected: Collected, share: float = 0.0, slow_s: float = 30.0) -> Tracing:
    return Tracing(collected, lambda: share, lambda: slow_s, clock=lambda: 60.0, wall=lambda: 1060.0)  # type: ignore[arg-type]


def test_the_spans_of_a_request_hang_below_the_clients() -> None:
    collected = Collected()
    record = record_of(TraceContext.of(TRACEPARENT, "f" * 32))
    kept = tracing(collected)
    call = kept.begin_call(record)
    run(record)
    kept(record)
    [(trace_id, spans)] = collected.traces.items()
    assert trace_id == TRACEPARENT[3:35] == call.trace_id
    root, *children = spans
    assert (root.kind, root.parent_id, root.began, root.ended) == ("server", TRACEPARENT[36:52], 1049.0, 1055.0)
    assert {span.parent_id for span in children} == {root.span_id}
    assert {span.name: (span.began, span.ended) for span in children} == {
        "admit": (1049.25, 1049.75),
        "generate": (1050.0, 1054.0),
        "settle": (1054.25, 1054.5),
    }
    [generate] = [span for span in children if span.name == "generate"]
    assert (generate.span_id, call.slow_s) == (call.parent_id, 0.0)
    assert len({span.span_id for span in spans}) == 4
    assert set(root.attributes) <= set(ATTRIBUTES)


@pytest.mark.parametrize(
    ("known", "share", "kept"),
    [
        ({}, 0.0, False), ({}, 1.0, True), ({"status": 500}, 0.0, True), ({"status": 503}, 0.0, True),
        ({"status": 429}, 0.0, False), ({"total_s": 30.0}, 0.0, True), ({"total_s": 29.9}, 0.0, False),
    ],
)  # fmt: skip
def test_a_share_and_all_errors_and_slow_requests_are_kept(known: dict[str, Any], share: float, kept: bool) -> None:
    collected = Collected()
    record = record_of(TraceContext(PLAIN, AMONG_NONE), **known)
    traced = tracing(collected, share)
    assert (traced.begin_call(record).slow_s == 0.0) is (share == 1.0)
    traced(record)
    assert bool(collected.traces) is kept
    if kept:
        assert collected.traces[PLAIN][0].is_error is (record.status >= 500)


def test_a_second_call_with_a_larger_hold_has_the_same_span() -> None:
    record, traced = record_of(TraceContext(PLAIN, AMONG_NONE)), tracing(Collected())
    assert traced.begin_call(record) == traced.begin_call(record)


def test_a_request_that_reached_no_replica_has_no_span_of_one() -> None:
    collected = Collected()
    tracing(collected)(record_of(TraceContext(PLAIN, AMONG_NONE), status=503))
    assert [span.name for span in collected.traces[PLAIN]] == ["POST /chat/completions"]


def test_a_client_without_an_account_chooses_nothing() -> None:
    collected = Collected()
    tracing(collected)(record_of(TraceContext.of(TRACEPARENT, "f" * 32), status=401, account_id=""))
    assert not collected.traces


def test_clients_choose_only_so_many_a_second() -> None:
    collected = Collected()
    traced = tracing(collected)
    for number in range(CHOSEN_BY_CLIENTS + 5):
        trace = TraceContext.of(f"00-{number + 1:032x}-00f067aa0ba902b7-01", "f" * 32)
        traced(record_of(trace))
        traced(record_of(TraceContext(f"{number + 1:031x}a", AMONG_NONE), status=503))
    assert len(collected.traces) == CHOSEN_BY_CLIENTS + CHOSEN_BY_CLIENTS + 5
