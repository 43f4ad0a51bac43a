"""A backend without a model: every reply has the requested length, at a steady pace.

Only the engine is replaced. What surrounds it in a replica is the service's own: it checks the hold, and settles
for a gateway that has died.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ray import serve
from ray.serve import Application

from deployments.model import settle
from deployments.reply_lines import ReplyTo, send_events
from serve_app.contracts.generation import Delta, Event, Finished, FinishReason, GenerateCall, Started
from serve_app.engine.request import GenerationRequest
from serve_app.model.replica import Replica
from tests.service.chaos.counts import PER_PROMPT, cached_tokens

CONTEXT = 32768
PIECE_S = 0.03
TOKENS_PER_PIECE = 4  # 133 tokens a second for each reply, for any number of them


class StubChat:
    """In the place of a chat template and a tokenizer."""

    template = None

    def text(
        self, messages: Sequence[dict[str, Any]], continue_final: bool = False, tools: Any = None, variables: Any = ()
    ) -> str:
        return " ".join(message.get("content") or "" for message in messages)

    def literal(self, value: Any, spared: Any = ()) -> Any:
        return value

    def tokenize(self, text: str) -> list[int]:
        return [0] * (PER_PROMPT + len(text.split()))


class StubEngine:
    """In the place of serve_app.engine.Engine."""

    max_context = CONTEXT
    fingerprint = ""

    def __init__(self) -> None:
        self.chat = StubChat()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        prompt, wanted = len(request.prompt_token_ids), request.sampling.max_tokens
        cached = cached_tokens(prompt)
        yield Started(prompt, cached)
        made = 0
        while made < wanted:
            await asyncio.sleep(PIECE_S)
            piece = min(TOKENS_PER_PIECE, wanted - made)
            made += piece
            yield Delta("word " * piece, made)
        yield Finished(FinishReason.LENGTH, prompt, cached, made)


@serve.deployment(
    name="Model",
    max_ongoing_requests=1000,
    health_check_period_s=1,
    graceful_shutdown_wait_loop_s=0.2,
    graceful_shutdown_timeout_s=10,
    ray_actor_options={"num_cpus": 0},
)
class StubModel:
    """deployments.model.Model around the stub."""

    def __init__(self) -> None:
        self._replica = Replica(StubEngine(), settle)  # type: ignore[arg-type]

    async def reply(self, call: GenerateCall, to: ReplyTo) -> str | None:
        return await send_events(self._replica.generate(call), to)


def app(_: dict[str, Any]) -> Application:
    """The builder that the run's configuration imports."""
    return StubModel.bind()  # type: ignore[attr-defined]
