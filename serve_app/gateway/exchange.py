"""One chat request from admission to release: the walk of design and the owner of every way it can end.

    admit ──▶ generate ──▶ first event ──▶ deltas ──▶ finished ──▶ settle ──▶ last chunk
      │           │                          │                       │
      └ refused   └ rejected: all undone     └ client gone, replica dead: settled in the background

Whatever happens, the exchange ends in exactly one of three ways: `complete` (settled before the client sees usage),
`_abandon` (settled in the background), or `_void` (a refusal, which consumes nothing).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from types import TracebackType

from serve_app.api import ApiError, ChatRequest, errors
from serve_app.backend.messages import BackendEvent, Bill, GenerateCall, Rejected, Rejection
from serve_app.engine.request import Delta, Finished, FinishReason, SamplingParams, Started
from serve_app.gateway.catalogue import Catalogue
from serve_app.gateway.coalesce import Unavailable
from serve_app.gateway.leases import Leases
from serve_app.gateway.outbox import Outbox
from serve_app.gateway.ports import BackendPort, BackendUnavailable, Metrics
from serve_app.gateway.refusals import as_api_error
from serve_app.gateway.tasks import detached
from serve_app.ledger.errors import SpoolFull
from serve_app.ledger.messages import Outcome, Settled, Settlement
from serve_app.limits.messages import Adjust, Admit, Grant, Refusal, Release
from serve_app.settings import GatewaySettings

logger = logging.getLogger("ray.serve")


@dataclass(slots=True)
class Services:
    """What every exchange of one gateway shares."""

    settings: GatewaySettings
    catalogue: Catalogue
    leases: Leases
    outbox: Outbox
    backends: BackendPort
    metrics: Metrics
    orphan_delay_s: float = 2.0  # a replica settles a cut stream after so long, unless this gateway has
    clock: Callable[[], float] = time.monotonic  # tells how long a request has taken, in seconds


class Exchange:
    """One request. Use as an async context manager: leaving it early settles and releases what is open."""

    def __init__(self, services: Services, chat: ChatRequest, request_id: str, key_digest: str) -> None:
        self._services = services
        self._chat = chat
        self._identifier = services.catalogue[chat.model]
        self.request_id = request_id
        self.backend = services.catalogue.choose(chat.model)
        self.grant: Grant | None = None
        self.started_at = time.time()
        self.admitted_s = 0.0
        price = self._identifier.price.price()
        self._admit = Admit(
            request_id=request_id,
            holder=services.leases.holder,
            key_digest=key_digest,
            model=chat.model,
            prompt_tokens=min(chat.estimated_prompt_tokens, self._identifier.context_length),
            max_tokens=chat.max_tokens or self._identifier.max_output,
            prompt_price=max(price.input, price.cached_input),  # what is cached shows only when it runs
            output_price=price.output,
        )
        self._events: asyncio.Queue[BackendEvent | BaseException] = asyncio.Queue()
        self._first: BackendEvent | None = None  # taken out of the queue to see whether the request can run
        self._pump: asyncio.Task[None] | None = None
        self._progress = Finished(FinishReason.ABORT, 0, 0, 0)
        self._ended = False

    async def __aenter__(self) -> Exchange:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ended:
            return
        if isinstance(error, ApiError) and error.status == 503 and not self._progress.completion_tokens:
            self._void(taken=self._pump is not None)
        else:
            gone = kind is not None and issubclass(kind, asyncio.CancelledError | ClientGone)
            self._abandon(Outcome.CANCELLED if gone else Outcome.FAILED)

    async def open(self) -> None:
        """Admits the request and starts it; returns when a replica has taken it. Raises ApiError."""
        if self._services.outbox.is_full:
            self._ended = True
            raise errors.overloaded("usage can't be recorded right now: try again later", retry_after_s=30)
        started = time.monotonic()
        answer = await self._ask(self._admit)
        self.admitted_s = time.monotonic() - started
        if isinstance(answer, Refusal):
            self._ended = True
            raise as_api_error(answer)
        self._granted(answer)
        first = await self._start()
        if isinstance(first, Rejected) and first.reason is Rejection.CREDIT:
            await self._stop()
            adjusted = await self._ask(Adjust(self.request_id, first.prompt_tokens))
            if isinstance(adjusted, Refusal):
                self._void()
                raise as_api_error(adjusted)
            self._granted(adjusted)
            first = await self._start()
        if isinstance(first, Rejected):
            self._void()
            raise self._rejection(first)
        self._first = first

    async def _ask(self, ask: Admit | Adjust) -> Grant | Refusal:
        try:
            answer: Grant | Refusal = await self._services.leases.ask(ask)
        except Unavailable:
            raise errors.overloaded("the service is restarting a part of itself: try again", retry_after_s=2) from None
        return answer

    def _granted(self, grant: Grant) -> None:
        self.grant = grant
        self._services.leases.opened(self._admit, grant)

    async def _start(self) -> BackendEvent:
        """Sends the call and waits for the replica's first event, which tells whether the request can run."""
        assert self.grant is not None
        chat, identifier = self._chat, self._identifier
        call = GenerateCall(
            request_id=self.request_id,
            messages=chat.messages,
            sampling=SamplingParams(
                max_tokens=self.grant.max_tokens,
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
            ),
            # A tentative grant holds all there is: the replica's count decides what that pays for.
            credit=0 if self.grant.tentative else self.grant.hold,
            bill=Bill(self.grant.account_id, self.grant.key_id, chat.model, self.backend, identifier.price.price()),
            continue_final=chat.continue_final,
            settle_after_s=self._services.orphan_delay_s,
        )
        self._events = asyncio.Queue()
        self._pump = detached(self._relay(self._services.backends.generate(self.backend, call), self._events))
        try:
            async with asyncio.timeout(self._services.settings.queue_timeout_s):
                return await self._next()
        except TimeoutError:
            raise errors.overloaded("no capacity became free in time: try again later", retry_after_s=10) from None

    @staticmethod
    async def _relay(
        events: AsyncGenerator[BackendEvent, None], queue: asyncio.Queue[BackendEvent | BaseException]
    ) -> None:
        """Moves events into the queue, so that waiting for one can be given up without cancelling the call."""
        async with contextlib.aclosing(events):
            try:
                async for event in events:
                    queue.put_nowait(event)
                queue.put_nowait(BackendUnavailable("the stream ended early"))
            except Exception as error:
                queue.put_nowait(error)
            except asyncio.CancelledError:
                # Also what a call raises that the other side has cancelled: whoever waits must hear of it.
                queue.put_nowait(BackendUnavailable("the call was cancelled"))
                raise

    async def _next(self) -> BackendEvent:
        if (first := self._first) is not None:
            self._first = None
            return first
        event = await self._events.get()
        if isinstance(event, BackendUnavailable):
            logger.warning("backend %s: %s", self.backend, event)
            raise errors.overloaded("the model lost this request or is starting: try again", retry_after_s=2)
        if isinstance(event, BaseException):
            logger.error("backend %s failed on %s", self.backend, self.request_id, exc_info=event)
            raise errors.server_error()
        return event

    async def next(self, timeout_s: float | None = None) -> Delta | Finished | None:
        """The next delta, or Finished at the end; None when nothing came within `timeout_s` seconds.

        Raises ApiError when the backend fails.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                    event = await self._next()
            except TimeoutError:
                return None
            if isinstance(event, Delta) and self._progress.completion_tokens == 0:
                self._services.metrics.first_token(self._chat.model, time.time() - self.started_at)
            self._count(event)
            if isinstance(event, Started):
                continue
            if isinstance(event, Delta):
                return event
            if isinstance(event, Finished):
                if event.reason not in (FinishReason.STOP, FinishReason.LENGTH):
                    logger.error("backend %s ended %s with %s", self.backend, self.request_id, event.reason)
                    raise errors.server_error()
                return event
            raise errors.server_error()

    async def complete(self) -> Finished:
        """Settles a finished request: when it returns, the usage is durable and may be shown. Raises ApiError."""
        self._ended = True
        # Shielded: a client that hangs up now must not leave the hold behind.
        await asyncio.shield(detached(self._settle_and_release(Outcome.COMPLETED)))
        return self._progress

    def _abandon(self, outcome: Outcome) -> None:
        """Stops the model and settles in the background. Callable while the request is being cancelled."""
        self._ended = True
        if self._pump is not None:
            self._pump.cancel()
        if self.grant is None:
            # Cancelled while the limiter was asked: whether it granted is unknown, and releasing is harmless.
            self._services.leases.release(Release(self.request_id, 0, 0, refused=True))
        else:
            detached(self._settle_and_release(outcome))

    def _void(self, *, taken: bool = False) -> None:
        """Undoes the admission of a request that did not start.

        With `taken` a replica may have begun all the same, and would bill what it made by the time it hears of the
        end. A settlement of ours, which costs nothing, then comes first.
        """
        self._ended = True
        if self._pump is not None:
            self._pump.cancel()
        if taken and self.grant is not None:
            detached(self._settle_and_release(Outcome.FAILED, refused=True))
        else:
            self._services.leases.release(Release(self.request_id, 0, 0, refused=True))

    async def _stop(self) -> None:
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.wait([self._pump])
            self._pump = None

    async def _settle_and_release(self, outcome: Outcome, *, refused: bool = False) -> None:
        assert self.grant is not None
        if outcome is not Outcome.COMPLETED:
            self._drain_events()
        usage = self._progress
        if usage.reason is FinishReason.ERROR:
            outcome = Outcome.FAILED  # the client was gone before it could be told
        settlement = Settlement(
            request_id=self.request_id,
            account_id=self.grant.account_id,
            key_id=self.grant.key_id,
            model=self._chat.model,
            backend=self.backend,
            price=self._identifier.price.price(),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            outcome=outcome,
            started_at=self.started_at,
            finished_at=time.time(),
        )
        try:
            settled = await self._services.outbox.settle(settlement)
        except SpoolFull:
            if outcome is Outcome.COMPLETED:
                # The client gets an error in place of the usage, so it does not pay.
                settlement = replace(settlement, outcome=Outcome.FAILED)
            detached(self._release_when_settled(settlement, usage, refused))
            raise errors.overloaded("usage can't be recorded right now: try again later", retry_after_s=30) from None
        except BaseException:
            self._release(usage, None, refused)
            raise
        if settled is None:
            # The usage is safe in the spool, but the balance does not show it yet: the hold stays until it does.
            detached(self._release_when_settled(settlement, usage, refused))
        else:
            self._release(usage, settled, refused)
        if outcome is not Outcome.FAILED:
            self._services.metrics.tokens(
                self._chat.model, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
            )

    async def _release_when_settled(self, settlement: Settlement, usage: Finished, refused: bool) -> None:
        settled = None
        try:
            settled = await self._services.outbox.settle_for_certain(settlement)
        finally:
            self._release(usage, settled, refused)

    def _release(self, usage: Finished, settled: Settled | None, refused: bool) -> None:
        self._services.leases.release(
            Release(
                request_id=self.request_id,
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                account_id=self.grant.account_id if self.grant else None,
                balance=settled.balance if settled else None,
                version=settled.version if settled else None,
                refused=refused,
            )
        )

    def _drain_events(self) -> None:
        """Counts what had arrived when the client went away: it was produced, so it is billed."""
        if self._first is not None:
            self._count(self._first)
        while not self._events.empty():
            self._count(self._events.get_nowait())

    def _count(self, event: BackendEvent | BaseException) -> None:
        """What has been produced so far is what a request is billed for that ends here."""
        before = self._progress
        if isinstance(event, Started):
            self._progress = replace(before, prompt_tokens=event.prompt_tokens, cached_tokens=event.cached_tokens)
        elif isinstance(event, Delta):
            self._progress = replace(before, completion_tokens=event.completion_tokens)
        elif isinstance(event, Finished):
            self._progress = event

    def _rejection(self, rejected: Rejected) -> ApiError:
        if rejected.reason is Rejection.CONTEXT:
            return errors.context_length_exceeded(rejected.prompt_tokens, rejected.limit)
        if rejected.reason is Rejection.CLOSED:
            return errors.overloaded("the model is restarting: try again", retry_after_s=2)
        if rejected.reason is Rejection.QUEUE_FULL:
            return errors.overloaded("the model's queue is full: try again later", retry_after_s=5)
        if rejected.reason is Rejection.INVALID:
            return errors.invalid_parameters(rejected.message, param="messages")
        return errors.insufficient_balance("the prompt costs more than the balance: add funds or shorten it")


class ClientGone(Exception):
    """The client has closed the connection."""
