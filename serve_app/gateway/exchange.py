"""Runs one chat request from admission to release, and handles every way in which it can end.

    ASKED ──▶ HELD ──▶ CALLED ──▶ PRODUCING ──▶ ENDED
    admit     hold     a replica  there is      settled, or
              open     may work   output        given back

The state in which the request ends decides what is billed:

| state | the client hangs up | the service fails |
|---|---|---|
| ASKED | everything is given back | everything is given back |
| HELD | settled as cancelled, free of charge | everything is given back |
| CALLED | settled as cancelled, free of charge; the rates stay charged | settled as failed: nothing is billed |
| PRODUCING | settled as cancelled: what arrived is billed | text that a client has is billed, see below |

A stream that fails with 500 after it has sent text is settled as cancelled, because the request may have caused the
failure. After a 503 (the replica or its device is lost, or the usage can't be recorded), nothing is billed: the request
is settled as failed. The same is true for any failure of a reply that is not streamed.

A request whose replica is lost goes back to HELD. When the ledger has recorded the lost run as failed, the request goes
back to ASKED and runs again (`reruns.py`). It does not run again if its client has some of the reply and has not asked
for `resume`. When a replica has started the next run, its usage includes the tokens that the client already has.

PRODUCING begins with the first token, even while its text is held back. Until then, the native engine lets no other
request reuse the prompt at the cached price, so a client gains nothing by cancelling in CALLED. vLLM may let other
requests of the account reuse it earlier. With several prompts, only those that have produced output are billed. A
prompt that `echo` has returned counts as output. A request that is cancelled with only such output is settled as
completed, because a cancelled request without an output token is free.

A rejection by the replica, or a stored reply for a retry, gives everything back in any state. The exception is a
rejection because of the request itself (422): it gives back the money, but the request and its prompt still count
against the rate limits. A 503 before the first token also gives back what the request counted against the rate
limits. After any other failure, the request still counts against them: a client could otherwise cause the same failure
again without limit. `complete` settles a finished request before the client sees its usage.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from dataclasses import replace
from enum import Enum, auto
from types import TracebackType
from typing import Final

from msgspec.structs import replace as changed

from serve_app.api import errors
from serve_app.api.chat_request import ChatRequest
from serve_app.api.errors import ApiError
from serve_app.contracts.books import Outcome, Settlement, StoredReply, StoredResponse
from serve_app.contracts.calls import Unavailable, application_of, detached
from serve_app.contracts.errors import SpoolFull
from serve_app.contracts.generation import (
    OF_THE_BACKEND,
    BackendEvent,
    ChoiceEnded,
    Delta,
    Finished,
    FinishReason,
    PromptEcho,
    Rejected,
    Rejection,
    ReplyParts,
    Started,
)
from serve_app.contracts.limiting import Adjust, Grant, Refusal, Release
from serve_app.contracts.ports import BackendUnavailable
from serve_app.gateway.authentication import Caller
from serve_app.gateway.backends import (
    PLAIN,
    Generation,
    NotRunning,
    admit_for,
    call_for,
    max_prompt_tokens,
    system_fingerprint,
)
from serve_app.gateway.idempotency import Retry
from serve_app.gateway.record import RequestRecord
from serve_app.gateway.refusal_errors import not_recordable, refusal_error, rejection_error, restarting, waited_too_long
from serve_app.gateway.reruns import Runs, RunsAgain
from serve_app.gateway.services import Services
from serve_app.gateway.settlements import release_of
from serve_app.gateway.web import ClientGone

logger = logging.getLogger("ray.serve")

NOTHING: Final = Finished(FinishReason.ABORT, 0, 0, 0)  # no usage


class State(Enum):
    """The progress of an exchange. See the table above."""

    ASKED = auto()
    HELD = auto()
    CALLED = auto()
    PRODUCING = auto()
    ENDED = auto()


class Exchange:
    """One request, as an async context manager. Leaving it early settles what was used and releases the hold.

    With a `retry`, `begin` may find that the request was answered before. `replayed` is then the stored reply.
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
        if chat.model not in services.catalogue:  # it was removed after the body was checked
            raise errors.model_not_found(chat.model, services.catalogue.identifiers)
        # Stored here, because an operator may remove the identifier while the request runs.
        identifier = self._identifier = services.catalogue[chat.model]
        self.started_at = time.time()
        self._price = services.catalogue.price(chat.model, self.started_at)
        self._defaults = services.catalogue.defaults.get(chat.model, PLAIN)
        self.request_id = record.request_id
        self.backend = record.backend = services.catalogue.choose_backend(chat.model, caller.account_id, chat.beginning)
        self.fingerprint = system_fingerprint(self.backend)  # identifies the weights only after `Started`
        self.grant: Grant | None = None
        self.replayed: bytes | None = None
        self._admit = admit_for(
            chat,
            record.request_id,
            self.backend,
            self._price,
            identifier,
            holder=services.limiter.holder,
            key_digest=caller.digest,
            address=caller.host,
            idempotency_key=None if retry is None else retry.idempotency_key,
        )
        record.wanted_tokens = self._admit.prompt_tokens + self._admit.max_tokens
        self._generation: Generation | None = None
        self._first: BackendEvent | None = None  # read by `begin`, not yet returned by `next_event`
        self._runs = Runs(record, resumable=chat.resume)
        self._usage = NOTHING  # so far
        self._has_echo = False  # whether this run has returned a prompt (`echo`)

    @property
    def has_event(self) -> bool:
        """Whether `next_event` returns an event of the reply without waiting."""
        return self._first is not None or (self._generation is not None and self._generation.has_event)

    @property
    def usage(self) -> Finished:
        """The usage so far. The prompt is counted once `begin` has returned."""
        return self._usage

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
        """Returns when a replica has taken the request, or when `replayed` is set. Raises ApiError."""
        if self._services.settlements.is_full:
            self._state = State.ENDED
            raise not_recordable()
        while True:
            try:
                await self._begin_run()
            except BackendUnavailable as lost:
                await self._end_lost_run(lost)
            else:
                return

    async def _begin_run(self) -> None:
        """Begins one run, as `begin` describes. Also raises BackendUnavailable when the replica is lost."""
        asked = time.monotonic()
        answer = await _from_limiter(self._caller.admit(self._admit))
        if isinstance(answer, Refusal) and answer.status == 503 and self._moves_to_fallback():
            answer = await _from_limiter(self._caller.admit(self._admit))
        self._record.admit_s, self._record.admitted_at = time.monotonic() - asked, time.time()
        self._record.admitted(answer.account_id, answer.key_id)
        if answer.account_id in self._services.settings.logged_texts:
            raw = self._chat.raw
            self._record.messages, self._record.reply = self._chat.messages if raw is None else raw.prompts, []
        if isinstance(answer, Refusal):
            self._state = State.ENDED
            if self._retry is not None and answer.status in (402, 409):
                self.replayed = await self._retry.of_refused(self._services.settlements, self._caller)
            if self.replayed is None:
                raise refusal_error(answer)
            return
        self._hold(answer)
        if self._retry is not None:
            self.replayed = await self._retry.of_admitted(self._services.settlements, answer.account_id)
            if self.replayed is not None:
                self._give_back()
                return
        self._runs.first_token_by = self._runs.first_token_by or (
            time.monotonic() + self._services.settings.queue_timeout_s
        )
        first = await self._call_backend(answer)
        if isinstance(first, Rejected) and first.reason is Rejection.CREDIT:
            first = await self._call_again(first.prompt_tokens)
        if isinstance(first, Rejected) and first.reason in OF_THE_BACKEND:
            if self._moves_to_fallback():
                first = await self._call_fallback()
            else:
                self._record.phases.failed = True
        if isinstance(first, Rejected):
            raise self._rejected(first)
        if isinstance(first, Finished) and first.reason is FinishReason.DEADLINE:
            self._give_back()
            raise waited_too_long()
        if isinstance(first, Started):
            fingerprint = system_fingerprint(self.backend, first.fingerprint)
            said = self._runs.to_continue
            if first.said != len(said) or (said and fingerprint != self.fingerprint):
                logger.error(
                    "backend %s can't continue %s: its weights, settings or release differ",
                    self.backend,
                    self.request_id,
                )
                raise errors.replica_lost(stream=True)
            self.fingerprint = fingerprint
        self._count_usage(first)
        self._first = first

    async def next_event(
        self, timeout_s: float | None = None
    ) -> Delta | ReplyParts | ChoiceEnded | Finished | RunsAgain | None:
        """Returns the next event of the reply, Finished at the end, or None after `timeout_s` seconds without an event.

        Returns RunsAgain when the run was lost and a replica has taken the next run. Raises ApiError when the backend
        fails.
        """
        try:
            event = await self._next_event(timeout_s)
        except BackendUnavailable as lost:
            await self._end_lost_run(lost)
            await self.begin()
            if self.replayed is not None:  # a retry through another gateway finished first: its reply is stored
                raise self._replica_lost() from None
            return RunsAgain(self._runs.has_sent)
        # A reply that is not streamed is sent only after its end.
        self._runs.has_sent = self._runs.has_sent or (self._chat.stream and event is not None)
        return event

    async def _next_event(self, timeout_s: float | None) -> Delta | ReplyParts | ChoiceEnded | Finished | None:
        assert self._generation is not None
        began: float | None = None
        while True:
            event, self._first = self._first, None
            if event is None:
                if timeout_s and began is not None:
                    timeout_s = max(0.0, timeout_s + began - time.monotonic())
                began = time.monotonic()
                event = await self._generation.next_event(timeout_s)
            if event is None:
                return None
            if isinstance(event, Rejected) and self._state is State.CALLED:
                raise self._rejected(event)
            self._count_usage(event)
            if isinstance(event, Delta | ReplyParts | ChoiceEnded):
                if self._runs.passes(event):
                    if self._has_echo:
                        await asyncio.sleep(0)  # lets others run: encoding a part of a long prompt takes milliseconds
                    return event
                continue
            if isinstance(event, Finished):
                if (kept := self._runs.pop_kept()) is not None:
                    self._first = event
                    return kept
                if event.reason is FinishReason.ABORT:  # the engine has stopped
                    raise self._replica_lost()
                if event.reason not in (FinishReason.STOP, FinishReason.LENGTH):
                    self._record.phases.failed = True
                    logger.error("backend %s ended %s with %s", self.backend, self.request_id, event.reason)
                    raise errors.server_error()
                return event
            if not isinstance(event, Started):
                raise errors.server_error()

    async def complete(self, body: bytes | None = None, response: StoredResponse | None = None) -> None:
        """Settles a finished request: when it returns, the usage is durable and may be shown. Raises ApiError.

        `body` is the whole reply, which is stored with the usage for a retry. `response` is stored with the usage for
        later requests of the account.
        """
        self._state = State.ENDED
        reply = None if self._retry is None or body is None else self._retry.stored(body)
        # Shielded: a client that hangs up now must not leave the hold behind.
        await asyncio.shield(self._settle_detached(Outcome.COMPLETED, reply=reply, response=response))

    def _hold(self, grant: Grant) -> None:
        self._state = State.HELD
        self.grant = grant
        self._services.limiter.opened(self._admit, grant, self.started_at)
        choices = self._chat.choices
        if grant.max_tokens < choices and not grant.tentative:
            self._give_back()
            message = f"the balance pays for less than one token for each of {choices} choices: add funds or lower n"
            raise errors.insufficient_balance(message)

    async def _call_backend(self, grant: Grant) -> BackendEvent:
        """Calls the replica. Returns its first event, which shows whether the request can run."""
        services = self._services
        runs, left_s = self._runs, self._runs.left_s
        call = call_for(
            self._chat,
            grant,
            self.backend,
            self._price,
            settle_after_s=services.orphan_delay_s,
            first_token_within_s=left_s,
            trace=None if services.tracing is None else services.tracing.begin_call(self._record),
            defaults=self._defaults,
            said=runs.to_continue,
            reply_id=runs.reply_id,
        )
        services.calls.add(self._record)
        self._generation = Generation(services.backends, self.backend, call, self._record.phases)
        self._record.leave = None if runs.has_sent else self._generation.leave  # a begun reply can't change backends
        self._state = State.CALLED
        first = await self._generation.next_event(left_s)
        if first is None:
            raise waited_too_long()
        return first

    def _rejected(self, rejected: Rejected) -> ApiError:
        """Undoes the admission of a request that its replica has rejected, and returns the request's error."""
        if self._runs.to_continue and rejected.reason not in OF_THE_BACKEND:
            self._give_back()  # part of the reply was sent, so the request is valid; this backend can't continue it
            return self._replica_lost()
        self._give_back(rejected)
        return rejection_error(rejected)

    async def _call_again(self, prompt_tokens: int) -> BackendEvent:
        """Adjusts the hold to the replica's count of the prompt, and calls the replica again."""
        assert self._generation is not None
        await self._generation.stop()
        self._state = State.HELD  # the replica has rejected the call, so nothing runs
        ask = Adjust(self.request_id, prompt_tokens, self._caller.digest)
        adjusted = await _from_limiter(self._services.limiter.ask(ask))
        if isinstance(adjusted, Refusal):
            self._give_back()
            raise refusal_error(adjusted)
        self._hold(adjusted)
        return await self._call_backend(adjusted)

    def _moves_to_fallback(self) -> bool:
        """Moves the request to its identifier's fallback, if there is one and no part of the reply was sent.

        Returns whether it did.
        """
        other = self._services.catalogue.fallback(self._chat.model, self.backend)
        if other is None or self._runs.has_sent:
            return False
        self.backend = self._record.backend = other
        self.fingerprint = system_fingerprint(other)
        self._admit = replace(self._admit, backend=application_of(other))
        return True

    async def _call_fallback(self) -> BackendEvent:
        assert self._generation is not None
        assert self.grant is not None
        await self._generation.stop()
        first = await self._call_backend(self.grant)
        if isinstance(first, Rejected) and first.reason is Rejection.CREDIT:  # the fallback may count more tokens
            first = await self._call_again(first.prompt_tokens)
        return first

    async def _end_lost_run(self, lost: BackendUnavailable) -> None:
        """Settles a run as failed after the loss of its replica, and gives the next run its id.

        Raises ApiError if no run follows. Nothing is awaited between the release of the lost run and the Admit of the
        next.
        """
        services, record = self._services, self._record
        logger.warning("backend %s lost %s: %s", self.backend, self.request_id, lost)
        pause_s = self._runs.pause_after_loss(services.settings.queue_timeout_s)
        if pause_s is None:
            raise self._replica_lost()
        assert self._generation is not None
        self._generation.cancel()
        # From here on this run is not billed, even if the client hangs up: its tokens were lost with the replica.
        self._state, self._generation, self._usage, self._has_echo = State.HELD, None, NOTHING, False
        await asyncio.sleep(pause_s)
        failure, began = self._settlement(Outcome.FAILED), time.monotonic()
        try:
            settled = await services.settlements.settle(failure, refused=True)
        except SpoolFull:
            raise not_recordable() from None
        record.settled(failure, time.monotonic() - began)
        if settled is None or settled.charged:
            raise self._replica_lost()
        services.calls.discard(record)
        is_lost = not isinstance(lost, NotRunning)
        if is_lost:
            services.observer.runs_again(record)
        lost_run = self._runs.begin_next()
        if is_lost:
            services.calls.add(lost_run)  # `Lifecycle` counts it as a failure of the backend
        self.request_id = record.request_id
        if not self._runs.has_sent:  # a begun reply stays on its backend, because it needs the same weights
            self.backend = record.backend = services.catalogue.choose_backend(
                self._chat.model, self._caller.account_id, self._chat.beginning
            )
        self._admit = replace(self._admit, request_id=self.request_id, backend=application_of(self.backend))
        self._state, self._first = State.ASKED, None

    def _replica_lost(self) -> ApiError:
        self._record.phases.failed = True
        return errors.replica_lost(stream=self._chat.stream)

    def _leave(self, error: BaseException | None) -> None:
        """Ends an exchange early (see this module's table). Never waits, so it works during a cancellation."""
        client_gone = isinstance(error, asyncio.CancelledError | ClientGone)
        if self._state is State.ASKED or (self._state is State.HELD and not client_gone):
            self._give_back()  # in ASKED, the limiter may not have admitted it: a release is then harmless
            return
        lost = isinstance(error, ApiError) and error.status == 503
        unserved = lost and self._state is State.CALLED
        self._state = State.ENDED
        if self._generation is not None:
            self._generation.cancel()
        # The gateway must settle before the replica does: the replica bills what it produces until it is cancelled.
        pays = client_gone or (self._runs.has_sent and not lost)
        outcome = Outcome.CANCELLED if pays else Outcome.FAILED
        self._settle_detached(outcome, refused=unserved)

    def _give_back(self, rejected: Rejected | None = None) -> None:
        """Undoes the admission of a request that did not run.

        A request that was itself at fault still counts against the rate limits.
        """
        self._state = State.ENDED
        if self._generation is not None:
            self._generation.cancel()
        account_id, key_id = (self.grant.account_id, self.grant.key_id) if self.grant else (None, None)
        keeps_rate = rejected is not None and rejected.reason in (Rejection.CONTEXT, Rejection.INVALID)
        # If the replica did not count the prompt, for example because the template failed, the rates keep the estimate.
        tokens = (rejected.prompt_tokens or self._admit.prompt_tokens) if rejected is not None and keeps_rate else 0
        end = Release(
            self.request_id,
            min(tokens, max_prompt_tokens(self._chat, self._identifier)),
            0,
            refused=True,
            keeps_rate=keeps_rate,
            account_id=account_id,
            key_id=key_id,
        )
        self._services.limiter.release(end)

    def _settle_detached(
        self,
        outcome: Outcome,
        *,
        refused: bool = False,
        reply: StoredReply | None = None,
        response: StoredResponse | None = None,
    ) -> asyncio.Task[None]:
        """Settles in a task that continues when the request is cancelled. The record stays open until the task ends."""
        self._record.open += 1
        task = detached(self._settle_and_release(outcome, refused, reply, response))
        task.add_done_callback(lambda _: self._record.close())
        return task

    async def _settle_and_release(
        self, outcome: Outcome, refused: bool, reply: StoredReply | None, response: StoredResponse | None
    ) -> None:
        assert self.grant is not None
        if outcome is not Outcome.COMPLETED and self._generation is not None:
            # Events that had arrived but were not read when the request ended were produced, so they count as usage.
            for event in self._generation.unread():
                self._count_usage(event)
        usage = self._usage
        # `refused` was decided before the unread events were counted: they may contain the first token.
        refused = refused and not usage.completion_tokens and not self._has_echo
        if usage.reason is FinishReason.ERROR and not self._runs.has_sent:
            outcome = Outcome.FAILED  # the engine failed, and the client hung up before it got the error
        if outcome is Outcome.CANCELLED and self._has_echo and not usage.completion_tokens:
            outcome = Outcome.COMPLETED
        settlement = self._settlement(outcome, reply, response)
        began = time.monotonic()
        try:
            await self._services.settlements.settle(settlement, refused=refused)
        except SpoolFull:
            if outcome is Outcome.COMPLETED:  # the client gets an error instead of the end, and does not pay
                settlement = replace(settlement, outcome=Outcome.FAILED)
            raise not_recordable() from None
        except BaseException:
            self._services.limiter.release(release_of(settlement, None, refused=refused))
            raise
        finally:
            self._record.settled(settlement, time.monotonic() - began)

    def _settlement(
        self, outcome: Outcome, reply: StoredReply | None = None, response: StoredResponse | None = None
    ) -> Settlement:
        """Returns the settlement for what this request has used so far."""
        assert self.grant is not None
        usage = self._usage
        return Settlement(
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
            response=response,
        )

    def _count_usage(self, event: BackendEvent | BaseException) -> None:
        """Updates the usage from an event. If the request ends after this event, this usage is billed."""
        if type(event) is not Delta or self._record.reply is not None:
            self._record.take(event)
        if isinstance(event, Delta | ReplyParts):
            if self._state is State.CALLED:
                self._state = State.PRODUCING
                if self._record.first_token_s is None:
                    self._record.first_token_s = seconds = time.time() - self._record.arrived_at
                    self._services.observer.first_token(self._record, seconds)
            self._usage = changed(self._usage, completion_tokens=event.completion_tokens)
            if self._chat.raw is not None and isinstance(event, ReplyParts):
                self._has_echo = self._has_echo or any(isinstance(part, PromptEcho) for part in event.parts)
        elif isinstance(event, Started):
            self._usage = changed(
                self._usage,
                prompt_tokens=event.prompt_tokens,
                cached_tokens=event.cached_tokens,
                completion_tokens=max(event.said, self._usage.completion_tokens),
            )
        elif isinstance(event, Finished):
            self._usage = event


async def _from_limiter(asked: Awaitable[Grant | Refusal]) -> Grant | Refusal:
    try:
        return await asked
    except Unavailable:
        raise restarting() from None
