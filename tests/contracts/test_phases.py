"""The parts of a reply are measured when its events arrive."""

from __future__ import annotations

from serve_app.contracts.generation import Delta, Finished, FinishReason, Started
from serve_app.contracts.phases import Phases


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_queue_prefill_and_decode_add_up() -> None:
    clock, gaps = Clock(), list[float]()
    phases = Phases(gaps.append, clock)
    phases.called()
    for at, event in (
        (101.0, Started(10, 0)),
        (103.0, Delta("a", 1)),
        (103.5, Delta("b", 3)),
        (104.5, Delta("c", 4)),
        (105.0, Finished(FinishReason.STOP, 10, 0, 4)),
    ):
        clock.now = at
        phases.take(event)
    assert (phases.queue_s, phases.prefill_s, phases.decode_s) == (1.0, 2.0, 2.0)
    assert gaps == [0.5, 1.0]
    assert phases.per_token_s == 0.5  # three tokens after the first, in 1.5 s


def test_what_was_not_reached_is_unknown() -> None:
    phases = Phases(None, Clock())
    assert (phases.queue_s, phases.prefill_s, phases.decode_s, phases.per_token_s) == (None,) * 4
    phases.called()
    phases.take(Started(1, 0))
    phases.take(Delta("", 0))  # text that is held back, and no token
    assert (phases.queue_s, phases.prefill_s) == (0.0, None)
    phases.take(Delta("all at once", 5))
    assert phases.per_token_s is None


def test_the_time_of_a_call_that_had_to_be_made_again_counts_as_waiting() -> None:
    clock = Clock()
    phases = Phases(None, clock)
    phases.called()
    clock.now = 107.0
    phases.called()
    clock.now = 108.0
    phases.take(Started(1, 0))
    assert phases.queue_s == 8.0
