"""Chooses the backend of a request, builds the call to it, and reads its events."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from serve_app.api import errors
from serve_app.api.chat_request import ChatRequest
from serve_app.api.served_names import ServedNames
from serve_app.contracts.calls import application_of, detached
from serve_app.contracts.generation import BackendEvent, Bill, GenerateCall, Grammar, GrammarKind, SamplingParams
from serve_app.contracts.inbox import Inbox
from serve_app.contracts.limiting import Admit, Grant
from serve_app.contracts.money import Price, price_at
from serve_app.contracts.phases import Phases
from serve_app.contracts.ports import BackendPort, BackendUnavailable
from serve_app.contracts.served import SamplingDefaults, Served
from serve_app.contracts.trace_context import TraceCall
from serve_app.gateway.conversations import conversation_key
from serve_app.gateway.served_models import models_of
from serve_app.settings import GatewaySettings, IdentifierSettings

logger = logging.getLogger("ray.serve")

USUAL_WEIGHT = 100  # account weight that counts as 1 in the engine's queue
NOTHING: Final = Served(0)  # the ledger has changed nothing
PLAIN: Final = SamplingDefaults()  # no defaults
_UNCHANGED: Final = {one.name for one in fields(SamplingParams)} & ChatRequest.model_fields.keys() - {"logprobs"}
"""Fields of a chat request that the engine reads under the same name and in the same form."""


class NotRunning(BackendUnavailable):
    """No replica has started the call: its backend does not run, but another backend of the identifier does."""


@dataclass(slots=True)
class Availability:
    """Shows which backends may get requests now. The gateway's `Lifecycle` writes it, and each request reads it."""

    #: By identifier: backends that get no requests, because they are not ready or were ejected. Never all of them.
    out: Mapping[str, frozenset[str]] = field(default_factory=dict)
    ejected: frozenset[tuple[str, str]] = frozenset()  # (identifier, backend)
    #: Ejected backends that may get one request now. The values are the accounts that must not send it.
    probes: dict[tuple[str, str], frozenset[str]] = field(default_factory=dict)


