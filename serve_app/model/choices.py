"""Generates several choices for one prompt: one engine generation for each choice, merged into one stream."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

from serve_app.contracts.generation import Event, Finished, Started
from serve_app.engine.errors import QueueFull
from serve_app.engine.request import GenerationRequest

RETRY_S = 0.05  # between retries of a choice when the queue is full: its call was accepted with the first choice

Generate = Callable[[GenerationRequest], AsyncGenerator[Event, None]]
Numbered = tuple[int, Event]


async def generate_choices(generate: Generate, request: GenerationRequest, n: int) -> AsyncGenerator[Numbered, None]:
    """Yields the events of each choice with its number, up to `Finished` of each. Closing it stops all choices.

    The other choices start when the first choice has its first token. By then, the whole prompt is in the cache, and an
    error in the request has been raised before any output.
    """
    events: asyncio.Queue[Numbered | Exception] = asyncio.Queue()
    pumps = [asyncio.create_task(_pump(generate, request, 0, events))]
    unfinished = n
    try:
        while unfinished:
            item = await events.get()
            if isinstance(item, Exception):
                raise item
            choice, event = item
            if len(pumps) == 1 and not isinstance(event, Started):
                for other in range(1, n):
                    pumps.append(asyncio.create_task(_pump(generate, _request_of(request, other), other, events)))
            unfinished -= isinstance(event, Finished)
            yield choice, event
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.wait(pumps)


def _request_of(request: GenerationRequest, choice: int) -> GenerationRequest:
    """Returns the engine's request for a choice after the first one, with a separate seed."""
    sampling = request.sampling
    if sampling.seed is not None:
        digest = hashlib.sha256(f"{sampling.seed}:{choice}".encode()).digest()
        sampling = replace(sampling, seed=int.from_bytes(digest[:8], "big", signed=True))
    # Only the first choice has a deadline for its first token: the others start after that token.
    return replace(request, request_id=f"{request.request_id}#{choice}", sampling=sampling, first_token_by=None)


async def _pump(
    generate: Generate, request: GenerationRequest, choice: int, events: asyncio.Queue[Numbered | Exception]
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
        events.put_nowait(error)
