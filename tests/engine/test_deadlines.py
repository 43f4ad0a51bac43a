"""Requests that wait in the queue for too long, and requests that have left it."""

from __future__ import annotations

from serve_app.contracts.generation import Finished, FinishReason
from tests.engine.fakes import FakeRunner, Inbox, SteppedEngine, fake_engine, request, submit


def test_a_request_that_waits_for_too_long_ends_and_one_that_has_begun_is_never_cut() -> None:
    runner = FakeRunner(b"x" * 60)
    engine = SteppedEngine(runner, max_running=1, speculation_rows=0)
    runs = engine.submit(request("runs", first_token_by=5.0, max_tokens=30))
    waits = engine.submit(request("waits", first_token_by=5.0))
    patient = engine.submit(request("patient", first_token_by=1e9, max_tokens=3))
    while engine.core.streams:
        engine.step()
        engine.now += 1.0
    assert waits.events == [Finished(FinishReason.DEADLINE, 3, 0, 0)]
    assert waits.first[Finished] == 5  # steps of a second each
    assert runs.last == Finished(FinishReason.LENGTH, 3, 0, 30)
    assert patient.last.reason is FinishReason.LENGTH
    assert engine.core.scheduler.allocator.num_used == 0


def test_a_prompt_that_has_begun_gets_the_time_that_it_needs() -> None:
    engine = SteppedEngine(FakeRunner(b"x"), prefill_chunk=16, prefill_chunk_busy=16)
    long = engine.submit(request("long", [1] * 90, first_token_by=3.0))
    while engine.core.streams:
        engine.step()
        engine.now += 1.0
    assert long.last == Finished(FinishReason.STOP, 90, 0, 1)
    assert engine.core.scheduler.allocator.num_used == 0


def test_a_deadline_is_in_the_engine_clocks_seconds() -> None:
    now = 50.0
    engine = fake_engine(FakeRunner(), clock=lambda: now)
    try:
        late, fine = Inbox(), Inbox()
        submit(engine, request("late", first_token_by=50.0), late)
        submit(engine, request("fine", first_token_by=51.0), fine)
        assert (late.wait().reason, fine.wait().reason) == (FinishReason.DEADLINE, FinishReason.STOP)
    finally:
        engine.close()
