"""Which backend gets a request, what it is asked, and its events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

from serve_app.api import errors
from serve_app.api.chat_request import ChatRequest
from serve_app.contracts.calls import detached
from serve_app.contracts.generation import BackendEvent, Bill, GenerateCall, Grammar, GrammarKind, SamplingParams
from serve_app.contracts.limiting import Grant
from serve_app.contracts.money import Price
from serve_app.contracts.phases import Phases
from serve_app.contracts.ports import BackendPort, BackendUnavailable
from serve_app.contracts.trace_context import TraceCall
from serve_app.settings import GatewaySettings, IdentifierSettings

logger = logging.getLogger("ray.serve")

USUAL_WEIGHT = 100  # of an account, which counts as 1 in the engine's queue


class Catalogue:
    """The fixed identifiers that clients name, and the backends behind each.

    A backend is chosen by weight, so that a new one can take over behind a fixed identifier step by step.
    """

    def __init__(self, settings: GatewaySettings, rng: random.Random) -> None:
        self._models = settings.models
        self._prices = {name: model.price.per_token() for name, model in settings.models.items()}
        self._rng = rng
        #: Identifier to its context and output limits, in tokens.
        self.served = {name: (model.context_length, model.max_output) for name, model in settings.models.items()}

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._models

    def __getitem__(self, identifier: str) -> IdentifierSettings:
        return self._models[identifier]

    @property
    def identifiers(self) -> tuple[str, ...]:
        """In the order of the configuration."""
        return tuple(self._models)

    def price(self, identifier: str) -> Price:
        return self._prices[identifier]

    def choose_backend(self, identifier: str) -> str:
        """The backend for one request."""
        backends = self._models[identifier].backends
        if len(backends) == 1:
            return next(iter(backends))
        return self._rng.choices(list(backends), weights=list(backends.values()))[0]

    def backends(self) -> tuple[str, ...]:
        """All backends that can be chosen, each once."""
        return tuple(dict.fromkeys(name for identifier in self._models for name in self.behind(identifier)))

    def behind(self, identifier: str) -> tuple[str, ...]:
        """The backends that can be chosen for one identifier."""
        return tuple(name for name, weight in self._models[identifier].backends.items() if weight)


def system_fingerprint(backend: str, fingerprint: str = "") -> str:
    """`system_fingerprint` of a reply: it changes with the backend, and with the weights of a backend.

    `fingerprint` is that of the weights, as a replica sends it; empty while it is unknown.
    """
    return f"fp_{backend}_{fingerprint}" if fingerprint else f"fp_{backend}"


def call_for(
    chat: ChatRequest,
    grant: Grant,
    backend: str,
    price: Price,
    *,
    settle_after_s: float,
    first_token_within_s: float,
    trace: TraceCall | None = None,
) -> GenerateCall:
    """What a replica is asked for an admitted request."""
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
        logit_bias=tuple(chat.logit_bias.items()),
        logprobs=chat.top_logprobs if chat.logprobs else None,
        grammar=grammar_for(chat.response_format),
    )
    return GenerateCall(
        request_id=grant.request_id,
        messages=chat.messages,
        sampling=sampling,
        # A tentative grant holds all there is: the replica's count decides what that pays for.
        credit=0 if grant.tentative else grant.hold,
        bill=Bill(grant.account_id, grant.key_id, chat.model, backend, price, grant.epoch),
        continue_final=chat.continue_final,
        settle_after_s=settle_after_s,
        weight=grant.weight / USUAL_WEIGHT,
        first_token_within_s=first_token_within_s,
        n=chat.n,
        tools=chat.tools,
        tool_choice=chat.tool_choice,
        function=chat.forced_function,
        parallel_calls=chat.parallel_tool_calls,
        trace=trace,
    )


def grammar_for(response_format: Mapping[str, Any] | None) -> Grammar | None:
    """The grammar that holds a reply to this format; None for text.

    Of a schema that is not strict, keywords that can't be enforced are ignored; a strict one is refused for them by
    the replica.
    """
    if response_format is None:
        return None
    if response_format["type"] == "json_object":
        return Grammar(GrammarKind.JSON_OBJECT)
    if response_format["type"] == "regex":
        return Grammar(GrammarKind.REGEX, response_format["pattern"])
    given = response_format["json_schema"]
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(given["schema"]), strict=bool(given.get("strict")))


class Generation:
    """The events of one call, in a queue: waiting for one can be given up without cancelling the call."""

    def __init__(self, backends: BackendPort, backend: str, call: GenerateCall, phases: Phases) -> None:
        self._backend = backend
        self._phases = phases
        phases.called()
        self._request_id = call.request_id
        self._events: asyncio.Queue[BackendEvent | BaseException] = asyncio.Queue()
        self._reading = detached(self._read_events(backends.generate(backend, call)))

    async def next_event(self) -> BackendEvent:
        """Raises ApiError when the call has failed."""
        event = self.ready_event()
        return self._raise_failure(await self._events.get()) if event is None else event

    def ready_event(self) -> BackendEvent | None:
        """The next event if it has arrived, else None. Raises as `next_event` does."""
        return None if self._events.empty() else self._raise_failure(self._events.get_nowait())

    def unread(self) -> Iterator[BackendEvent | BaseException]:
        """The events that have arrived and were not read."""
        while not self._events.empty():
            yield self._events.get_nowait()

    def cancel(self) -> None:
        """Stops the model. Never waits."""
        self._phases.end()
        self._reading.cancel()

    async def stop(self) -> None:
        """Stops the model and waits until the call has ended."""
        self._reading.cancel()
        await asyncio.wait([self._reading])

    def _raise_failure(self, event: BackendEvent | BaseException) -> BackendEvent:
        if isinstance(event, BackendUnavailable):
            logger.warning("backend %s: %s", self._backend, event)
            raise errors.overloaded("the model lost this request or is starting: try again", retry_after_s=2)
        if isinstance(event, BaseException):
            logger.error("backend %s failed on %s", self._backend, self._request_id, exc_info=event)
            raise errors.server_error()
        return event

    async def _read_events(self, events: AsyncGenerator[BackendEvent, None]) -> None:
        async with contextlib.aclosing(events):
            try:
                async for event in events:
                    self._phases.take(event)
                    self._events.put_nowait(event)
                self._events.put_nowait(BackendUnavailable("the stream ended early"))
            except Exception as error:
                self._events.put_nowait(error)
            except asyncio.CancelledError:
                # Raised also by a call that the other side has cancelled: the exchange must not wait for ever.
                self._events.put_nowait(BackendUnavailable("the call was cancelled"))
                raise
