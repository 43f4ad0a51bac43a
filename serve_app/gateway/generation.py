"""One call to a model replica: what it is asked, and its events, for which can be waited without losing any."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

from serve_app.api import ChatRequest, errors
from serve_app.backend.messages import BackendEvent, Bill, GenerateCall
from serve_app.engine.request import Grammar, GrammarKind, SamplingParams
from serve_app.gateway.ports import BackendPort, BackendUnavailable
from serve_app.gateway.tasks import detached
from serve_app.ledger.messages import Price
from serve_app.limits.messages import Grant

logger = logging.getLogger("ray.serve")

USUAL_WEIGHT = 100  # of an account, which counts as 1 in the engine's queue


def call_for(
    chat: ChatRequest, grant: Grant, backend: str, price: Price, *, settle_after_s: float, first_token_within_s: float
) -> GenerateCall:
    """What a replica is asked for a request that has been let in."""
    sampling = SamplingParams(
        max_tokens=max(1, grant.max_tokens // chat.n),  # for each choice
        temperature=chat.temperature,
        top_p=chat.top_p,
        top_k=chat.top_k,
        min_p=chat.min_p,
        repetition_penalty=chat.repetition_penalty,
        frequency_penalty=chat.frequency_penalty,
        presence_penalty=chat.presence_penalty,
        stop=chat.stop,
        seed=chat.seed,
        min_tokens=chat.min_tokens,
        ignore_eos=chat.ignore_eos,
        logit_bias=tuple((chat.logit_bias or {}).items()),
        logprobs=chat.top_logprobs if chat.logprobs else None,
        grammar=grammar_for(chat.response_format),
    )
    return GenerateCall(
        request_id=grant.request_id,
        messages=chat.messages,
        sampling=sampling,
        # A tentative grant holds all there is: the replica's count decides what that pays for.
        credit=0 if grant.tentative else grant.hold,
        bill=Bill(grant.account_id, grant.key_id, chat.model, backend, price),
        continue_final=chat.continue_final,
        settle_after_s=settle_after_s,
        weight=grant.weight / USUAL_WEIGHT,
        first_token_within_s=first_token_within_s,
        n=chat.n,
        tools=chat.tools,
        tool_choice=chat.tool_choice,
        function=chat.forced_function,
        parallel_calls=chat.parallel_tool_calls,
    )


def grammar_for(response_format: Mapping[str, Any] | None) -> Grammar | None:
    """What a reply in this format is held to; None for text.

    A schema that is not strict is held to as far as that is possible: keywords that can't be enforced are ignored,
    where a strict one is refused for them by the replica.
    """
    if response_format is None:
        return None
    if response_format["type"] == "json_object":
        return Grammar(GrammarKind.JSON_OBJECT)
    given = response_format["json_schema"]
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(given["schema"]), strict=bool(given.get("strict")))


class Generation:
    """The events of one call, in a queue: waiting for one can be given up without cancelling the call."""

    def __init__(self, backends: BackendPort, backend: str, call: GenerateCall) -> None:
        self._backend = backend
        self._request_id = call.request_id
        self._queue: asyncio.Queue[BackendEvent | BaseException] = asyncio.Queue()
        self._first: BackendEvent | None = None  # taken out of the queue to see whether the request can run
        self._pump = detached(self._relay(backends.generate(backend, call)))

    async def first(self) -> BackendEvent:
        """Waits for the first event, which tells whether the request can run; `next` answers it again."""
        self._first = await self.next()
        return self._first

    async def next(self) -> BackendEvent:
        """Raises ApiError when the call has failed."""
        event = self.ready()
        return self._taken(await self._queue.get()) if event is None else event

    def ready(self) -> BackendEvent | None:
        """What `next` would answer without waiting; None where it would wait. Raises what `next` does."""
        if (first := self._first) is not None:
            self._first = None
            return first
        return None if self._queue.empty() else self._taken(self._queue.get_nowait())

    def _taken(self, event: BackendEvent | BaseException) -> BackendEvent:
        if isinstance(event, BackendUnavailable):
            logger.warning("backend %s: %s", self._backend, event)
            raise errors.overloaded("the model lost this request or is starting: try again", retry_after_s=2)
        if isinstance(event, BaseException):
            logger.error("backend %s failed on %s", self._backend, self._request_id, exc_info=event)
            raise errors.server_error()
        return event

    def cancel(self) -> None:
        """Stops the model. Never waits."""
        self._pump.cancel()

    async def stop(self) -> None:
        """Stops the model and waits until the call has ended."""
        self._pump.cancel()
        await asyncio.wait([self._pump])

    def arrived(self) -> Iterator[BackendEvent | BaseException]:
        """The events that nobody has waited for yet."""
        if self._first is not None:
            yield self._first
            self._first = None
        while not self._queue.empty():
            yield self._queue.get_nowait()

    async def _relay(self, events: AsyncGenerator[BackendEvent, None]) -> None:
        async with contextlib.aclosing(events):
            try:
                async for event in events:
                    self._queue.put_nowait(event)
                self._queue.put_nowait(BackendUnavailable("the stream ended early"))
            except Exception as error:
                self._queue.put_nowait(error)
            except asyncio.CancelledError:
                # Also what a call raises that the other side has cancelled: whoever waits must hear of it.
                self._queue.put_nowait(BackendUnavailable("the call was cancelled"))
                raise
