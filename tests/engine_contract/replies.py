"""Requests to an engine and their replies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from dataclasses import dataclass, field
from typing import Any

from serve_app.contracts.generation import Delta, Finished, PromptScored, SamplingParams, Started, TokenLogprob
from serve_app.engine.port import EnginePort
from serve_app.engine.request import GenerationRequest

_NUMBERS = itertools.count()
QUESTION = "Tell me about rivers."


@dataclass
class Reply:
    started: Started | None = None
    scored: list[TokenLogprob] = field(default_factory=list)  # tokens of the prompt
    deltas: list[Delta] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def tokens(self) -> list[TokenLogprob]:
        """Returns the tokens of all deltas, where log-probabilities were asked for."""
        return [token for delta in self.deltas for token in delta.tokens]

    @property
    def end(self) -> Finished:
        assert self.finished is not None
        return self.finished


class Asker:
    """Makes requests to one engine."""

    def __init__(self, engine: EnginePort) -> None:
        self.engine = engine

    def request(
        self,
        prompt: str | tuple[int, ...] = QUESTION,
        *,
        tenant: str = "",
        adapter: str = "",
        deadline: float | None = None,
        **options: Any,
    ) -> GenerationRequest:
        """Greedy, 24 tokens, of a tenant of its own, unless told otherwise."""
        number = next(_NUMBERS)
        ids = (
            tuple(self.engine.chat.render([{"role": "user", "content": prompt}])) if isinstance(prompt, str) else prompt
        )
        sampling = SamplingParams(**{"max_tokens": 24, "temperature": 0.0, **options})
        tenant = tenant or f"tenant{number}"
        return GenerationRequest(f"r{number}", ids, sampling, tenant, adapter=adapter, first_token_by=deadline)

    async def run(self, request: GenerationRequest, order: list[str] | None = None) -> Reply:
        """The whole reply. `order` receives the request's id when it starts."""
        reply = Reply()
        async with asyncio.timeout(300), contextlib.aclosing(self.engine.generate(request)) as events:
            async for event in events:
                match event:
                    case Started():
                        assert not reply.deltas
                        if order is not None and reply.started is None:
                            order.append(request.request_id)
                        reply.started = event
                    case PromptScored():
                        assert not reply.deltas
                        reply.scored += event.tokens
                    case Delta():
                        reply.deltas.append(event)
                    case Finished():
                        assert reply.finished is None
                        reply.finished = event
        return reply

    async def ask(self, prompt: str | tuple[int, ...] = QUESTION, **options: Any) -> Reply:
        return await self.run(self.request(prompt, **options))

    async def until_idle(self) -> None:
        async with asyncio.timeout(60):
            while (stats := self.engine.stats()).running or stats.waiting:
                await asyncio.sleep(0.01)
