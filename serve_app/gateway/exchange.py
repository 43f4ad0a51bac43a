"""One chat request from admission to release, and the owner of every way it can end.

    ASKED ──▶ HELD ──▶ CALLED ──▶ PRODUCING ──▶ ENDED
    admit     hold     a replica  there is      settled, or
              open     may work   output        given back

What is billed follows from the state in which the request ends:

| state | the client hangs up | the service fails |
|---|---|---|
| ASKED | everything is given back | the same |
| HELD | settled as cancelled, free of charge | everything is given back |
| CALLED | settled as cancelled, free of charge; the rates stay charged | settled as failed: nothing is billed |
| PRODUCING | settled as cancelled: what arrived is billed | settled as failed: nothing is billed |

PRODUCING begins with the first token, also while its text is held back. Until then the engine keeps nothing of the
prompt that another request could find at the cached price, so a prompt that is cancelled in CALLED gives nothing away.

A rejection by the replica, or a stored reply for a retry, gives everything back in any state; but one for the request's
own fault (422) keeps its request and its prompt on the rate limits, and gives back the money. A 503 before the first
token gives the rate limits back too. A failure after work does not, or its cause could be repeated without limit.
`complete` settles a finished request before the client sees its usage.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from enum import Enum, auto
from types import TracebackType

from serve_app.api import errors
from serve_app.api.chat_request import ChatRequest
from serve_app.api.errors import ApiError
from serve_app.contracts.books import Outcome, Settlement, StoredReply
from serve_app.contracts.calls import Unavailable, application_of, detached
from serve_app.contracts.errors import SpoolFull
from serve_app.contracts.generation import (
    BackendEvent,
    ChoiceEnded,
    Delta,
    Finished,
    FinishReason,
    Rejected,
    Rejection,
    ReplyParts,
    Started,
)
from serve_app.contracts.limiting import Adjust, Admit, Grant, Refusal, Release
from serve_app.contracts.ports import BackendPort
from serve_app.gateway.authentication import Caller
from serve_app.gateway.backends import Catalogue, Generation, call_for, system_fingerprint
from serve_app.gateway.limiter_client import LimiterClient
from serve_app.gateway.observer import Observer
from serve_app.gateway.record import RequestRecord
from serve_app.gateway.refusal_errors import not_recordable, refusal_error, rejection_error, restarting, waited_too_long
from serve_app.gateway.retries import Retry
from serve_app.gateway.settlements import Settlements, release_of
from serve_app.gateway.tracing import Tracing
from serve_app.gateway.web import ClientGone
from serve_app.settings import GatewaySettings

logger = logging.getLogger("ray.serve")


@dataclass(slots=True)
class Services:
    """What all exchanges of one gateway share."""

    settings: GatewaySettings
    catalogue: Catalogue
    limiter: LimiterClient
    settlements: Settlements
    backends: BackendPort
    observer: Observer
    tracing: Tracing | None = None
    orphan_delay_s: float = 2.0  # a replica settles a cut stream after so long, unless this gateway has
    clock: Callable[[], float] = time.monotonic  # seconds, for how long a request takes


class State(Enum):
    """How far an exchange is. See the table above."""

    ASKED = auto()
    HELD = auto()
    CALLED = auto()
    PRODUCING = auto()
    ENDED = auto()


class Exchange:
    """One request, as an async context manager: leaving it early settles and releases what is open.

    With a `retry`, `begin` may find that the request has been answered before: then `replayed` is the stored reply.
    """

    def __init__(
        self, services: Services, chat: ChatRequest, record: RequestRecord, caller: Caller, retry: Retry | None = None
    ) -> None:
        self._services = services
        self._record = record
        self._chat = chat
        self._caller = caller
        self._retry = retry
        self._state = State.ASKED
        # Kept: an operator may remove the identifier while the request runs.
        identifier = self._identifier = services.catalogue[chat.model]
        self._price = services.catalogue.price(chat.model)
        self.request_id = record.request_id
        self.backend = record.backend = services.catalogue.choose_backend(chat.model)
        self.fingerprint = system_fingerprint(self.backend)  # with that of the weights as soon as a replica has started
        self.grant: Grant | None = None
        self.replayed: bytes | None = None
        self.started_at = time.time()
        self._admit = Admit(
            request_id=record.request_id,
            holder=services.limiter.holder,
            key_digest=caller.digest,
            model=chat.model,
            prompt_tokens=min(chat.estimated_prompt_tokens, identifier.context_length),
            max_tokens=chat.n * (chat.max_tokens or identifier.max_output),
            prompt_price=max(self._price.input, self._price.cached_input),  # what is cached shows only when it runs
            output_price=self._price.output,
            backend=application_of(self.backend),  # adapters of one model share its replicas' load
            idempotency_key=None if retry is None else retry.idempotency_key,
            look_up=False,
        )
        record.wanted_tokens = self._admit.prompt_tokens + self._admit.max_tokens
        self._generation: Generation | None = None
        self._first: BackendEvent | None = None  # read by `begin`, not yet returned by `next_event`
        self._first_token_by = 0.0  # of the monotonic clock
        self._usage = Finished(FinishReason.ABORT, 0, 0, 0)  # so far

    async def __aenter__(self) -> Exchange:
        self._record.open += 1
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._state is not State.ENDED:
                self._leave(error)
        finally:
            self._record.close()

    async def begin(self) -> None:
        """Returns when a replica has taken the request, or `replayed` is there. Raises ApiError."""
        if self._services.settlements.is_full:
            self._state = State.ENDED
            raise not_recordable()
        asked = time.monotonic()
        answer = await _from_limiter(self._caller.admit(self._admit))
        self._record.admit_s, self._record.admitted_at = time.monotonic() - asked, time.time()
        self._record.admitted(answer.account_id, answer.key_id)
        if answer.account_id in self._services.settings.logged_texts:
            self._record.messages, self._record.reply = self._chat.messages, []
        if isinstance(answer, Refusal):
            self._state = State.ENDED
            if self._retry is not None and answer.status in (402, 409):
                self.replayed = await self._answered_before(self._retry)
            if self.replayed is None:
                raise refusal_error(answer)
            return
        self._hold(answer)
        if self._retry is not None and await self._is_answered(self._retry, answer):
            return
        self._first_token_by = time.monotonic() + self._services.settings.queue_timeout_s
        first = await self._call_backend(answer)
        if isinstance(first, Rejected) and first.reason is Rejection.CREDIT:
            first = await self._call_again(first.prompt_tokens)
        if isinstance(first, Rejected):
            self._give_back(first)
            raise rejection_error(first)
        if isinstance(first, Finished) and first.reason is FinishReason.DEADLINE:
            self._give_back()
            raise waited_too_long()
        if isinstance(first, Started):
            self.fingerprint = system_fingerprint(self.backend, first.fingerprint)
        self._count_usage(first)
        self._first = first

    async def next_event(self, timeout_s: float | None = None) -> Delta | ReplyParts | ChoiceEnded | Finished | None:
        """The next event of the reply, Finished at the end; None when there was none within `timeout_s` seconds.

        Raises ApiError when the backend fails.
        """
        assert self._generation is not None
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            event, self._first = self._first, None
            if event is None:
                event = self._generation.ready_event()  # most often: a timeout costs more than the wait itself
            if event is None:
                try:
                    async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                        event = await self._generation.next_event()
                except TimeoutError:
                    return None
            self._count_usage(event)
            if isinstance(event, Delta | ReplyParts | ChoiceEnded):
                if not _is_empty(event):
                    return event
                continue
            if isinstance(event, Finished):
                if event.reason is FinishReason.DEADLINE:
                    raise waited_too_long()
                if event.reason not in (FinishReason.STOP, FinishReason.LENGTH):
                    logger.error("backend %s ended %s with %s", self.backend, self.request_id, event.reason)
                    raise errors.server_error()
                return event
            if not isinstance(event, Started):
                raise errors.server_error()

    async def complete(self, body: bytes | None = None) -> None:
        """Settles a finished request: when it returns, the usage is durable and may be shown. Raises ApiError.

        `body` is the whole reply, which is kept with the usage for a retry.
        """
        self._state = State.ENDED
        reply = None if self._retry is None or body is None else self._retry.stored(body)
        # Shielded: a client that hangs up now must not leave the hold behind.
        await asyncio.shield(self._settle_detached(Outcome.COMPLETED, reply=reply))

    def _hold(self, grant: Grant) -> None:
        self._state = State.HELD
        self.grant = grant
        self._services.limiter.opened(self._admit, grant)
        if grant.max_tokens < self._chat.n and not grant.tentative:
            self._give_back()
            message = (
                f"the balance pays for less than one token for each of {self._chat.n} choices: add funds or lower n"
            )
            raise errors.insufficient_balance(message)

    async def _is_answered(self, retry: Retry, grant: Grant) -> bool:
        """Whether the request had finished before this one was admitted, which is then undone."""
        try:
            self.replayed = await retry.find_stored(self._services.settlements, grant.account_id)
        except Unavailable:
            # It may have been answered and billed: running it again without knowing would break the promise.
            raise errors.overloaded(
                "whether this idempotency-key was answered before is unknown right now: try again", retry_after_s=2
            ) from None
        if self.replayed is not None:
            self._give_back()
        return self.replayed is not None

    async def _answered_before(self, retry: Retry) -> bytes | None:
        """The stored reply of a request that was not admitted.

        It may have spent the balance itself, or be open only because its gateway died before it could release it.
        """
        try:
            identity = await self._caller.identify()
            return await retry.find_stored(self._services.settlements, identity.account_id)
        except Unavailable:
            return None

    async def _call_backend(self, grant: Grant) -> BackendEvent:
        """Calls the replica and returns its first event, which shows whether the request can run."""
        services = self._services
        left_s = max(0.0, self._first_token_by - time.monotonic())
        call = call_for(
            self._chat,
            grant,
            self.backend,
            self._price,
            settle_after_s=services.orphan_delay_s,
            first_token_within_s=left_s,
            trace=None if services.tracing is None else services.tracing.begin_call(self._record),
        )
        self._generation = Generation(services.backends, self.backend, call, self._record.phases)
        self._state = State.CALLED
        try:
            async with asyncio.timeout(left_s):
                return await self._generation.next_event()
        except TimeoutError:
            raise waited_too_long() from None

    async def _call_again(self, prompt_tokens: int) -> BackendEvent:
        """Adjusts the hold to the counted prompt, for which the estimated one was too small, and calls again."""
        assert self._generation is not None
        await self._generation.stop()
        self._state = State.HELD  # the replica has rejected the call, so nothing runs
        adjusted = await _from_limiter(self._services.limiter.ask(Adjust(self.request_id, prompt_tokens)))
        if isinstance(adjusted, Refusal):
            self._give_back()
            raise refusal_error(adjusted)
        self._hold(adjusted)
        return await self._call_backend(adjusted)

    def _leave(self, error: BaseException | None) -> None:
        """Ends an exchange early, as the table above says. Callable while the request is being cancelled."""
        client_gone = isinstance(error, asyncio.CancelledError | ClientGone)
        if self._state is State.ASKED or (self._state is State.HELD and not client_gone):
            self._give_back()  # in ASKED whether the limiter has granted is unknown; releasing is harmless
            return
        unserved = self._state is State.CALLED and isinstance(error, ApiError) and error.status == 503
        self._state = State.ENDED
        if self._generation is not None:
            self._generation.cancel()
        # A settlement of ours comes before one of the replica, which would bill what it makes until it is cancelled.
        outcome = Outcome.CANCELLED if client_gone else Outcome.FAILED
        self._settle_detached(outcome, refused=unserved)

    def _give_back(self, rejected: Rejected | None = None) -> None:
        """Undoes the admission of a request that did not run. One that was at fault itself keeps its rate."""
        self._state = State.ENDED
        if self._generation is not None:
            self._generation.cancel()
        account_id, key_id = (self.grant.account_id, self.grant.key_id) if self.grant else (None, None)
        keeps_rate = rejected is not None and rejection_error(rejected).status == 422
        # What a template or a grammar refuses was not counted: the estimate stands.
        tokens = (rejected.prompt_tokens or self._admit.prompt_tokens) if rejected is not None and keeps_rate else 0
        end = Release(
            self.request_id,
            min(tokens, self._identifier.context_length),
            0,
            refused=True,
            keeps_rate=keeps_rate,
            account_id=account_id,
            key_id=key_id,
        )
        self._services.limiter.release(end)

    def _settle_detached(
        self, outcome: Outcome, *, refused: bool = False, reply: StoredReply | None = None
    ) -> asyncio.Task[None]:
        """Goes on when the request is cancelled; only then is its record complete."""
        self._record.open += 1
        task = detached(self._settle_and_release(outcome, refused=refused, reply=reply))
        task.add_done_callback(lambda _: self._record.close())
        return task

    async def _settle_and_release(self, outcome: Outcome, *, refused: bool, reply: StoredReply | None) -> None:
        assert self.grant is not None
        if outcome is not Outcome.COMPLETED and self._generation is not None:
            # What had arrived when the client went away was produced, so it is billed.
            for event in self._generation.unread():
                self._count_usage(event)
        usage = self._usage
        refused = refused and not usage.completion_tokens  # a parser may have held back what was produced
        if usage.reason is FinishReason.ERROR:
            outcome = Outcome.FAILED  # the client was gone before the error could be sent
        settlement = Settlement(
            request_id=self.request_id,
            account_id=self.grant.account_id,
            key_id=self.grant.key_id,
            model=self._chat.model,
            backend=self.backend,
            price=self._price,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            outcome=outcome,
            started_at=self.started_at,
            finished_at=time.time(),
            reply=reply,
            epoch=self.grant.epoch,
        )
        began = time.monotonic()
        try:
            await self._services.settlements.settle(settlement, refused=refused)
        except SpoolFull:
            if outcome is Outcome.COMPLETED:  # its client gets an error and does not pay
                settlement = replace(settlement, outcome=Outcome.FAILED)
            raise not_recordable() from None
        except BaseException:
            self._services.limiter.release(release_of(settlement, None, refused=refused))
            raise
        finally:
            self._record.settled(settlement, time.monotonic() - began)

    def _count_usage(self, event: BackendEvent | BaseException) -> None:
        """Takes up what an event says of the usage: what was produced so far is billed if the request ends here."""
        self._record.take(event)
        if isinstance(event, Delta | ReplyParts):
            if self._state is State.CALLED:
                self._state = State.PRODUCING
                self._record.first_token_s = seconds = time.time() - self._record.arrived_at
                self._services.observer.first_token(self._record, seconds)
            self._usage = replace(self._usage, completion_tokens=event.completion_tokens)
        elif isinstance(event, Started):
            self._usage = replace(self._usage, prompt_tokens=event.prompt_tokens, cached_tokens=event.cached_tokens)
        elif isinstance(event, Finished):
            self._usage = event


def _is_empty(event: Delta | ReplyParts | ChoiceEnded) -> bool:
    """Whether an event only counts tokens, whose text is held back: nothing of it is for the client."""
    match event:
        case Delta():
            return not event.text and not event.tokens
        case ReplyParts():
            return not event.parts and not event.tokens
    return False


async def _from_limiter(asked: Awaitable[Grant | Refusal]) -> Grant | Refusal:
    try:
        return await asked
    except Unavailable:
        raise restarting() from None
