"""Work beside the engine: one job of a tenant at a time, whatever its caller does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from serve_app.engine.aside import Aside


class Jobs:
    """Jobs that run until they are let go."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self.done: list[str] = []
        self.go = threading.Event()

    def named(self, name: str) -> Callable[[], str]:
        def job() -> str:
            self.running.append(name)
            assert self.go.wait(60)
            self.running.remove(name)
            self.done.append(name)
            return name

        return job

    async def until_running(self, *names: str) -> None:
        async with asyncio.timeout(60):
            while sorted(self.running) != sorted(names):
                await asyncio.sleep(0.001)


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    jobs = Jobs()
    yield jobs
    jobs.go.set()


@pytest.fixture
def aside(jobs: Jobs) -> Iterator[Aside]:
    aside = Aside("test")
    yield aside
    jobs.go.set()
    aside.close()


def start(aside: Aside, tenant: str, job: Callable[[], str]) -> asyncio.Task[str]:
    return asyncio.ensure_future(aside.run(tenant, job))


async def test_a_tenant_has_one_job_at_a_time_and_another_tenant_does_not_wait_for_it(aside: Aside, jobs: Jobs) -> None:
    first, second = (start(aside, "a", jobs.named(name)) for name in ("a1", "a2"))
    other = start(aside, "b", jobs.named("b1"))
    await jobs.until_running("a1", "b1")
    jobs.go.set()
    assert await asyncio.gather(first, second, other) == ["a1", "a2", "b1"]


async def test_a_tenant_that_hangs_up_has_its_next_turn_when_its_job_has_ended(aside: Aside, jobs: Jobs) -> None:
    left = start(aside, "a", jobs.named("left"))
    await jobs.until_running("left")
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    again, other = start(aside, "a", jobs.named("again")), start(aside, "b", jobs.named("b"))
    await jobs.until_running("left", "b")
    jobs.go.set()
    assert await asyncio.gather(again, other) == ["again", "b"]
    assert jobs.done.index("left") < jobs.done.index("again")


async def test_a_job_whose_caller_goes_away_before_it_begins_never_runs(aside: Aside, jobs: Jobs) -> None:
    running = [start(aside, tenant, jobs.named(tenant)) for tenant in ("a", "b")]
    await jobs.until_running("a", "b")
    waiting = start(aside, "c", jobs.named("never"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    jobs.go.set()
    await asyncio.gather(*running)
    assert await start(aside, "c", jobs.named("c")) == "c"
    assert "never" not in jobs.done


async def test_an_error_of_a_job_is_its_callers_and_ends_its_turn(aside: Aside) -> None:
    def fails() -> str:
        raise ValueError("no grammar")

    for _ in range(2):
        with pytest.raises(ValueError, match="no grammar"):
            await aside.run("a", fails)


async def test_a_tenant_rests_after_a_job_as_many_times_as_long_as_it_took() -> None:
    now = iter([0.0, 0.02, 10.0, 10.0])
    aside = Aside("test", rest=3.0, clock=lambda: next(now))
    try:
        loop = asyncio.get_running_loop()
        asked: list[float] = []
        call_later = loop.call_later
        loop.call_later = lambda delay, *args, **more: asked.append(delay) or call_later(0, *args, **more)  # type: ignore[method-assign]
        assert await aside.run("a", lambda: 1) == 1
        assert await aside.run("a", lambda: 2) == 2
        while len(asked) < 2:
            await asyncio.sleep(0)
        assert asked == [pytest.approx(0.06), 0.0]
    finally:
        aside.close()
