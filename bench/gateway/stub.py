"""A fake model for measuring everything but the model: a Serve application that gives one fixed reply at once.

It takes the calls of `deployments.model.Model` and streams the same events. It renders, tokenizes and computes nothing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from ray import serve
from ray.serve import Application

from bench.gateway.request import PROMPT_TOKENS, REPLY, REPLY_TOKENS
from serve_app.backend.messages import BackendEvent, GenerateCall, Rejected, Rejection
from serve_app.engine.request import Delta, Finished, FinishReason, Started


@serve.deployment(name="Stub", max_ongoing_requests=2000, ray_actor_options={"num_cpus": 0})
class Stub:
    """Not a model."""

    async def generate(self, call: GenerateCall) -> AsyncGenerator[BackendEvent, None]:
        """Three events, as many as a model's replica sends of a reply that is there within a few milliseconds."""
        if call.bill.price.charge(PROMPT_TOKENS, 0, call.sampling.max_tokens) > call.credit:
            yield Rejected(Rejection.CREDIT, prompt_tokens=PROMPT_TOKENS)
            return
        yield Started(PROMPT_TOKENS, 0)
        yield Delta(REPLY, REPLY_TOKENS)
        yield Finished(FinishReason.STOP, PROMPT_TOKENS, 0, REPLY_TOKENS)


def app(_: dict[str, Any]) -> Application:
    """The builder that the configuration names."""
    application: Application = Stub.bind()  # type: ignore[attr-defined]
    return application
