"""A gateway with models over a real port, in a thread of its own: what clients connect to, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from serve_app.accounting.ledger import Ledger
from serve_app.contracts.generation import BackendEvent, GenerateCall
from serve_app.contracts.ports import BackendUnavailable
from serve_app.engine.config import EngineSettings
from serve_app.engine.engine import Engine
from serve_app.model.bundled import bundled_cache_dir
from serve_app.model.replica import Replica
from tests.gateway.connections import served
from tests.gateway.world import NANO, World

Answer = TypeVar("Answer")

PRICE = {"input": "1", "cached_input": "0.5", "output": "3"}
# Short, so that clients receive comments and line feeds.
PAUSES = {"keep_alive_s": 0.05, "early_reply_s": 0.5, "line_feed_s": 0.1}


class Served:
    """A running gateway. `key` has money and no limits that a test would meet; others are made by `account`.

    `svc-chat` and `svc-coder` are one model; `svc-full` has no replica, and `svc-broken` fails by an error of its own.
    """

    def __init__(self, world: World, loop: asyncio.AbstractEventLoop, port: int) -> None:
        self.world = world
        self.url = f"http://127.0.0.1:{port}"
        self.base_url = f"{self.url}/v1"
        self._loop = loop
        self.key = self.account()

    def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Runs in the gateway's loop and waits."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def account(self, credit: int = 1000 * NANO, **limits: int) -> str:
        """The key of a new account with this balance, in nano-units."""

        async def make() -> str:
            return self.world.new_account(credit, **limits)[1]

        return self.run(make())


def backends(replica: Replica) -> Callable[[str, GenerateCall], AsyncGenerator[BackendEvent, None]]:
    """What a gateway's backends do with a call."""

    async def generate(backend: str, call: GenerateCall) -> AsyncGenerator[BackendEvent, None]:
        if backend == "nowhere":
            raise BackendUnavailable("there is no replica")
        if backend == "broken":
            raise RuntimeError("this backend fails on purpose")
        async with contextlib.aclosing(replica.generate(call)) as events:
            async for event in events:
                yield event

    return generate


@contextlib.contextmanager
def serve(folder: Path, make_engine: Callable[[], Engine], **settings: Any) -> Iterator[Served]:
    """A gateway before the model of this engine, until the context ends. `settings` are the gateway's."""
    ledger = folder / "ledger.db"
    Ledger(f"sqlite:///{ledger}").close()
    models: Mapping[str, Any] = {
        name: {"backends": {backend: 100}, "price": PRICE}
        for name, backend in (
            ("svc-chat", "model"),
            ("svc-coder", "model"),
            ("svc-full", "nowhere"),
            ("svc-broken", "broken"),
        )
    }
    engine = make_engine()
    began: list[Served] = []
    ready, over = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def live() -> None:
        world = World(folder, ledger, **{**PAUSES, "models": models, **settings})
        replica = Replica(engine, world.accounting.settle)
        world.backends.generate = backends(replica)  # type: ignore[method-assign]
        world.backends.report = {name: {"status": "RUNNING", "replicas": 1} for name in ("model", "nowhere", "broken")}
        await world.start()
        try:
            async with served(world) as port:
                threading.Thread(target=lambda: (began.append(Served(world, loop, port)), ready.set())).start()
                await over.wait()
            await replica.drain()
        finally:
            await world.stop()

    thread = threading.Thread(target=loop.run_until_complete, args=(live(),), name="gateway")
    thread.start()
    try:
        while not ready.wait(0.1):
            assert thread.is_alive(), "the gateway did not start"
        yield began[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(60)
        loop.close()
        engine.close()


def bundled_engine(model: Path, home: Path) -> Engine:
    """The bundled model as the service runs it by default, with a cache of 256 MiB."""
    return Engine.from_settings(
        EngineSettings(
            model=str(model),
            dtype="int8",
            kv_cache_memory=2**28,
            cache_dir=str(bundled_cache_dir(home)),
            max_running=16,
        )
    )
