"""A call to a backend, as the gateway reads its events."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

from serve_app.contracts.generation import Bill, GenerateCall, SamplingParams
from serve_app.contracts.money import Price
from serve_app.contracts.phases import Phases
from serve_app.gateway.backends import Generation

CALL = GenerateCall("r", (), SamplingParams(1), 1, Bill("a", "k", "m", "b", Price(1, 1, 1)))


class Endless:
    """A backend that never sends an event."""

    async def generate(self, backend: str, call: GenerateCall, take: Any) -> None:
        await asyncio.Event().wait()


async def test_a_cancelled_call_leaves_no_reference_cycle() -> None:
    generation = Generation(Endless(), "b", CALL, Phases())  # type: ignore[arg-type]
    await asyncio.sleep(0)
    gc.collect()
    gc.disable()
    try:
        await generation.stop()
        known = weakref.ref(generation)
        del generation
        await asyncio.sleep(0)
        assert known() is None
    finally:
        gc.enable()
