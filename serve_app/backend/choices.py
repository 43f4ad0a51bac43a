"""Several choices for one prompt: as many generations of the engine, told as one stream."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

from serve_app.engine.errors import QueueFull
from serve_app.engine.request import Event, Finished, GenerationRequest, Started

RETRY_S = 0.05  # a choice that finds the queue full asks again: its request was let in with the first one

Generate = Callable[[GenerationRequest], AsyncGenerator[Event, None]]


def choice_of(request: GenerationRequest, choice: int) -> GenerationRequest:
    """The engine's request for one choice. Each has a seed of its own, the first one that of the request."""
    if choice == 0:
        return request
    sampling = request.sampling
    if sampling.seed is not None:
        told = hashlib.sha256(f"{sampling.seed}:{choice}".encode()).digest()
        sampling = replace(sampling, seed=int.from_bytes(told[:8], "big", signed=True))
    # Only the first one may be given up for having waited: then nothing of the reply exists yet.
    return replace(request, request_id=f"{request.request_id}#{choice}", sampling=sampling, first_token_by=None)


async def generate_choices(
    generate: Generate, request: GenerationRequest, n: int
) -> AsyncGenerator[tuple[int, Event], None]:
    """The events of each choice with its number, to the `Finished` of every one. Closing it stops them all.

    The others begin when the first one has its first token: they find the whole prompt in the cache then. So what
    `generate` raises of the request is raised before there is any output.
    """
    if n == 1:
        async with contextlib.aclosing(generate(request)) as only:
            async for said in only:
                yield 0, said
        return
    events: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue()
    pumps = [asyncio.create_task(_pump(generate, request, 0, events))]
    left = n
    try:
        while left:
            choice, event = await events.get()
            if isinstance(event, Exception):
                raise event
            if len(pumps) == 1 and not isinstance(event, Started):
                pumps += [
                    asyncio.create_task(_pump(generate, choice_of(request, other), other, events))
                    for other in range(1, n)
                ]
            left -= isinstance(event, Finished)
            yield choice, event
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.wait(pumps)


async def _pump(
    generate: Generate,
    request: GenerationRequest,
    choice: int,
    events: asyncio.Queue[tuple[int, Event | Exception]],
) -> None:
    try:
        while True:
            try:
                async with contextlib.aclosing(generate(request)) as own:
                    async for event in own:
                        events.put_nowait((choice, event))
                return
            except QueueFull:
                if choice == 0:
                    raise
                await asyncio.sleep(RETRY_S)
    except Exception as error:
        events.put_nowait((choice, error))
