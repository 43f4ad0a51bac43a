"""The files that a plain streamed chat request enters, from the socket to the usage row, are those of the documents.

Gateway, limiter, accounting and replica run in one process here, over a scripted engine. Ray's handles and the
deployments' shells, which only pass messages on, are in the list as well and are not entered here.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest

from serve_app.contracts import limiting
from serve_app.contracts.generation import BackendEvent, Delta, Finished, FinishReason, GenerateCall, Started
from serve_app.contracts.limits import Contract
from serve_app.limiter.pressure import Tuning
from serve_app.model.orphans import Orphans
from serve_app.model.replica import Replica
from serve_app.storage.spool import ORPHANS, Spool
from tests.gateway.world import World, taking, until
from tests.model.test_replica import ScriptedEngine

ROOT = Path(__file__).parents[2]
# Entered only where Ray runs. They pass on the messages of this test.
SHELLS = {
    "deployments/handles.py",
    "deployments/metrics.py",
    "deployments/model.py",
    "deployments/reply_lines.py",
    "deployments/direct_calls.py",
    "deployments/transport.py",
    "serve_app/contracts/encoding.py",
}


class Recorder:
    """The files of the service whose functions are called while `recording`, other than those of the engine."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.recording = False
        # Before the first thread begins: Python 3.11 sets no profile for threads that run.
        threading.setprofile(self)
        sys.setprofile(self)

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if self.recording and event == "call":
            path = frame.f_code.co_filename
            if path.startswith(str(ROOT)) and frame.f_code.co_name != "<module>":
                self.files.add(str(Path(path).relative_to(ROOT)))

    def stop(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    @property
    def of_the_service(self) -> set[str]:
        return {
            name
            for name in self.files
            if name.startswith(("serve_app/", "deployments/")) and not name.startswith("serve_app/engine/")
        }


@pytest.fixture
async def files(
    make_world: Callable[..., Awaitable[World]], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[set[str]]:
    """The files that the second of two streamed requests enters: the first one has filled the caches."""

    async def settle_orphan(_: Any) -> None: ...

    async def generate(_: str, call: GenerateCall) -> AsyncGenerator[BackendEvent, None]:
        async for event in replica.generate(call):
            yield event

    recorder = Recorder()
    world = await make_world()
    engine = ScriptedEngine(Started(5, 0), Delta("Hel", 1), Delta("lo", 2), Finished(FinishReason.STOP, 5, 0, 2))
    engine.max_context = 10_000
    spool = Spool(world.folder / "spool", "replica", suffix=ORPHANS, flushed=False)
    replica = Replica(engine, settle_orphan, orphans=Orphans(settle_orphan, spool))  # type: ignore[arg-type]
    monkeypatch.setattr(world.backends, "generate", taking(generate))
    admission = world.limiter.service.admission
    # The level moves when a replica has been silent for long: here a slow machine would make it so.
    admission.reconfigure(Contract(rpm=1000, tpm=10**6, concurrency=8), Tuning(silent_s=3600))
    await world.limiter.ask([limiting.PressureReport("fake", "replica-1", 0.0, 0.1, 0, 0, 1, 100)])
    transport = httpx.ASGITransport(world.app())
    body = {"model": "svc-chat", "stream": True, "messages": [{"role": "user", "content": "Hello"}]}
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            for turn in range(2):
                recorder.recording = turn == 1
                sent = {"authorization": f"Bearer {world.key}"}
                reply = await client.post("/v1/chat/completions", json=body, headers=sent)
                await until(lambda turn=turn: released(world) == turn + 1)  # type: ignore[misc]
                recorder.recording = False
                assert reply.text.endswith("data: [DONE]\n\n")
        assert world.recorded == 2
        yield recorder.of_the_service | SHELLS
    finally:
        recorder.stop()


def released(world: World) -> int:
    return sum(isinstance(ask, limiting.Release) for ask in world.limiter.asked)


async def test_the_documents_list_exactly_the_files_that_a_request_enters(files: set[str]) -> None:
    names = [Path(name).name for name in files]
    assert sorted(names) == sorted(set(names)), "two files of one name"
    text = (ROOT / "docs" / "architecture.md").read_text()
    walk = text[text.index("## One chat request") :]
    walk = walk[: walk.index("\n## ", 1)]
    assert set(re.findall(r"`((?:serve_app|deployments)/[a-z_/]+\.py)", walk)) == files
