"""A step that never ends ends its requests, and the engine asks to be replaced; a long step that ends does not."""

from __future__ import annotations

import threading

import pytest

from serve_app.contracts.generation import FinishReason
from serve_app.engine.engine import Engine
from serve_app.engine.errors import EngineClosed, EngineFailed
from serve_app.engine.hang import HangDetector

from .fakes import FakeRunner, Inbox, fake_engine, fake_settings, request, submit

LIMIT_S = 20.0


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def detector(clock: Clock) -> HangDetector:
    return HangDetector(LIMIT_S, clock)


def test_a_step_over_the_limit_is_a_hang_at_the_second_check(clock: Clock, detector: HangDetector) -> None:
    detector.step_begins()
    clock.now += LIMIT_S
    assert [detector.problem(), detector.problem()] == [None, None]
    clock.now += 1
    assert detector.problem() is None
    clock.now += 1
    assert detector.problem() == "a step has not ended for 22 s, and step_timeout_s is 20 s"


def test_time_without_requests_is_no_hang(clock: Clock, detector: HangDetector) -> None:
    for _ in range(3):
        clock.now += 10 * LIMIT_S
        assert [detector.problem(), detector.problem()] == [None, None]
        detector.step_begins()
        detector.step_ends()


def test_steps_that_follow_each_other_may_take_any_time_together(clock: Clock, detector: HangDetector) -> None:
    for _ in range(10):
        detector.step_begins()
        clock.now += LIMIT_S
        assert [detector.problem(), detector.problem()] == [None, None]


def test_a_machine_that_stood_still_has_no_hang(clock: Clock, detector: HangDetector) -> None:
    for _ in range(3):
        detector.step_begins()
        clock.now += 100 * LIMIT_S
        assert detector.problem() is None  # then the step ends, late
    detector.step_ends()
    assert detector.problem() is None


def test_a_gpu_has_less_time_than_a_cpu_and_both_what_is_set() -> None:
    assert [fake_settings().step_limit_s(on_cpu) for on_cpu in (False, True)] == [20.0, 300.0]
    assert [fake_settings(step_timeout_s=7).step_limit_s(on_cpu) for on_cpu in (False, True)] == [7.0, 7.0]


@pytest.fixture
def hung(clock: Clock) -> tuple[Engine, FakeRunner]:
    """Its first step holds until its gate is released."""
    runner = FakeRunner()
    runner.gate = threading.Semaphore(0)
    return fake_engine(runner, clock, max_running=1, step_timeout_s=LIMIT_S), runner


def test_a_hung_engine_ends_its_requests_and_asks_to_be_replaced(clock: Clock, hung: tuple[Engine, FakeRunner]) -> None:
    engine, runner = hung
    inboxes = [Inbox(), Inbox()]
    for number, inbox in enumerate(inboxes):
        submit(engine, request(str(number)), inbox)
    runner.entered.acquire()
    clock.now += LIMIT_S - 1
    engine.check_health()
    engine.check_health()
    clock.now += 2
    engine.check_health()
    with pytest.raises(EngineFailed, match=r"^the engine hangs: a step has not ended for 21 s"):
        engine.check_health()
    assert {inbox.wait().reason for inbox in inboxes} == {FinishReason.ABORT}
    with pytest.raises(EngineClosed):
        submit(engine, request("late"), Inbox())
    engine.close()  # does not wait for the thread
    with pytest.raises(EngineFailed, match=r"^the engine hangs"):
        engine.check_health()
    assert runner.gate is not None
    runner.gate.release(10)  # the step ends after all, and its requests have had their last event
    engine._thread.join(60)
    assert not engine._thread.is_alive()
    assert [inbox.finals for inbox in inboxes] == [1, 1]


def test_an_engine_with_a_slow_step_that_ends_goes_on(clock: Clock, hung: tuple[Engine, FakeRunner]) -> None:
    engine, runner = hung
    assert runner.gate is not None
    inbox = Inbox()
    submit(engine, request("slow"), inbox)
    runner.entered.acquire()
    clock.now += LIMIT_S + 1
    engine.check_health()
    runner.gate.release(1)
    runner.entered.acquire()  # the next step has begun
    engine.check_health()
    engine.check_health()
    runner.gate.release(1000)
    assert inbox.wait().reason is FinishReason.STOP
    clock.now += 10 * LIMIT_S
    engine.check_health()
    engine.check_health()
    engine.close()
