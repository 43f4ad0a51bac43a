"""Generates a few replies before the first request, so that the engine loads and compiles what replies need."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Final

from serve_app.contracts.generation import (
    Bill,
    Finished,
    FinishReason,
    GenerateCall,
    Grammar,
    GrammarKind,
    SamplingParams,
)
from serve_app.contracts.money import Price
from serve_app.engine.errors import ContextLengthExceeded, EngineClosed, ModelError
from serve_app.engine.port import EnginePort
from serve_app.engine.request import GenerationRequest
from serve_app.model.dialect import Dialect

logger = logging.getLogger("ray.serve")

NAME: Final = "warm-up"  # used as request id and tenant, so no account finds this prompt in the cache
MESSAGES: Final = ({"role": "user", "content": "Count: " + " ".join(map(str, range(64)))},)
_SHORT = SamplingParams(2, min_tokens=2)
#: Parameters of the test replies. An engine may run different code for each; a seed makes a difference only on a GPU.
REPLIES: Final = {
    "plain": SamplingParams(8, min_tokens=8),
    "temperature 0": replace(_SHORT, temperature=0.0, stop_token_ids=(0,)),
    "top_p": replace(_SHORT, top_p=0.9),
    "top_k": replace(_SHORT, top_k=40),
    "top_p and top_k": replace(_SHORT, top_p=0.9, top_k=40),
    "top_p, top_k and seed": replace(_SHORT, top_p=0.9, top_k=40, seed=1),
    "min_p": replace(_SHORT, min_p=0.05),
    "logit_bias": replace(_SHORT, logit_bias=((0, -1.0),), ignore_eos=True),
    "penalties": replace(_SHORT, repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1),
    "logprobs": replace(_SHORT, logprobs=5),
    "logprobs of the prompt": replace(_SHORT, logprobs=1, prompt_logprobs=1, end_logprob=True),
    "a grammar": SamplingParams(2, grammar=Grammar(GrammarKind.JSON_OBJECT)),
}


async def warm_up(engine: EnginePort, dialect: Dialect) -> None:
    """Generates short replies, unless their prompt is too long for the context.

    Raises ModelError if the plain reply fails, or if the engine stops during any reply. Other replies are allowed to
    fail, because some engines do not support their parameters.
    """
    call = GenerateCall(NAME, MESSAGES, REPLIES["plain"], 0, Bill(NAME, NAME, NAME, NAME, Price(0, 0, 0)))
    try:
        prompt = await asyncio.to_thread(dialect.prompt, call)
    except ContextLengthExceeded:
        return
    if len(prompt.token_ids) + REPLIES["plain"].max_tokens > engine.max_context:
        return
    for name, sampling in REPLIES.items():
        sampling = replace(sampling, shown=prompt.sampling.shown)
        reason = await _reply(engine, GenerationRequest(NAME, tuple(prompt.token_ids), sampling, NAME))
        if reason is FinishReason.ABORT or (name == "plain" and not _is_good(reason)):
            raise ModelError(f"the model was loaded but can't reply: its test reply ({name}) ended with {reason}")
        if not _is_good(reason):
            logger.warning("The test reply with %s failed: %s.", name, reason)


def _is_good(reason: FinishReason | ValueError) -> bool:
    return reason in (FinishReason.LENGTH, FinishReason.STOP)


async def _reply(engine: EnginePort, request: GenerationRequest) -> FinishReason | ValueError:
    """Generates a reply. Returns its finish reason, or the error if the engine refuses the request."""
    try:
        async for event in engine.generate(request):
            if isinstance(event, Finished):
                return event.reason
    except ValueError as refused:
        return refused
    except EngineClosed:
        return FinishReason.ABORT
    return FinishReason.ABORT
