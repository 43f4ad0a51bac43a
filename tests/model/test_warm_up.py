"""A replica makes a reply before it takes requests, so that the first client does not wait for what is loaded late."""

from __future__ import annotations

import pytest

from serve_app.contracts.generation import Delta, Finished, FinishReason, Started
from serve_app.engine.errors import ModelError
from serve_app.model.dialect import Dialect
from serve_app.model.warm_up import NAME, warm_up
from tests.model.test_replica import ScriptedEngine


async def warmed(reason: FinishReason, **limits: int) -> ScriptedEngine:
    engine = ScriptedEngine(Started(5, 0), Delta("one", 1), Finished(reason, 5, 0, 1))
    engine.max_context = limits.get("max_context", 1000)
    await warm_up(engine, Dialect(engine))  # type: ignore[arg-type]
    return engine


async def test_the_first_reply_is_no_accounts() -> None:
    [request] = (await warmed(FinishReason.LENGTH)).requests
    assert (request.request_id, request.tenant) == (NAME, NAME)
    assert request.sampling.max_tokens > 1, "the first token alone would not show how the next ones are made"


async def test_a_model_that_can_not_reply_takes_no_requests() -> None:
    with pytest.raises(ModelError, match="error"):
        await warmed(FinishReason.ERROR)


async def test_a_context_that_is_too_short_for_it_is_served_all_the_same() -> None:
    assert (await warmed(FinishReason.LENGTH, max_context=20)).requests == []