class Catalogue:
    """The identifiers that clients name, and the backends behind each.

    A backend is chosen by weight, so a new one can take over behind a fixed identifier step by step. While weights and
    availability stay the same, a conversation keeps its backend, which has the prompt in its cache.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        served: Served = NOTHING,
        availability: Availability | None = None,
        *,
        is_known: bool = True,
    ) -> None:
        self.is_known = is_known  # False: the ledger was not read yet and may have other identifiers and prices
        self.configured = settings.models  # identifiers of the configuration, with its weights
        self.of_ledger = served
        self.availability = Availability() if availability is None else availability
        self._models = models_of(settings, served)
        configured = {name: model.price.per_token() for name, model in settings.models.items()}
        self._configured_prices = configured
        #: By identifier: sampling defaults for parameters that a request omits.
        self.defaults = {name: model.spec.sampling for name, model in served.models.items() if name not in configured}
        self._weights = {
            name: {backend: weight for backend, weight in model.backends.items() if weight}
            for name, model in self._models.items()
        }
        #: Context and output limits by identifier, in tokens, and the aliases.
        self.served = ServedNames(
            {name: (model.context_length, model.max_output) for name, model in self._models.items()},
            ((alias, name) for name, model in self._models.items() for alias in model.aliases),
        )

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._models

    def __getitem__(self, identifier: str) -> IdentifierSettings:
        return self._models[identifier]

    @property
    def identifiers(self) -> tuple[str, ...]:
        """Identifiers in the order of the configuration, then those created by command."""
        return tuple(self._models)

    def price(self, identifier: str, now: float) -> Price:
        """Returns the price at `now`, in Unix seconds."""
        return price_at(self.of_ledger.prices.get(identifier, ()), now, self._configured_prices.get(identifier))

    def choose_backend(
        self, identifier: str, account_id: str, messages: Sequence[Mapping[str, Any]], *, may_probe: bool = True
    ) -> str:
        """Chooses one of the available backends by weight, for one request of a conversation.

        Without `may_probe`, the request does not try an ejected backend.

        This is weighted rendezvous hashing: each backend has a score for the conversation, and the highest wins. When a
        weight changes or a backend is out, no more conversations move than necessary.
        """
        weights, now = self._weights[identifier], self.availability
        out = now.out.get(identifier, frozenset())
        usable = [name for name in weights if name not in out]
        if not usable:
            fallback = self._models[identifier].fallback
            if fallback is not None and fallback not in out:
                return fallback
            usable = list(weights)
        barred = {name: now.probes.get((identifier, name)) for name in weights} if now.probes and may_probe else {}
        probes = [name for name, accounts in barred.items() if accounts is not None and account_id not in accounts]
        if len(usable) == 1 and not probes:
            return usable[0]
        beginning = conversation_key(account_id, messages)
        scores = {name: _score(beginning, name, weights[name]) for name in {*usable, *probes}}
        chosen = max(scores, key=scores.__getitem__)
        now.probes.pop((identifier, chosen), None)
        return chosen

    def fallback(self, identifier: str, backend: str) -> str | None:
        """Returns the backend that takes a request when `backend` has no capacity; None if there is none."""
        fallback = self._models[identifier].fallback if identifier in self._models else None
        is_out = fallback in self.availability.out.get(identifier, frozenset())
        return None if fallback == backend or is_out else fallback

    def backends(self) -> tuple[str, ...]:
        """Returns all backends that can be chosen, each once."""
        return tuple(dict.fromkeys(name for identifier in self._models for name in self.behind(identifier)))

    def behind(self, identifier: str) -> tuple[str, ...]:
        """Returns the backends that can be chosen for one identifier, its fallback last."""
        fallback = self._models[identifier].fallback
        return tuple(dict.fromkeys([*self._weights[identifier], *([fallback] if fallback else [])]))


def _score(conversation: bytes, backend: str, weight: int) -> float:
    """Returns the score. A backend's chance of the highest score is proportional to its weight.

    See Thaler and Ravishankar, 1998.
    """
    drawn = int.from_bytes(hashlib.blake2b(conversation + backend.encode(), digest_size=8).digest())
    return -weight / math.log(((drawn >> 12) + 0.5) / 2**52)  # log of a float strictly between 0 and 1


def system_fingerprint(backend: str, fingerprint: str = "") -> str:
    """Returns `system_fingerprint` of a reply, which changes with the backend and with the backend's weights.

    `fingerprint`, which a replica sends, identifies the weights. It is empty while it is unknown.
    """
    return f"fp_{backend}_{fingerprint}" if fingerprint else f"fp_{backend}"


def admit_for(
    chat: ChatRequest,
    request_id: str,
    backend: str,
    price: Price,
    identifier: IdentifierSettings,
    *,
    holder: str,
    key_digest: str,
    address: str,
    idempotency_key: str | None,
) -> Admit:
    """Builds the message that asks the limiter to admit a request. The prompt's tokens are estimated."""
    return Admit(
        request_id=request_id,
        holder=holder,
        key_digest=key_digest,
        model=chat.model,
        prompt_tokens=min(chat.estimated_prompt_tokens, max_prompt_tokens(chat, identifier)),
        max_tokens=chat.choices * max(1, _output_limit(chat, identifier)),
        prompt_price=max(price.input, price.cached_input),  # the cached part is known only when the request runs
        output_price=price.output,
        backend=application_of(backend),  # adapters of one model share its replicas' load
        idempotency_key=idempotency_key,
        look_up=False,
        address=address,
    )


