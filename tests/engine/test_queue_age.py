"""The age of the queue, by which limits follow pressure."""

from __future__ import annotations

from tests.engine.fakes import FakeRunner, SteppedEngine, request


def test_a_request_that_gave_its_slot_back_does_not_make_the_queue_look_old() -> None:
    engine = SteppedEngine(FakeRunner(), max_running=2)
    for name in ("a1", "a2"):
        engine.submit(request(name, tenant="a", max_tokens=40))
    for _ in range(6):
        engine.step()
    engine.now = 30.0
    engine.submit(request("b1", tenant="b"))
    engine.step()
    stats = engine.core.stats(engine.now)
    assert (stats.preemptions, stats.waiting) == (1, 1)
    assert stats.oldest_wait_s == 0.0
    engine.submit(request("b2", tenant="b"))
    assert engine.core.stats(engine.now + 3.0).oldest_wait_s == 3.0
