"""The engine's promises to its callers, over a stand-in model."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from serve_app.contracts.generation import Delta, Finished, FinishReason, Started
from serve_app.contracts.inbox import Turns
from serve_app.engine.engine import Engine
from serve_app.engine.errors import ContextLengthExceeded, EngineClosed, EngineFailed, QueueFull
from tests.engine.fakes import FakeRunner, Inbox, fake_engine, request, submit


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
def engine(runner: FakeRunner) -> Iterator[Engine]:
    engine = fake_engine(runner, max_running=2, max_waiting=2)
    yield engine
    if runner.gate is not None:
        runner.gate.release(10_000)
    engine.close()


def hold(runner: FakeRunner) -> threading.Semaphore:
    runner.gate = threading.Semaphore(0)
    return runner.gate


def until_idle(engine: Engine) -> None:
    """Wait until the engine holds nothing; reads its state under its lock."""
    deadline = time.monotonic() + 60
    while engine.stats().running or engine.stats().waiting:
        assert time.monotonic() < deadline
        threading.Event().wait(0.001)


def test_a_reply_starts_once_streams_its_text_and_ends_once(engine: Engine) -> None:
    inbox = Inbox()
    submit(engine, request(), inbox)
    assert inbox.wait() == Finished(FinishReason.STOP, prompt_tokens=3, cached_tokens=0, completion_tokens=11)
    assert inbox.events[0] == Started(prompt_tokens=3, cached_tokens=0)
    assert inbox.text == "hello world"
    assert [e.completion_tokens for e in inbox.events if isinstance(e, Delta)] == list(range(1, 12))


def test_a_reply_ends_with_length_at_its_limit(engine: Engine) -> None:
    inbox = Inbox()
    submit(engine, request(max_tokens=5), inbox)
    assert (inbox.wait().reason, inbox.wait().completion_tokens, inbox.text) == (FinishReason.LENGTH, 5, "hello")


def test_prompt_and_reply_share_the_context() -> None:
    engine = fake_engine(FakeRunner(b"x" * 100, max_context=10))
    try:
        inbox = Inbox()
        submit(engine, request(prompt=[1] * 7), inbox)
        assert (inbox.wait().reason, inbox.wait().completion_tokens) == (FinishReason.LENGTH, 3)
        with pytest.raises(ContextLengthExceeded) as refusal:
            submit(engine, request(prompt=[1] * 10), inbox)
        assert (refusal.value.prompt_tokens, refusal.value.limit) == (10, 10)
    finally:
        engine.close()


def test_the_context_is_no_longer_than_the_cache() -> None:
    engine = fake_engine(FakeRunner(b"x" * 100, num_blocks=3))
    try:
        inbox = Inbox()
        submit(engine, request(prompt=[1] * 4), inbox)
        assert inbox.wait().completion_tokens == 8
    finally:
        engine.close()


def test_a_stop_string_ends_the_reply_and_is_counted_but_not_sent(engine: Engine) -> None:
    inbox = Inbox()
    submit(engine, request(stop=("o w",)), inbox)
    assert (inbox.wait().reason, inbox.wait().completion_tokens, inbox.text) == (FinishReason.STOP, 7, "hell")


def test_the_first_token_is_reported_although_its_text_is_held_back(engine: Engine) -> None:
    inbox = Inbox()
    submit(engine, request(stop=("hello x",)), inbox)
    inbox.wait()
    assert inbox.events[1] == Delta("", 1)
    assert inbox.text == "hello world"


def test_finished_has_the_number_of_tokens_up_to_the_mark(engine: Engine) -> None:
    for mark, stop, expected in (("lo w", (), 7), ("lo w", ("o w",), 7), ("world!", (), None), ("", (), None)):
        inbox = Inbox()
        submit(engine, request(mark=mark, stop=stop), inbox)
        assert inbox.wait().marked_tokens == expected


def test_an_empty_prompt_or_a_foreign_token_is_refused(engine: Engine) -> None:
    for prompt in ([], [9999], [-1]):
        with pytest.raises(ValueError, match="prompt"):
            submit(engine, request(prompt=prompt), Inbox())


def test_an_id_may_not_be_in_use_twice_but_may_be_used_again(engine: Engine, runner: FakeRunner) -> None:
    gate, first, again = hold(runner), Inbox(), Inbox()
    submit(engine, request("same"), first)
    with pytest.raises(ValueError, match="same"):
        submit(engine, request("same"), Inbox())
    gate.release(1000)
    first.wait()
    submit(engine, request("same"), again)
    assert again.wait().reason is FinishReason.STOP


def test_a_full_queue_refuses_and_room_is_made_when_one_ends(engine: Engine, runner: FakeRunner) -> None:
    gate, inboxes = hold(runner), [Inbox() for _ in range(4)]
    for number, inbox in enumerate(inboxes):
        submit(engine, request(str(number)), inbox)
    with pytest.raises(QueueFull):
        submit(engine, request("late"), Inbox())
    gate.release(1000)
    assert {inbox.wait().reason for inbox in inboxes} == {FinishReason.STOP}
    late = Inbox()
    submit(engine, request("late"), late)
    late.wait()


def test_a_cancelled_request_leaves_within_a_step_and_frees_its_blocks(engine: Engine, runner: FakeRunner) -> None:
    gate, inbox = hold(runner), Inbox()
    submit(engine, request(), inbox)
    for _ in range(3):
        gate.release()
        runner.entered.acquire()
    engine.abort("r")  # while a step runs
    gate.release()
    last = inbox.wait()
    assert last.reason is FinishReason.ABORT
    assert last.completion_tokens == len(inbox.text)
    until_idle(engine)
    assert engine.stats().kv_blocks_used == 0
    assert len(runner.steps) <= 4


def test_a_waiting_request_can_be_cancelled(engine: Engine, runner: FakeRunner) -> None:
    gate, inboxes = hold(runner), [Inbox() for _ in range(3)]
    for number, inbox in enumerate(inboxes):
        submit(engine, request(str(number)), inbox)
    engine.abort("2")
    engine.abort("unknown")
    gate.release(1000)
    assert inboxes[2].wait() == Finished(FinishReason.ABORT, 3, 0, 0)
    assert inboxes[2].events == [inboxes[2].wait()]


def test_a_failed_step_ends_its_requests_and_the_engine_serves_the_next(
    engine: Engine, runner: FakeRunner, caplog: pytest.LogCaptureFixture
) -> None:
    runner.failures[3] = RuntimeError("the device is on fire")
    first, second = Inbox(), Inbox()
    with caplog.at_level(logging.ERROR):
        submit(engine, request("first"), first)
        assert first.wait().reason is FinishReason.ERROR
    assert "on fire" in caplog.text
    submit(engine, request("second"), second)
    assert (second.wait().reason, second.text) == (FinishReason.STOP, "hello world")
    assert engine.stats().kv_blocks_used == 0


def test_preemption_neither_loses_nor_repeats_text() -> None:
    runner = FakeRunner(bytes(range(97, 123)) * 2, num_blocks=20)
    engine = fake_engine(runner, max_running=4, prefill_chunk=3)
    try:
        inboxes = [Inbox() for _ in range(4)]
        for number, inbox in enumerate(inboxes):
            submit(engine, request(str(number), prompt=[number, 2, 3]), inbox)
        for inbox in inboxes:
            assert inbox.wait().completion_tokens == 52
            assert inbox.text == "abcdefghijklmnopqrstuvwxyz" * 2
            assert sum(isinstance(event, Started) for event in inbox.events) == 1
        assert engine.stats().preemptions > 0
    finally:
        engine.close()


def test_the_next_turn_finds_what_the_last_one_computed(engine: Engine) -> None:
    first, second, third = Inbox(), Inbox(), Inbox()
    submit(engine, request(prompt=[1] * 9, max_tokens=6), first)
    assert first.wait() == Finished(FinishReason.LENGTH, 9, cached_tokens=0, completion_tokens=6)
    said = list(b"hello ")
    # 14 of the 15 tokens went through the model: three blocks of 4.
    submit(engine, request(prompt=[1] * 9 + said + [2]), second)
    assert second.wait() == Finished(FinishReason.STOP, 16, cached_tokens=12, completion_tokens=11)
    assert second.events[0] == Started(16, cached_tokens=12)
    assert second.text == "hello world"
    # The same again: a prompt of exactly four blocks leaves the last one to compute.
    submit(engine, request(prompt=[1] * 9 + said + [2]), third)
    assert (third.wait().cached_tokens, third.text) == (12, "hello world")
    assert engine.stats().prefix_hit_tokens == 24
    assert engine.stats().kv_blocks_used == 0
    assert engine.stats().kv_blocks_cached > 0


def test_another_tenant_finds_nothing(engine: Engine) -> None:
    for tenant, cached in (("a", 0), ("b", 0), ("a", 8)):
        inbox = Inbox()
        submit(engine, replace(request(prompt=[1] * 12), tenant=tenant), inbox)
        assert inbox.wait().cached_tokens == cached


def test_without_prefix_reuse_nothing_is_kept(runner: FakeRunner) -> None:
    engine = fake_engine(runner, prefix_reuse=False)
    try:
        for _ in range(2):
            inbox = Inbox()
            submit(engine, request(prompt=[1] * 12), inbox)
            assert inbox.wait().cached_tokens == 0
        assert engine.stats().kv_blocks_cached == 0
    finally:
        engine.close()


def test_a_failed_step_leaves_nothing_of_its_own_to_find(engine: Engine, runner: FakeRunner) -> None:
    runner.failures[1] = RuntimeError("no")
    for reason in (FinishReason.ERROR, FinishReason.STOP):
        inbox = Inbox()
        submit(engine, request(prompt=[1] * 12), inbox)
        assert inbox.wait() == Finished(reason, 12, 0, 11 if reason is FinishReason.STOP else 0)


def test_a_cancelled_request_leaves_the_blocks_that_it_computed(engine: Engine, runner: FakeRunner) -> None:
    gate, cancelled, again = hold(runner), Inbox(), Inbox()
    submit(engine, request(prompt=[1] * 12), cancelled)
    gate.release()
    for _ in range(2):  # the prompt's step is over, the next one runs
        runner.entered.acquire()
    engine.abort("r")
    gate.release(1000)
    assert cancelled.wait().reason is FinishReason.ABORT
    submit(engine, request(prompt=[1] * 12), again)
    assert again.wait().cached_tokens == 8


def test_one_tenants_flood_does_not_hold_up_anothers_single_request(runner: FakeRunner) -> None:
    gate, order = hold(runner), []
    engine = fake_engine(runner, max_running=2)
    try:
        inboxes = {name: Inbox() for name in [*map(str, range(50)), "single"]}
        for name, inbox in inboxes.items():
            tenant = "patient" if name == "single" else "flood"

            def receive(event: object, name: str = name, inbox: Inbox = inbox) -> None:
                if isinstance(event, Started):
                    order.append(name)
                inbox(event)  # type: ignore[arg-type]

            submit(engine, replace(request(name), tenant=tenant), receive)
            if name == "0":
                runner.entered.acquire()  # it runs; the next step admits the second
        gate.release(10_000)
        for inbox in inboxes.values():
            inbox.wait()
        assert order.index("single") <= 2
        assert [name for name in order if name != "single"] == [str(number) for number in range(50)]
    finally:
        gate.release(10_000)
        engine.close()


def test_stats_count_running_and_waiting_requests_and_the_longest_wait() -> None:
    now = 100.0
    runner = FakeRunner()
    gate = hold(runner)
    engine = fake_engine(runner, max_running=1)
    engine._clock = lambda: now
    try:
        inboxes = [Inbox(), Inbox()]
        for number, inbox in enumerate(inboxes):
            submit(engine, request(str(number), prompt=[1] * 9), inbox)
        runner.entered.acquire()
        now = 107.5
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.oldest_wait_s) == (1, 1, 7.5)
        assert (stats.kv_blocks_used, stats.kv_blocks_total) == (3, 64)
        assert stats.queued_prefill_tokens == 18
        gate.release(1000)
        inboxes[1].wait()
        assert engine.stats().tokens_produced == 22
        assert engine.stats().oldest_wait_s == 0.0
    finally:
        gate.release(1000)
        engine.close()


async def test_generate_yields_the_events_in_order(engine: Engine) -> None:
    events = [event async for event in engine.generate(request())]
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)
    assert sum(isinstance(event, Finished) for event in events) == 1
    assert "".join(e.text for e in events if isinstance(e, Delta)) == "hello world"


async def test_generate_raises_its_refusal_before_any_event(engine: Engine) -> None:
    with pytest.raises(ContextLengthExceeded):
        await anext(engine.generate(request(prompt=[1] * 2000)))


async def test_closing_the_generator_aborts_the_request(engine: Engine, runner: FakeRunner) -> None:
    gate = hold(runner)
    events = engine.generate(request())
    assert isinstance(await anext(events), Started)
    await events.aclose()
    gate.release(2)
    await asyncio.to_thread(until_idle, engine)
    assert len(runner.steps) == 1
    assert engine.stats().kv_blocks_used == 0


async def test_cancelling_the_reader_aborts_the_request(engine: Engine, runner: FakeRunner) -> None:
    gate, started = hold(runner), asyncio.Event()

    async def read() -> None:
        async for _ in engine.generate(request()):
            started.set()

    task = asyncio.create_task(read())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.release(2)
    await asyncio.to_thread(until_idle, engine)
    assert len(runner.steps) == 1


async def test_the_loop_is_woken_once_for_all_events_of_a_step(
    engine: Engine, runner: FakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold(runner)
    loop, calls = asyncio.get_running_loop(), []
    original = loop.call_soon_threadsafe

    def counted(callback: object, *args: object, **kwargs: object) -> object:
        if isinstance(getattr(callback, "__self__", None), Turns):
            calls.append(len(args[0]))  # type: ignore[arg-type]
        return original(callback, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)

    async def read(name: str) -> None:
        async for _ in engine.generate(request(name)):
            pass

    tasks = [asyncio.create_task(read(name)) for name in "ab"]
    await asyncio.sleep(0)  # both have been submitted
    gate.release(1000)
    await asyncio.gather(*tasks)
    # Started is sent before the step that computes, the rest after it.
    assert len(calls) <= engine.stats().steps + 2
    assert 2 in calls


def test_a_request_whose_loop_has_gone_is_dropped(engine: Engine, runner: FakeRunner) -> None:
    gate = hold(runner)
    loop = asyncio.new_event_loop()
    events = engine.generate(request())
    loop.run_until_complete(anext(events))
    loop.close()
    gate.release(1000)
    until_idle(engine)


def test_an_idle_engine_sleeps_until_there_is_work(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    wait, waits = engine._work.wait, queue.Queue[float | None]()

    def noted(timeout: float | None = None) -> bool:
        waits.put(timeout)
        return wait(timeout)

    monkeypatch.setattr(engine._work, "wait", noted)
    for _ in range(3):
        inbox = Inbox()
        submit(engine, request(), inbox)
        inbox.wait()
        assert waits.get(timeout=60) is None


def test_close_ends_every_request_and_the_thread(runner: FakeRunner) -> None:
    gate = hold(runner)
    engine, inboxes = fake_engine(runner, max_running=2), [Inbox() for _ in range(3)]
    for number, inbox in enumerate(inboxes):
        submit(engine, request(str(number)), inbox)
    runner.entered.acquire()
    gate.release(1)
    closer = threading.Thread(target=engine.close)
    closer.start()
    gate.release(1000)
    closer.join(60)
    assert {inbox.wait().reason for inbox in inboxes} <= {FinishReason.ABORT, FinishReason.STOP}
    assert not engine._thread.is_alive()
    with pytest.raises(EngineFailed):
        engine.check_health()
    engine.close()
    with pytest.raises(EngineClosed):
        submit(engine, request("late"), Inbox())


def test_nan_from_the_model_ends_that_request_with_an_error(engine: Engine, runner: FakeRunner) -> None:
    execute = runner.execute
    runner.execute = lambda chunks: execute(chunks) * torch.nan  # type: ignore[method-assign]
    inbox, other = Inbox(), Inbox()
    submit(engine, request(prompt=[1] * 9), inbox)
    assert inbox.wait() == Finished(FinishReason.ERROR, 9, 0, 0)
    # Earlier blocks may hold NaN as well, so no later request finds them.
    runner.execute = execute  # type: ignore[method-assign]
    submit(engine, request(prompt=[1] * 9), other)
    assert other.wait() == Finished(FinishReason.STOP, 9, 0, 11)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_makes_no_sense_is_refused(engine: Engine, weight: float) -> None:
    with pytest.raises(ValueError, match="weight"):
        submit(engine, request(weight=weight), Inbox())


def test_nothing_is_cleared_where_nothing_went_wrong(engine: Engine, runner: FakeRunner) -> None:
    for _ in range(3):
        inbox = Inbox()
        submit(engine, request(prompt=[1] * 30), inbox)
        inbox.wait()
    assert runner.cleared == []
