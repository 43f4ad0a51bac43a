"""Background tasks at the end of a process."""

from __future__ import annotations

import asyncio

from serve_app.contracts import calls as tasks


async def test_shutdown_waits_for_background_tasks_and_for_those_that_they_start() -> None:
    gate, done = asyncio.Event(), []

    async def second() -> None:
        await gate.wait()
        done.append("second")

    async def first() -> None:
        await asyncio.sleep(0)
        tasks.detached(second())
        done.append("first")

    tasks.detached(first())
    waiting = asyncio.create_task(tasks.wait_for_background(60))
    while not done:
        await asyncio.sleep(0)
    assert not waiting.done()
    gate.set()
    assert await waiting
    assert done == ["first", "second"]


async def test_shutdown_waits_for_a_bounded_time() -> None:
    task = tasks.detached(asyncio.Event().wait())  # type: ignore[arg-type]
    assert not await tasks.wait_for_background(0.01)
    task.cancel()
    assert await tasks.wait_for_background(60)


async def test_shutdown_does_not_wait_for_endless_tasks() -> None:
    task = tasks.detached(asyncio.Event().wait(), endless=True)  # type: ignore[arg-type]
    assert await tasks.wait_for_background(60)
    task.cancel()
