"""Generates several choices for one or more prompts: one engine request per choice, merged into one stream."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace

from serve_app.contracts.generation import Event, Finished, Started
from serve_app.engine.errors import QueueFull
from serve_app.engine.request import GenerationRequest

RETRY_S = 0.05  # seconds until a choice that found the queue full tries again; only choice 0 is rejected

Generate = Callable[[GenerationRequest], AsyncGenerator[Event, None]]
Numbered = tuple[int, Event]


async def generate_choices(
    generate: Generate, prompts: Sequence[GenerationRequest], n: int
) -> AsyncGenerator[Numbered, None]:
    """Yields the events of the `n` choices of each prompt, each with the choice's number. `Finished` ends a choice.

    Choices are numbered in the order of the prompts, from 0. Closing the generator stops all choices.

    A prompt's first choice starts alone, and its other choices start when the first one has a token. By then, the whole
    prompt is in the cache, and any error in the request would have been raised. All other prompts start when the first
    prompt has left the queue.
    """
    events: asyncio.Queue[Numbered | Exception] = asyncio.Queue()
    pumps: list[asyncio.Task[None]] = []

    def start(number: int) -> None:
        request = _request_of(prompts[number // n], number, number % n)
        pumps.append(asyncio.create_task(_pump(generate, request, number, events)))

    start(0)
    unfinished = len(prompts) * n
    lone = set(range(len(prompts)))  # prompts of which at most the first choice has started
    try:
        while unfinished:
            item = await events.get()
            if isinstance(item, Exception):
                raise item
            number, event = item
            if len(pumps) == 1:
                for prompt in range(1, len(prompts)):
                    start(prompt * n)
            prompt = number // n
            if prompt in lone and not isinstance(event, Started):
                lone.discard(prompt)
                for other in range(1, n):
                    start(prompt * n + other)
            unfinished -= isinstance(event, Finished)
            yield number, event
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.wait(pumps)


def _request_of(request: GenerationRequest, number: int, choice: int) -> GenerationRequest:
    """Returns the engine's request for a choice. The choices of a prompt have separate seeds."""
    if not number:
        return request
    sampling = request.sampling
    if choice:
        seed = sampling.seed
        if seed is not None:
            digest = hashlib.sha256(f"{seed}:{choice}".encode()).digest()
            seed = int.from_bytes(digest[:8], "big", signed=True)
        sampling = replace(sampling, seed=seed, prompt_logprobs=None)
    # Only choice 0 has a deadline for its first token, because all others start later.
    return replace(request, request_id=f"{request.request_id}#{number}", sampling=sampling, first_token_by=None)


async def _pump(
    generate: Generate, request: GenerationRequest, number: int, events: asyncio.Queue[Numbered | Exception]
) -> None:
    try:
        while True:
            try:
                async with contextlib.aclosing(generate(request)) as own:
                    async for event in own:
                        events.put_nowait((number, event))
                return
            except QueueFull:
                if number == 0:
                    raise
                await asyncio.sleep(RETRY_S)
    except Exception as error:
        events.put_nowait(error)
