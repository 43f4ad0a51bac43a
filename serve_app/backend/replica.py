"""What a model replica does with a call: render, check the hold, generate, settle for a dead gateway."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from serve_app.backend.choices import generate_choices
from serve_app.backend.dialect import Dialect
from serve_app.backend.messages import BackendEvent, GenerateCall, Rejected, Rejection
from serve_app.backend.rejections import refused_prompt, refused_sampling
from serve_app.backend.reply import Reply
from serve_app.engine.errors import ContextLengthExceeded, EngineClosed, QueueFull
from serve_app.engine.request import Event, Finished, FinishReason, GenerationRequest, Started
from serve_app.ledger.messages import Outcome, Settlement

if TYPE_CHECKING:
    from serve_app.engine import Engine

logger = logging.getLogger("ray.serve")

MOST_COALESCED = 6  # times the interval of a stream that is alone: 0.09 s

SettleOrphan = Callable[[Settlement], Awaitable[None]]


class Replica:
    """One engine and the calls that run on it. Free of Ray. `clock` is the engine's, in seconds."""

    def __init__(
        self,
        engine: Engine,
        settle_orphan: SettleOrphan,
        *,
        dialect: Dialect | None = None,
        coalesce_s: float = 0.015,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._dialect = dialect or Dialect(engine.chat)
        self._settle_orphan = settle_orphan
        self._coalesce_s = coalesce_s
        self._clock = clock
        self._active = 0
        self._orphans: set[asyncio.Task[None]] = set()

    async def generate(self, call: GenerateCall) -> AsyncGenerator[BackendEvent, None]:
        """Streams Rejected alone, or Started, what is said, and Finished. Closing or cancelling it stops the engine."""
        came = self._clock()
        try:
            # Tokenizing a long prompt takes tens of milliseconds: off the loop, or every stream would wait for it.
            prompt = await asyncio.to_thread(self._dialect.prompt, call)
        except ContextLengthExceeded as error:
            yield Rejected(Rejection.CONTEXT, prompt_tokens=error.prompt_tokens, limit=error.limit)
            return
        except ValueError as error:
            yield refused_prompt(error, call)
            return
        ids = prompt.token_ids
        limit = self._engine.max_context
        if len(ids) >= limit:
            yield Rejected(Rejection.CONTEXT, prompt_tokens=len(ids), limit=limit)
            return
        output = min(call.sampling.max_tokens, limit - len(ids))
        price = call.bill.price
        if max(price.charge(len(ids), cached, call.n * output) for cached in (0, len(ids))) > call.credit:
            yield Rejected(Rejection.CREDIT, prompt_tokens=len(ids))
            return
        request = GenerationRequest(
            request_id=call.request_id,
            prompt_token_ids=tuple(ids),
            sampling=replace(prompt.sampling, max_tokens=output),
            tenant=call.bill.account_id,
            weight=call.weight,
            first_token_by=None if call.first_token_within_s is None else came + call.first_token_within_s,
        )
        reply = Reply(call, len(ids), [self._dialect.reader(call, prompt, choice) for choice in range(call.n)])
        started_at = time.time()
        self._active += 1
        try:
            async with contextlib.aclosing(generate_choices(self._generate, request, call.n)) as events:
                async for choice, event in events:
                    if isinstance(event, Started):
                        event = replace(event, fingerprint=self._engine.fingerprint)
                    for told in reply.take(choice, event):
                        yield told
                    if reply.is_over:
                        # Reached only when the other side has taken the last event and asks for more.
                        return
        except QueueFull:
            yield Rejected(Rejection.QUEUE_FULL)
        except EngineClosed:
            yield Rejected(Rejection.CLOSED)
        except ValueError as error:
            if (rejected := refused_sampling(error, call)) is None:
                raise
            yield rejected
        except (asyncio.CancelledError, GeneratorExit):
            # The other side has cut the stream. A failure of our own passes by here: nothing of it is billed.
            produced = reply.produced
            if produced.completion_tokens and produced.reason is not FinishReason.ERROR:
                self._settle_later(call, produced, started_at)
            raise
        finally:
            self._active -= 1

    def _generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        return self._engine.generate(request, self._interval)

    def _interval(self) -> float:
        """Seconds between the deltas of one stream: few and large ones when many streams share the machine.

        Each delta that goes to another process costs about a third of a millisecond.
        """
        return self._coalesce_s * min(MOST_COALESCED, max(1.0, self._active / 4))

    def _settle_later(self, call: GenerateCall, produced: Finished, started_at: float) -> None:
        """Bills a call whose stream was cut, unless its gateway does.

        A gateway that is alive settles within milliseconds; the first settlement of a request id wins. One that was
        killed can't, and its holds outlive this delay, so the account can't have spent the money meanwhile.
        """
        bill = call.bill
        settlement = Settlement(
            request_id=call.request_id,
            account_id=bill.account_id,
            key_id=bill.key_id,
            model=bill.model,
            backend=bill.backend,
            price=bill.price,
            prompt_tokens=produced.prompt_tokens,
            cached_tokens=produced.cached_tokens,
            completion_tokens=produced.completion_tokens,
            outcome=Outcome.CANCELLED,
            started_at=started_at,
            finished_at=time.time(),
        )

        async def settle() -> None:
            await asyncio.sleep(call.settle_after_s)
            await self._settle_orphan(settlement)

        # A context of its own: the call that ends here is being cancelled, and its child calls with it.
        task = asyncio.get_running_loop().create_task(settle(), context=contextvars.Context())
        self._orphans.add(task)
        task.add_done_callback(self._orphan_done)

    def _orphan_done(self, task: asyncio.Task[None]) -> None:
        self._orphans.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the usage of a cut stream could not be settled", exc_info=error)

    async def drain(self) -> None:
        """Waits for the settlements of cut streams that are still due."""
        if self._orphans:
            await asyncio.wait(self._orphans)
