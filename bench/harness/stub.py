"""A stub of the model: a Serve application with one fixed, immediate reply, to measure everything except the model.

Like `deployments.model.Model`, it takes gateways' calls, streams events, and stores a reply's usage before the last
event. It does not render, tokenize or compute.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from ray import serve
from ray.serve import Application

from bench.harness.stub_request import PROMPT_TOKENS, REPLY, REPLY_TOKENS
from deployments.model import settle, unsettled
from deployments.reply_lines import ReplyTo, send_events
from serve_app.contracts.generation import (
    BackendEvent,
    Delta,
    Finished,
    FinishReason,
    GenerateCall,
    Rejected,
    Rejection,
    Started,
    TokenizeCall,
    Tokenized,
)
from serve_app.model.orphans import Orphans
from serve_app.settings import home_dir
from serve_app.storage.spool import ORPHANS, Spool


@serve.deployment(name="Stub", max_ongoing_requests=2000, ray_actor_options={"num_cpus": 0})
class Stub:
    def __init__(self) -> None:
        spool = Spool(home_dir() / "spool", f"replica-{uuid.uuid4().hex}", suffix=ORPHANS, flushed=False)
        self._orphans = Orphans(settle, spool, unsettled)
        self._orphans.start()

    async def reply(self, call: GenerateCall, to: ReplyTo) -> str | None:
        """Sends a reply. Gateways call this method."""
        return await send_events(self.generate(call), to)

    async def generate(self, call: GenerateCall) -> AsyncGenerator[BackendEvent, None]:
        """Yields three events, as a model's replica does for a reply that takes a few milliseconds."""
        if call.bill.price.cost(PROMPT_TOKENS, 0, call.sampling.max_tokens) > call.credit:
            yield Rejected(Rejection.CREDIT, prompt_tokens=PROMPT_TOKENS)
            return
        yield Started(PROMPT_TOKENS, 0)
        yield Delta(REPLY, REPLY_TOKENS)
        finished = Finished(FinishReason.STOP, PROMPT_TOKENS, 0, REPLY_TOKENS)
        self._orphans.write_ahead(call, finished, time.time())
        yield finished

    async def tokenize(self, call: TokenizeCall) -> Tokenized:
        return Tokenized(PROMPT_TOKENS)


def app(_: dict[str, Any]) -> Application:
    """Builds the application. The configuration names this function."""
    application: Application = Stub.bind()  # type: ignore[attr-defined]
    return application
