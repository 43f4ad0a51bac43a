"""Generates an engine's first reply, before any client's. It loads and compiles the parts that every reply needs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Final

from serve_app.contracts.generation import Bill, Finished, FinishReason, GenerateCall, SamplingParams
from serve_app.contracts.money import Price
from serve_app.engine.errors import ContextLengthExceeded, ModelError
from serve_app.engine.port import EnginePort
from serve_app.engine.request import GenerationRequest
from serve_app.model.dialect import Dialect

NAME: Final = "warm-up"  # request id and tenant: no account finds this prompt in the cache
TOKENS: Final = 8
MESSAGES: Final = ({"role": "user", "content": "Count: " + " ".join(map(str, range(64)))},)


async def warm_up(engine: EnginePort, dialect: Dialect) -> None:
    """Generates a short reply, unless its prompt is too long for the context. Raises ModelError if that fails."""
    sampling = SamplingParams(TOKENS, ignore_eos=True)
    call = GenerateCall(NAME, MESSAGES, sampling, 0, Bill(NAME, NAME, NAME, NAME, Price(0, 0, 0)))
    try:
        prompt = await asyncio.to_thread(dialect.prompt, call)
    except ContextLengthExceeded:
        return
    if len(prompt.token_ids) + TOKENS > engine.max_context:
        return
    request = GenerationRequest(
        request_id=NAME,
        prompt_token_ids=tuple(prompt.token_ids),
        sampling=replace(prompt.sampling, max_tokens=TOKENS),
        tenant=NAME,
    )
    async for event in engine.generate(request, lambda: 0.0):
        if isinstance(event, Finished) and event.reason not in (FinishReason.LENGTH, FinishReason.STOP):
            raise ModelError(f"the model was loaded and can't reply: its first reply ended with {event.reason}")