def call_for(
    chat: ChatRequest,
    grant: Grant,
    backend: str,
    price: Price,
    *,
    settle_after_s: float,
    first_token_within_s: float,
    trace: TraceCall | None = None,
    defaults: SamplingDefaults = PLAIN,
    said: tuple[int, ...] = (),
    reply_id: str = "",
) -> GenerateCall:
    """Builds the replica's call for an admitted request.

    `defaults` are the sampling defaults of the identifier. `said` has the tokens of a reply that the replica continues.
    """

    def chosen(name: str) -> Any:
        default = None if name in chat.model_fields_set else getattr(defaults, name, None)
        return getattr(chat, name) if default is None else default

    raw = chat.raw
    sampling = SamplingParams(
        max_tokens=0 if chat.max_tokens == 0 else max(1, grant.max_tokens // chat.choices),  # per choice
        **{name: chosen(name) for name in _UNCHANGED},
        logit_bias=tuple(chat.logit_bias.items()),
        logprobs=chat.top_logprobs if chat.logprobs else None,
        grammar=grammar_for(chat.response_format),
        token_ids=chat.resume or chat.sends_token_ids,
        prompt_logprobs=chat.top_logprobs if raw is not None and raw.scored else None,
        end_logprob=raw is not None and chat.logprobs,
    )
    return GenerateCall(
        request_id=grant.request_id,
        messages=chat.messages,
        sampling=sampling,
        # With credit 0, the replica rejects the call and reports its exact count of the prompt. The hold of a tentative
        # grant is then adjusted to that count.
        credit=0 if grant.tentative else grant.hold,
        bill=Bill(grant.account_id, grant.key_id, chat.model, backend, price, grant.epoch),
        continue_final=chat.continue_final,
        settle_after_s=settle_after_s,
        weight=grant.weight / USUAL_WEIGHT,
        first_token_within_s=first_token_within_s,
        n=chat.choices,
        tools=chat.tools,
        tool_choice=chat.tool_choice,
        function=chat.forced_function,
        functions=chat.allowed_functions,
        parallel_calls=chat.parallel_tool_calls,
        trace=trace,
        said=said,
        reply_id=reply_id,
        template_variables=chat.chat_template_kwargs,
        reasoning_effort=chat.reasoning_effort,
        raw=raw,
    )


def _output_limit(chat: ChatRequest, identifier: IdentifierSettings) -> int:
    return identifier.max_output if chat.max_tokens is None else min(chat.max_tokens, identifier.max_output)


def max_prompt_tokens(chat: ChatRequest, identifier: IdentifierSettings) -> int:
    """Returns the maximum number of tokens that all prompts of a request can have together."""
    return identifier.context_length * (1 if chat.raw is None else len(chat.raw.prompts))


def grammar_for(response_format: Mapping[str, Any] | None) -> Grammar | None:
    """Returns the grammar that constrains a reply to this format; None for text.

    For a schema that is not strict, keywords that cannot be enforced are ignored. The replica rejects a strict schema
    that has such keywords.
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
    """The events of one call, as they arrive. A caller can stop waiting for an event without cancelling the call."""

    def __init__(self, backends: BackendPort, backend: str, call: GenerateCall, phases: Phases) -> None:
        self._backend = backend
        self._phases = phases
        phases.called()
        self._request_id = call.request_id
        self._inbox: Inbox[BackendEvent | BaseException] = Inbox(asyncio.get_running_loop())
        self._reading = detached(self._read_events(backends, call))

    @property
    def has_event(self) -> bool:
        """Whether an event of the reply has arrived and was not read."""
        waiting = self._inbox.items
        return bool(waiting) and not isinstance(waiting[0], BaseException)

    async def next_event(self, timeout_s: float | None = None) -> BackendEvent | None:
        """Returns the next event, or None after `timeout_s` seconds without one.

        Raises ApiError when the call failed, BackendUnavailable when its replica is lost.
        """
        waiting = self._inbox.items
        if not waiting:
            await self._inbox.wait(timeout_s)
        return self._raise_failure(waiting.popleft()) if waiting else None

    def unread(self) -> Iterator[BackendEvent | BaseException]:
        """Yields the events that have arrived and were not read."""
        while self._inbox.items:
            yield self._inbox.items.popleft()

    def leave(self) -> None:
        """Ends a call that no replica has started: `next_event` raises NotRunning."""
        self._inbox.put(NotRunning("the backend is not running, and another backend is"))

    def cancel(self) -> None:
        """Stops the generation. Never waits."""
        self._phases.end()
        self._reading.cancel()

    async def stop(self) -> None:
        """Stops the generation and waits until the call has ended."""
        self._reading.cancel()
        await asyncio.wait([self._reading])

    def _raise_failure(self, event: BackendEvent | BaseException) -> BackendEvent:
        if isinstance(event, BaseException) and not isinstance(event, NotRunning):
            self._phases.failed = True
        if isinstance(event, BackendUnavailable):
            raise event
        if isinstance(event, BaseException):
            logger.error("backend %s failed on %s", self._backend, self._request_id, exc_info=event)
            raise errors.server_error()
        return event

    async def _read_events(self, backends: BackendPort, call: GenerateCall) -> None:
        try:
            await backends.generate(self._backend, call, self._take)
            self._inbox.put(BackendUnavailable("the stream ended early"))
        except Exception as error:
            self._inbox.put(error)
        except asyncio.CancelledError:
            # The other side can also cancel the call. Without this event, the exchange would wait forever.
            self._inbox.put(BackendUnavailable("the call was cancelled"))
            # Not raised again: the task would keep the error and, through its traceback, itself and all objects of the
            # call. Only the garbage collector would free them.

    def _take(self, event: BackendEvent) -> None:
        self._phases.take(event)
        self._inbox.put(event)
