"""The replica's spans of a reply: below the gateway's, for what was reached, and kept where it must be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from serve_app.contracts.generation import Delta, Finished, FinishReason, Rejected, Rejection, Started
from serve_app.contracts.phases import Phases
from serve_app.contracts.spans import SpanData
from serve_app.contracts.trace_context import TraceCall
from serve_app.model.reply_trace import ReplyTrace
from tests.model.test_replica import a_call

STARTED, TOKEN = Started(1, 0), Delta("a", 1)


class Collected:
    def __init__(self) -> None:
        self.spans: list[SpanData] = []

    def add(self, trace_id: str, spans: list[SpanData]) -> None:
        assert trace_id == "a" * 32
        self.spans += spans


def traced(*events: Any, slow_s: float = 0.0, failed: bool = False) -> list[SpanData]:
    collected = Collected()
    call = replace(a_call(), trace=TraceCall("a" * 32, "b" * 16, slow_s))
    phases = Phases()
    phases.called()
    trace = ReplyTrace(collected, call, "replica-a", phases)  # type: ignore[arg-type]
    for event in events:
        phases.take(event)
        trace.take(event)
    trace.end(failed=failed)
    return collected.spans


def end(reason: FinishReason) -> Finished:
    return Finished(reason, 1, 0, 1)


def test_queue_prefill_and_decode_follow_each_other() -> None:
    spans = traced(STARTED, TOKEN, end(FinishReason.STOP))
    assert [span.name for span in spans] == ["queue", "prefill", "decode"]
    assert {span.parent_id for span in spans} == {"b" * 16}
    assert spans[0].ended == spans[1].began
    assert spans[1].ended == spans[2].began
    assert not any(span.is_error for span in spans)
    assert spans[0].attributes["replica"] == "replica-a"


@pytest.mark.parametrize(
    ("events", "failed", "names"),
    [
        ((), True, ["queue"]),
        ((STARTED,), True, ["queue", "prefill"]),
        ((STARTED, TOKEN), True, ["queue", "prefill", "decode"]),
        ((STARTED, TOKEN, end(FinishReason.ERROR)), False, ["queue", "prefill", "decode"]),
        ((Rejected(Rejection.QUEUE_FULL),), False, ["queue"]),
        ((end(FinishReason.DEADLINE),), False, ["queue"]),
    ],
)
def test_a_failure_is_kept_and_marks_the_part_in_which_it_happened(
    events: tuple[Any, ...], failed: bool, names: list[str]
) -> None:
    spans = traced(*events, slow_s=1000.0, failed=failed)
    assert [span.name for span in spans] == names
    assert [span.is_error for span in spans] == [False] * (len(names) - 1) + [True]


@pytest.mark.parametrize("event", [end(FinishReason.LENGTH), Rejected(Rejection.CREDIT), Rejected(Rejection.INVALID)])
def test_what_is_neither_chosen_nor_slow_nor_failed_is_not_kept(event: Any) -> None:
    assert traced(event, slow_s=1000.0) == []
