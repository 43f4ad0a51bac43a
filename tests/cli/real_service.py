"""The service itself behind a real port: the gateway's app over a real ledger and limiter, with a scripted model."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from tests.gateway.connections import served
from tests.gateway.world import OPERATOR, World

__all__ = ["OPERATOR", "RealService", "real_service"]


@dataclass(frozen=True)
class RealService:
    """`world` lives in another thread's event loop; its ledger may be used from any thread."""

    world: World
    url: str
    loop: asyncio.AbstractEventLoop
    end: asyncio.Event


@contextlib.contextmanager
def real_service(folder: Path) -> Iterator[RealService]:
    started: Future[RealService] = Future()

    async def live() -> None:
        try:
            world = World(folder, folder / "ledger.db")
            await world.start()
            async with served(world) as port:
                service = RealService(world, f"http://127.0.0.1:{port}", asyncio.get_running_loop(), asyncio.Event())
                started.set_result(service)
                await service.end.wait()
            await world.stop()
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
            raise

    thread = threading.Thread(target=lambda: asyncio.run(live()))
    thread.start()
    service = started.result(300)
    try:
        yield service
    finally:
        service.loop.call_soon_threadsafe(service.end.set)
        thread.join(300)
