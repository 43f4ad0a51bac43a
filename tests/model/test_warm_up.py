"""A replica makes a reply before it takes requests, so that the first client does not wait for what is loaded late."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import fields

import pytest

from serve_app.contracts.generation import Delta, Event, Finished, FinishReason, SamplingParams, Started
from serve_app.engine.errors import ModelError, RequestRefused
from serve_app.engine.request import GenerationRequest
from serve_app.model.dialect import Dialect
from serve_app.model.warm_up import NAME, warm_up
from tests.model.test_replica import ScriptedEngine


class Refusing(ScriptedEngine):
    """Refuses parameters that the test names, as vLLM does beside a draft model."""

    def __init__(self, *refused: str, reason: FinishReason = FinishReason.LENGTH) -> None:
        super().__init__(Started(5, 0), Delta("one", 1), Finished(FinishReason.LENGTH, 5, 0, 1))
        self.max_context = 1000
        self.refused = refused
        self.reason = reason

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        if any(getattr(request.sampling, name) for name in self.refused):
            if self.reason is FinishReason.LENGTH:
                raise RequestRefused(f"{self.refused}")
            yield Finished(self.reason, 5, 0, 0)
            return
        async for event in super().generate(request):
            yield event


async def warmed(reason: FinishReason, **limits: int) -> ScriptedEngine:
    engine = ScriptedEngine(Started(5, 0), Delta("one", 1), Finished(reason, 5, 0, 1))
    engine.max_context = limits.get("max_context", 1000)
    await warm_up(engine, Dialect(engine))  # type: ignore[arg-type]
    return engine


async def test_the_first_reply_is_no_accounts() -> None:
    requests = (await warmed(FinishReason.LENGTH)).requests
    assert {(request.request_id, request.tenant) for request in requests} == {(NAME, NAME)}
    least = min(request.sampling.max_tokens for request in requests)
    assert least > 1, "the first token alone would not show how the next ones are made"


async def test_every_parameter_of_a_request_is_used_once_before_a_client_uses_it() -> None:
    asked = [request.sampling for request in (await warmed(FinishReason.LENGTH)).requests]
    # These only cut or show the text, which no model computes.
    for field in {field.name for field in fields(SamplingParams)} - {
        "max_tokens",
        "stop",
        "include_stop_str_in_output",
        "shown",
        "mark",
        "token_ids",
    }:
        assert len({str(getattr(sampling, field)) for sampling in asked}) > 1, field
    drawn = [sampling for sampling in asked if sampling.top_p < 1 and sampling.top_k]
    assert {sampling.seed is None for sampling in drawn} == {True, False}


@pytest.mark.parametrize("refused", [("min_p", "logit_bias", "ignore_eos"), ("grammar",)], ids=str)
async def test_an_engine_that_does_not_support_a_parameter_takes_requests(refused: tuple[str, ...]) -> None:
    engine = Refusing(*refused)
    await warm_up(engine, Dialect(engine))  # type: ignore[arg-type]
    assert engine.requests


async def test_an_engine_that_ends_at_a_parameter_takes_none() -> None:
    engine = Refusing("seed", reason=FinishReason.ABORT)
    with pytest.raises(ModelError, match=r"top_p, top_k and seed.*abort"):
        await warm_up(engine, Dialect(engine))  # type: ignore[arg-type]


async def test_a_model_that_can_not_reply_takes_no_requests() -> None:
    with pytest.raises(ModelError, match="error"):
        await warmed(FinishReason.ERROR)


async def test_a_context_that_is_too_short_for_it_is_served_all_the_same() -> None:
    assert (await warmed(FinishReason.LENGTH, max_context=20)).requests == []
