"""Serves a call in a model replica: renders the prompt, checks the hold, generates the reply."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec.structs import replace as changed

from serve_app.contracts.calls import adapter_of
from serve_app.contracts.generation import (
    BackendEvent,
    Finished,
    FinishReason,
    GenerateCall,
    GrammarKind,
    Rejected,
    Rejection,
    Started,
    TokenizeCall,
    Tokenized,
)
from serve_app.contracts.phases import Phases
from serve_app.contracts.spans import SpanExport
from serve_app.engine.aside import Aside
from serve_app.engine.errors import (
    ContextLengthExceeded,
    EngineClosed,
    QueueFull,
    RequestRefused,
    UnknownAdapter,
    UnsupportedGrammar,
)
from serve_app.engine.port import EnginePort
from serve_app.engine.request import GenerationRequest
from serve_app.model.choices import generate_choices
from serve_app.model.dialect import Dialect, Prompt, UnknownVariable
from serve_app.model.orphans import Orphans, Seen, Settle
from serve_app.model.reply import Reply
from serve_app.model.reply_trace import ReplyTrace
from serve_app.model.tools.call_grammars import BadTool

SHORT = 8192  # characters; shorter prompts are tokenized within milliseconds, so they bypass the queue
TOKENIZING_REST = 1.0  # pause after each job, relative to its duration: limits an account's free use to half a core
# The same for long prompts of replies: a quarter of a core. A client that hangs up in time does not pay for this work.
PROMPTS_REST = 3.0


class Replica:
    """One engine and the calls that run on it.

    `orphans` keeps the usage of replies until the ledger has it. By default, it keeps the usage in memory and calls
    `settle`, the method of AccountingPort. `name` is the replica's name in logs. `spans` sends the replica's spans to a
    trace collector. `clock` is the engine's clock, in seconds.
    """

    def __init__(
        self,
        engine: EnginePort,
        settle: Settle,
        *,
        orphans: Orphans | None = None,
        dialect: Dialect | None = None,
        name: str = "",
        spans: SpanExport | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._dialect = dialect or Dialect(engine.chat)
        self._orphans = orphans or Orphans(settle)
        self._name = name
        self._spans = spans
        self._clock = clock
        self._aside = Aside("prompts", rest=PROMPTS_REST)
        self._tokenizing = Aside("tokenizing", rest=TOKENIZING_REST)  # separate, so no reply waits for these jobs

    def generate(self, call: GenerateCall) -> AsyncGenerator[BackendEvent, None]:
        """Yields Started, the reply and Finished. If the call cannot run, yields Rejected instead.

        Closing or cancelling the generator stops the generation.
        """
        phases = Phases()
        phases.called()
        events = self._events(call, phases)
        if self._spans is None or call.trace is None:
            return events
        return _traced(events, ReplyTrace(self._spans, call, self._name, phases))

    async def _events(self, call: GenerateCall, phases: Phases) -> AsyncGenerator[BackendEvent, None]:
        prepared = await self._prepare(call)
        if isinstance(prepared, Rejected):
            yield prepared
            return
        requests, reply = prepared
        started_at = time.time()
        generated: AsyncGenerator[Any, None]
        made: Any
        if has_choices := call.n > 1:
            generated = generate_choices(self._engine.generate, requests, call.n // len(requests))
        else:
            generated = self._engine.generate(requests[0])
        is_kept = False
        try:
            async with contextlib.aclosing(generated) as events:
                async for made in events:
                    choice, event = made if has_choices else (0, made)
                    if isinstance(event, Started):
                        fingerprint = event.fingerprint or self._engine.fingerprint  # only adapters have their own
                        event = changed(event, fingerprint=fingerprint, replica=self._name)
                    for sent in reply.events(choice, event):
                        phases.take(sent)
                        if isinstance(sent, Finished):
                            # Written before the event is sent: the replica never learns whether the gateway got it.
                            is_kept = self._orphans.write_ahead(call, sent, started_at, self._seen(call, phases))
                        yield sent
                    if reply.is_over:
                        return
        except QueueFull:
            yield Rejected(Rejection.QUEUE_FULL)
        except EngineClosed:
            yield Rejected(Rejection.CLOSED)
        except UnknownAdapter:
            yield Rejected(Rejection.ADAPTER)
        except ValueError as error:
            if (rejected := _rejected_sampling(error, call)) is None:
                raise
            yield rejected
        except (asyncio.CancelledError, GeneratorExit):
            # The gateway has ended the stream. Replies that fail in the replica are not billed.
            produced = reply.produced
            if not is_kept and reply.has_output and produced.reason is not FinishReason.ERROR:
                phases.end()
                self._orphans.settle_later(call, produced, started_at, self._seen(call, phases))
            raise

    def _seen(self, call: GenerateCall, phases: Phases) -> Seen:
        trace_id = None if call.trace is None else call.trace.trace_id
        return Seen(self._name, trace_id, phases.queue_s, phases.prefill_s, phases.decode_s)

    async def _prepare(self, call: GenerateCall) -> tuple[list[GenerationRequest], Reply] | Rejected:
        received_at = self._clock()
        try:
            # Not on the event loop: tokenizing a long prompt takes tens of milliseconds, and every stream would wait.
            prompts = await self._render(call)
        except ContextLengthExceeded as error:
            return Rejected(Rejection.CONTEXT, prompt_tokens=error.prompt_tokens, limit=error.limit)
        except BadTool as error:
            return _rejected_tool(error.name, error, call)
        except UnknownVariable as error:
            return Rejected(Rejection.INVALID, message=str(error), param="chat_template_kwargs")
        except RequestRefused as error:
            return Rejected(Rejection.INVALID, message=f"{error}.", param=error.param)
        except ValueError as error:
            return Rejected(Rejection.INVALID, message=str(error))
        lengths = [len(prompt.token_ids) for prompt in prompts]
        longest, total = max(lengths), sum(lengths)
        limit = self._engine.max_context
        if longest >= limit:
            return Rejected(Rejection.CONTEXT, prompt_tokens=longest, limit=limit)
        outputs = [min(call.sampling.max_tokens, limit - length) for length in lengths]
        price, per_prompt = call.bill.price, call.n // len(prompts)
        if max(price.cost(total, cached, per_prompt * sum(outputs)) for cached in (0, total)) > call.credit:
            return Rejected(Rejection.CREDIT, prompt_tokens=total)
        if call.said and len(call.said) >= outputs[0]:  # credit has since fallen, and with it `max_tokens`
            return Rejected(Rejection.CREDIT, prompt_tokens=total)
        first_token_by = None if call.first_token_within_s is None else received_at + call.first_token_within_s
        requests = [
            GenerationRequest(
                request_id=call.request_id,
                prompt_token_ids=tuple(prompt.token_ids),
                sampling=replace(prompt.sampling, max_tokens=output),
                tenant=call.bill.account_id,
                weight=call.weight,
                said=call.said,
                adapter=adapter_of(call.bill.backend),
                first_token_by=first_token_by,
            )
            for prompt, output in zip(prompts, outputs, strict=True)
        ]
        parsers = [self._dialect.parser(call, prompts[choice // per_prompt], choice) for choice in range(call.n)]
        return requests, Reply(call, lengths, parsers, [prompt.echo for prompt in prompts])

    async def _render(self, call: GenerateCall) -> list[Prompt]:
        if _is_short(call):
            return await asyncio.to_thread(self._dialect.prompts, call)
        return await self._aside.run(call.bill.account_id, lambda: self._dialect.prompts(call))

    async def tokenize(self, call: TokenizeCall) -> Tokenized | Rejected:
        """Returns the tokens of a text or conversation, or the text of tokens.

        Long texts are tokenized in the background, one at a time per account.

        Returns Rejected with the reason CONTEXT if the text is too long to be counted, with INVALID for other errors.
        """
        try:
            if _is_short(call):
                return await asyncio.to_thread(self._dialect.tokenize, call)
            return await self._tokenizing.run(call.account_id, lambda: self._dialect.tokenize(call))
        except ContextLengthExceeded as error:
            return Rejected(Rejection.CONTEXT, prompt_tokens=error.prompt_tokens, limit=error.limit)
        except UnknownVariable as error:
            return Rejected(Rejection.INVALID, message=str(error), param="chat_template_kwargs")
        except ValueError as error:
            param = "messages" if call.token_ids is None else "tokens"
            return Rejected(Rejection.INVALID, message=str(error), param=param)

    async def drain(self) -> None:
        """Settles the remaining replies, as `Orphans.drain` does, then stops the threads that tokenize."""
        await self._orphans.drain()
        self._aside.close()
        self._tokenizing.close()


async def _traced(events: AsyncGenerator[BackendEvent, None], trace: ReplyTrace) -> AsyncGenerator[BackendEvent, None]:
    try:
        async with contextlib.aclosing(events):
            async for event in events:
                trace.take(event)
                yield event
    finally:
        trace.end(failed=isinstance(sys.exc_info()[1], Exception))


def _is_short(call: GenerateCall | TokenizeCall) -> bool:
    """Returns whether prompt and tools together have at most SHORT characters, including names and arguments."""
    left: int = SHORT
    waiting: list[Any] = [call.messages, call.tools]
    if isinstance(call, TokenizeCall):
        waiting += [call.text, call.token_ids]
    elif call.raw is not None:
        waiting += [call.raw.prompts, *[call.raw.suffix or ""] * len(call.raw.prompts)]
    while waiting and left >= 0:
        value: Any = waiting.pop()
        if isinstance(value, str):
            left -= len(value)
        elif isinstance(value, Mapping | Sequence):
            left -= len(value)
            if left >= 0:
                waiting += value if isinstance(value, Sequence) else [*value, *value.values()]
    return left >= 0


def _rejected_sampling(error: ValueError, call: GenerateCall) -> Rejected | None:
    """Returns the rejection if the engine refuses a call's sampling parameters or grammar; None for other errors."""
    if isinstance(error, UnsupportedGrammar):
        if error.alternative is not None:
            return _rejected_tool(call.callable_tools[error.alternative]["function"]["name"], error, call)
        param = "tools" if call.tool_choice == "required" else "response_format"
        if call.sampling.grammar is not None and call.sampling.grammar.kind is GrammarKind.REGEX:
            param = "guided_regex"
        return Rejected(Rejection.INVALID, message=f"{param}: {error}.", param=param)
    if isinstance(error, RequestRefused):
        return Rejected(Rejection.INVALID, message=f"{error}.", param=error.param)
    param = str(error).partition(" ")[0]
    if param in ("logit_bias", "stop_token_ids", "min_p"):  # the sampler's message begins with the parameter
        return Rejected(Rejection.INVALID, message=f"{error}. Leave it out.", param=param)
    return None


def _rejected_tool(name: str, error: ValueError, call: GenerateCall) -> Rejected:
    index = next(index for index, tool in enumerate(call.tools) if tool["function"]["name"] == name)
    param = f"tools[{index}].function.parameters"
    return Rejected(Rejection.INVALID, message=f"{param} (function {name}): {error}.", param=param)
