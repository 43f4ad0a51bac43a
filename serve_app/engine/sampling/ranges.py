"""Rejects requests whose prompt or parameters are out of range for the model; used by every engine."""

from __future__ import annotations

import math

from serve_app.contracts.generation import SamplingParams
from serve_app.engine.errors import ContextLengthExceeded, RequestRefused
from serve_app.engine.request import GenerationRequest

MAX_TOP_LOGPROBS = 20


def output_room(request: GenerationRequest, max_context: int, vocab: int) -> int:
    """Number of tokens that the context leaves for the reply, at least 1. `vocab` is the width of the logits.

    Raises:
        ValueError: the prompt is empty or has ids outside the vocabulary, or `request.weight` is not a positive number.
        ContextLengthExceeded: there is no room for a token.
    """
    prompt = request.prompt_token_ids
    if not prompt:
        raise ValueError("the prompt is empty")
    if not 0 < request.weight < math.inf:
        raise ValueError(f"the weight must be a positive number, and is {request.weight}")
    if len(prompt) >= max_context:
        raise ContextLengthExceeded(len(prompt), max_context)
    if len(prompt) + len(request.said) >= max_context:
        raise ContextLengthExceeded(len(prompt) + len(request.said), max_context)
    if min(prompt) < 0 or max(prompt) >= vocab or any(not 0 <= token < vocab for token in request.said):
        raise RequestRefused(f"the prompt has token ids outside this model's vocabulary of {vocab}", "prompt")
    return max_context - len(prompt)


def check_sampling(params: SamplingParams, vocab: int) -> None:
    """Raises ValueError for a token outside the vocabulary, and for log-probabilities out of range."""
    where = f"outside this model's vocabulary of {vocab} tokens, 0 to {vocab - 1}"
    for name, tokens in (
        ("logit_bias", (token for token, _ in params.logit_bias)),
        ("stop_token_ids", iter(params.stop_token_ids)),
    ):
        if (outside := next((token for token in tokens if not 0 <= token < vocab), None)) is not None:
            raise ValueError(f"{name} has the token id {outside}, which is {where}")
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and not 0 <= count <= MAX_TOP_LOGPROBS:
            raise ValueError(f"{name} must be from 0 to {MAX_TOP_LOGPROBS}")
