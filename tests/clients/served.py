"""A gateway with models over a real port, in a thread: what clients connect to, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch

from serve_app.contracts.generation import BackendEvent, Delta, Finished, FinishReason, GenerateCall, Started
from serve_app.contracts.ports import BackendUnavailable
from serve_app.engine.chat import ChatRenderer
from serve_app.engine.config import EngineSettings
from serve_app.engine.core import Runner
from serve_app.engine.engine import Engine
from serve_app.engine.grammar import compiler
from serve_app.engine.loading import loader
from serve_app.engine.models.choose_runner import create_runner
from serve_app.engine.scheduling.sequence import Chunk
from serve_app.engine.text.detokenizer import Vocabulary
from serve_app.model.bundled import bundled_cache_dir
from serve_app.model.replica import Replica
from tests.gateway.connections import served
from tests.gateway.world import NANO, World, taking

Answer = TypeVar("Answer")

PRICE = {"input": "1", "cached_input": "0.5", "output": "3"}
# Short, so that clients receive comments and line feeds.
PAUSES = {"keep_alive_s": 0.05, "line_feed_s": 0.1}
# More than the tests use: the limiter's clock stands still.
LIMITS = {"rpm": 10**5, "tpm": 10**9}
TOKENS = 24  # of a reply of the tiny model that ends by itself


class Served:
    """A running gateway. `key` has money and no limits that a test would meet; others are made by `account`.

    `svc-chat` and `svc-coder` are one model. `svc-full` has no replica, `svc-broken` fails by an error, `svc-cut` fails
    after its first text, and a reply of `svc-held` goes on when the test calls `release`.
    """

    def __init__(self, world: World, loop: asyncio.AbstractEventLoop, port: int, held: asyncio.Semaphore) -> None:
        self.world = world
        self.url = f"http://127.0.0.1:{port}"
        self.base_url = f"{self.url}/v1"
        self._loop = loop
        self._held = held
        self.key = self.account()

    def release(self) -> None:
        """Lets one reply of `svc-held` end."""
        self._loop.call_soon_threadsafe(self._held.release)

    def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Runs in the gateway's loop and waits."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def account(self, credit: int = 1000 * NANO, **limits: int) -> str:
        """The key of a new account with this balance, in nano-units."""

        async def make() -> str:
            return self.world.new_account(credit, **{**LIMITS, **limits})[1]

        return self.run(make())


def backends(
    replica: Replica, held: asyncio.Semaphore
) -> Callable[[str, GenerateCall], AsyncGenerator[BackendEvent, None]]:
    """Returns a function that handles a call as a gateway's backends do."""

    async def generate(backend: str, call: GenerateCall) -> AsyncGenerator[BackendEvent, None]:
        if backend == "nowhere":
            raise BackendUnavailable("there is no replica")
        if backend == "broken":
            raise RuntimeError("this backend fails on purpose")
        if backend == "cut":
            yield Started(5, 0)
            yield Delta("Wait", 1)
            raise RuntimeError("this backend fails on purpose")
        if backend == "held":
            yield Started(5, 0)
            yield Delta("Wait", 1)
            await held.acquire()
            yield Delta(".", 2)
            yield Finished(FinishReason.STOP, 5, 0, 2)
            return
        async with contextlib.aclosing(replica.generate(call)) as events:
            async for event in events:
                yield event

    return generate


@contextlib.contextmanager
def serve(folder: Path, make_engine: Callable[[], Engine], **settings: Any) -> Iterator[Served]:
    """A gateway before the model of this engine, until the context ends. `settings` are the gateway's."""
    models: Mapping[str, Any] = {
        name: {"backends": {backend: 100}, "price": PRICE}
        for name, backend in (
            ("svc-chat", "model"),
            ("svc-coder", "model"),
            ("svc-full", "nowhere"),
            ("svc-broken", "broken"),
            ("svc-held", "held"),
            ("svc-cut", "cut"),
        )
    }
    with mock.patch.object(compiler, "_REST", 0.0):  # else each new schema waits for the account's last one
        engine = make_engine()
    began: list[Served] = []
    ready, over = threading.Event(), asyncio.Event()
    held = asyncio.Semaphore(0)
    loop = asyncio.new_event_loop()

    async def live() -> None:
        world = World(folder, folder / "ledger.db", **{**PAUSES, "models": models, **settings})
        replica = Replica(engine, world.accounting.settle)
        world.backends.generate = taking(backends(replica, held))  # type: ignore[method-assign]
        world.backends.tokenize = lambda _, call: replica.tokenize(call)  # type: ignore[method-assign]
        names = ("model", "nowhere", "broken", "held", "cut")
        world.backends.report = {name: {"status": "RUNNING", "replicas": 1} for name in names}
        await world.start()
        try:
            async with served(world) as port:
                threading.Thread(target=lambda: (began.append(Served(world, loop, port, held)), ready.set())).start()
                await over.wait()
                for _ in range(1000):  # a reply that is still held would keep the server from ending
                    held.release()
            await replica.drain()
        finally:
            await world.stop()

    thread = threading.Thread(target=loop.run_until_complete, args=(live(),), name="gateway", daemon=True)
    thread.start()
    try:
        while not ready.wait(0.1):
            assert thread.is_alive(), "the gateway did not start"
        yield began[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(60)
        if thread.is_alive():
            for task in asyncio.all_tasks(loop):
                task.print_stack()
            raise AssertionError("the gateway did not end; what it waits for is printed above")
        loop.close()
        engine.close()


class EndingRunner:
    """A model runner that makes the end of a reply certain after `TOKENS` tokens, where a request allows it."""

    def __init__(self, runner: Runner, eos: int) -> None:
        self._runner = runner
        self._eos = eos
        self.num_blocks, self.class_bounds = runner.num_blocks, runner.class_bounds
        self.vocab_size = runner.vocab_size

    @torch.inference_mode()
    def execute(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        logits = self._runner.execute(chunks)
        lengths = [chunk.sequence.num_output + row for chunk in chunks for row in range(chunk.num_logits)]
        ends = [row for row, length in enumerate(lengths) if length >= TOKENS]
        logits[ends, self._eos] = 1000.0
        return logits

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        self._runner.clear_blocks(blocks)


def tiny_engine(model: Path, home: Path) -> Engine:
    """The tiny model in int8, as the service runs a model by default. Its replies are noise, and end."""
    return engine_of(
        EngineSettings(
            model=str(model),
            dtype="int8",
            kv_cache_memory=2**26,
            cache_dir=str(bundled_cache_dir(home)),
            max_running=16,
        ),
        ends=True,
    )


def engine_of(settings: EngineSettings, ends: bool = False) -> Engine:
    """An engine of a model. With `ends`, its replies end early (`EndingRunner`)."""
    loaded = loader.load(settings)
    runner: Runner = create_runner(loaded.model, loaded.settings, loaded.weights)
    if ends:
        [eos] = loaded.eos_token_ids
        runner = EndingRunner(runner, eos)
    chat = ChatRenderer(loaded.tokenizer, runner.class_bounds[-1])
    return Engine(
        runner,
        Vocabulary(loaded.tokenizer),
        loaded.eos_token_ids,
        loaded.settings,
        chat=chat,
        fingerprint=loaded.fingerprint,
    )
