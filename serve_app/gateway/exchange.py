"""One chat request from admission to release: the walk of design and the owner of every way it can end.

    admit ──▶ generate ──▶ first event ──▶ deltas ──▶ finished ──▶ settle ──▶ last chunk
      │           │                          │                       │
      │           └ rejected: all undone     └ client gone, replica dead: settled in the background
      └ refused, or a retry that is answered with a stored reply: all undone

Whatever happens, the exchange ends in exactly one of three ways: `complete` (settled before the client sees usage),
`_abandon` (settled in the background), or `_void` (a refusal or a stored reply, which consume nothing).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from types import TracebackType

from serve_app.api import ApiError, ChatRequest, errors
from serve_app.backend.messages import BackendEvent, Ended, Rejected, Rejection, Said
from serve_app.engine.request import Delta, Finished, FinishReason, Started
from serve_app.gateway.catalogue import Catalogue, system_fingerprint
from serve_app.gateway.coalesce import Unavailable
from serve_app.gateway.generation import Generation, call_for
from serve_app.gateway.identity import Caller
from serve_app.gateway.outbox import Outbox
from serve_app.gateway.ports import BackendPort, LimiterClient, Metrics
from serve_app.gateway.refusals import as_api_error, rejection_error
from serve_app.gateway.retries import Retry
from serve_app.gateway.tasks import detached
from serve_app.ledger.errors import SpoolFull
from serve_app.ledger.messages import Outcome, Settled, Settlement, StoredReply
from serve_app.limits.messages import Adjust, Admit, Grant, Refusal, Release
from serve_app.settings import GatewaySettings

logger = logging.getLogger("ray.serve")


@dataclass(slots=True)
class Services:
    """What every exchange of one gateway shares."""

    settings: GatewaySettings
    catalogue: Catalogue
    leases: LimiterClient
    outbox: Outbox
    backends: BackendPort
    metrics: Metrics
    orphan_delay_s: float = 2.0  # a replica settles a cut stream after so long, unless this gateway has
    clock: Callable[[], float] = time.monotonic  # tells how long a request has taken, in seconds


class Exchange:
    """One request. Use as an async context manager: leaving it early settles and releases what is open.

    With a `retry`, `open` may find that the request has been answered before: then `replayed` is the stored reply,
    and there is nothing to wait for.
    """

    def __init__(
        self, services: Services, chat: ChatRequest, request_id: str, caller: Caller, retry: Retry | None = None
    ) -> None:
        self._services = services
        self._chat = chat
        self._caller = caller
        self._retry = retry
        self._identifier = services.catalogue[chat.model]
        self.request_id = request_id
        self.backend = services.catalogue.choose(chat.model)
        self.fingerprint = system_fingerprint(self.backend)  # more exactly, as soon as a replica has started
        self.grant: Grant | None = None
        self.replayed: bytes | None = None
        self.started_at = time.time()
        self.admitted_s = 0.0
        price = self._identifier.price.price()
        self._admit = Admit(
            request_id=request_id,
            holder=services.leases.holder,
            key_digest=caller.digest,
            model=chat.model,
            prompt_tokens=min(chat.estimated_prompt_tokens, self._identifier.context_length),
            max_tokens=chat.n * (chat.max_tokens or self._identifier.max_output),
            prompt_price=max(price.input, price.cached_input),  # what is cached shows only when it runs
            output_price=price.output,
            backend=self.backend,
            idempotency_key=None if retry is None else retry.idempotency_key,
            look_up=False,
        )
        self._generation: Generation | None = None
        self._first_token_by = 0.0  # of the monotonic clock
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
            self._void(taken=self._generation is not None)
        else:
            gone = kind is not None and issubclass(kind, asyncio.CancelledError | ClientGone)
            self._abandon(Outcome.CANCELLED if gone else Outcome.FAILED)

    async def open(self) -> None:
        """Admits the request and starts it; returns when a replica has taken it or `replayed` is there.

        Raises ApiError.
        """
        if self._services.outbox.is_full:
            self._ended = True
            raise errors.overloaded("usage can't be recorded right now: try again later", retry_after_s=30)
        started = time.monotonic()
        answer = await self._answer(self._caller.admit(self._admit))
        self.admitted_s = time.monotonic() - started
        if isinstance(answer, Refusal):
            self._ended = True
            if self._retry is not None and answer.status in (402, 409):
                self.replayed = await self._answered_before(self._retry)
            if self.replayed is None:
                raise as_api_error(answer)
            return
        self._granted(answer)
        if self._retry is not None and await self._is_answered(self._retry, answer):
            return
        self._first_token_by = time.monotonic() + self._services.settings.queue_timeout_s
        first = await self._start(answer)
        if isinstance(first, Rejected) and first.reason is Rejection.CREDIT:
            assert self._generation is not None
            await self._generation.stop()
            self._generation = None
            adjusted = await self._answer(self._services.leases.ask(Adjust(self.request_id, first.prompt_tokens)))
            if isinstance(adjusted, Refusal):
                self._void()
                raise as_api_error(adjusted)
            self._granted(adjusted)
            first = await self._start(adjusted)
        if isinstance(first, Rejected):
            self._void()
            raise rejection_error(first)
        if isinstance(first, Finished) and first.reason is FinishReason.DEADLINE:
            self._void()
            raise _waited_too_long()
        if isinstance(first, Started):
            self.fingerprint = system_fingerprint(self.backend, first.fingerprint)

    @staticmethod
    async def _answer(asked: Awaitable[Grant | Refusal]) -> Grant | Refusal:
        try:
            return await asked
        except Unavailable:
            raise errors.overloaded("the service is restarting a part of itself: try again", retry_after_s=2) from None

    def _granted(self, grant: Grant) -> None:
        self.grant = grant
        self._services.leases.opened(self._admit, grant)
        if grant.max_tokens < self._chat.n and not grant.tentative:
            self._void()
            message = (
                f"the balance pays for less than one token for each of {self._chat.n} choices: add funds or lower n"
            )
            raise errors.insufficient_balance(message)

    async def _is_answered(self, retry: Retry, grant: Grant) -> bool:
        """Whether the request had finished before this one was let in, which then is undone."""
        try:
            self.replayed = await retry.find(self._services.outbox, grant.account_id)
        except ApiError:
            self._void()
            raise
        except Unavailable:
            # It may have been answered and billed: running it again without knowing would break the promise.
            self._void()
            raise errors.overloaded(
                "whether this idempotency-key was answered before can't be told right now: try again", retry_after_s=2
            ) from None
        if self.replayed is not None:
            self._void()
        return self.replayed is not None

    async def _answered_before(self, retry: Retry) -> bytes | None:
        """The stored reply of a request that was not let in.

        It may have spent the balance itself, or be open only because its gateway died before it could release it.
        """
        try:
            identity = await self._caller.identify()
            return await retry.find(self._services.outbox, identity.account_id)
        except Unavailable:
            return None

    async def _start(self, grant: Grant) -> BackendEvent:
        """Sends the call and waits for the replica's first event, which tells whether the request can run."""
        left_s = max(0.0, self._first_token_by - time.monotonic())
        call = call_for(
            self._chat,
            grant,
            self.backend,
            self._identifier.price.price(),
            settle_after_s=self._services.orphan_delay_s,
            first_token_within_s=left_s,
        )
        self._generation = Generation(self._services.backends, self.backend, call)
        try:
            async with asyncio.timeout(left_s):
                return await self._generation.first()
        except TimeoutError:
            raise _waited_too_long() from None

    async def next(self, timeout_s: float | None = None) -> Delta | Said | Ended | Finished | None:
        """What the backend says next, Finished at the end; None when nothing came within `timeout_s` seconds.

        Raises ApiError when the backend fails.
        """
        assert self._generation is not None
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            event = self._generation.ready()  # most often: a timeout costs more than what it would wait for
            if event is None:
                try:
                    async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                        event = await self._generation.next()
                except TimeoutError:
                    return None
            if isinstance(event, Delta | Said) and self._progress.completion_tokens == 0:
                self._services.metrics.first_token(self._chat.model, time.time() - self.started_at)
            self._count(event)
            if isinstance(event, Started):
                continue
            if isinstance(event, Delta | Said | Ended):
                return event
            if isinstance(event, Finished):
                if event.reason is FinishReason.DEADLINE:
                    raise _waited_too_long()
                if event.reason not in (FinishReason.STOP, FinishReason.LENGTH):
                    logger.error("backend %s ended %s with %s", self.backend, self.request_id, event.reason)
                    raise errors.server_error()
                return event
            raise errors.server_error()

    async def complete(self, body: bytes | None = None) -> None:
        """Settles a finished request: when it returns, the usage is durable and may be shown. Raises ApiError.

        `body` is the reply as a whole, which is kept with the usage for a retry.
        """
        self._ended = True
        reply = None if self._retry is None or body is None else self._retry.stored(body)
        # Shielded: a client that hangs up now must not leave the hold behind.
        await asyncio.shield(detached(self._settle_and_release(Outcome.COMPLETED, reply=reply)))

    def _abandon(self, outcome: Outcome) -> None:
        """Stops the model and settles in the background. Callable while the request is being cancelled."""
        self._ended = True
        if self._generation is not None:
            self._generation.cancel()
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
        if self._generation is not None:
            self._generation.cancel()
        if taken and self.grant is not None:
            detached(self._settle_and_release(Outcome.FAILED, refused=True))
        else:
            self._release(Finished(FinishReason.ABORT, 0, 0, 0), None, refused=True)

    async def _settle_and_release(
        self, outcome: Outcome, *, refused: bool = False, reply: StoredReply | None = None
    ) -> None:
        assert self.grant is not None
        if outcome is not Outcome.COMPLETED and self._generation is not None:
            # What had arrived when the client went away was produced, so it is billed.
            for event in self._generation.arrived():
                self._count(event)
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
            reply=reply,
        )
        try:
            settled = await self._services.outbox.settle(settlement)
        except SpoolFull:
            if outcome is Outcome.COMPLETED:
                # The client gets an error in place of the usage, so it does not pay.
                settlement = replace(settlement, outcome=Outcome.FAILED, reply=None)
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
                key_id=self.grant.key_id if self.grant else None,
                key_spent=settled.key_spent if settled else None,
                key_period=settled.key_period if settled else None,
            )
        )

    def _count(self, event: BackendEvent | BaseException) -> None:
        """What has been produced so far is what a request is billed for that ends here."""
        before = self._progress
        if isinstance(event, Started):
            self._progress = replace(before, prompt_tokens=event.prompt_tokens, cached_tokens=event.cached_tokens)
        elif isinstance(event, Delta | Said):
            self._progress = replace(before, completion_tokens=event.completion_tokens)
        elif isinstance(event, Finished):
            self._progress = event


def _waited_too_long() -> ApiError:
    return errors.overloaded("no capacity became free in time: try again later", retry_after_s=10)


class ClientGone(Exception):
    """The client has closed the connection."""
