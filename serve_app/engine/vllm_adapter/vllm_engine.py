"""vLLM as an EnginePort: its AsyncLLM on a separate thread and event loop, behind the service's queue.

vLLM schedules, computes and samples in a separate process. The service itself produces the text and the token counts.
Requests wait in the gate here, so vLLM's queue stays nearly empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from vllm import SamplingParams as VllmSampling
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from serve_app.contracts.generation import Event, Finished, FinishReason, SamplingParams, Started
from serve_app.engine.chat import ChatRenderer
from serve_app.engine.delivery import LoopSink, Outbox
from serve_app.engine.errors import EngineClosed, EngineFailed, QueueFull, UnsupportedGrammar, first_line
from serve_app.engine.grammar.compiler import GrammarCompiler, GrammarState
from serve_app.engine.hang import HangDetector
from serve_app.engine.port import EngineStats, Promise, Sample
from serve_app.engine.request import GenerationRequest
from serve_app.engine.sampling import ranges
from serve_app.engine.scheduling.fair_gate import FairGate, Place
from serve_app.engine.text.detokenizer import Vocabulary
from serve_app.engine.text.prompt_scores import PromptScores
from serve_app.engine.text.reply_text import ReplyText
from serve_app.engine.vllm_adapter import request_params
from serve_app.engine.vllm_adapter.adapters import Adapter, AdapterLoading, Adapters, read_adapter
from serve_app.engine.vllm_adapter.vllm_stats import StepCounts, own_metrics

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    max_context: int
    max_output: int
    max_running: int
    vocab_size: int
    kv_blocks: int
    eos_token_ids: frozenset[int]


@dataclass(eq=False, slots=True)
class _Live:
    """A request that has not ended."""

    place: Place
    params: VllmSampling
    text: ReplyText
    said_text: str
    grammar: GrammarState | None  # our own check: vLLM reports a reply as complete if its grammar fails
    sink: LoopSink
    adapter: Adapter | None
    deadline: asyncio.TimerHandle | None = None
    task: asyncio.Task[None] | None = None  # set once the request is in vLLM
    has_started: bool = False
    cached_tokens: int = 0

    @property
    def request(self) -> GenerationRequest:
        return self.place.request


class VllmEngine:
    """An EnginePort. All methods may be called from any thread; requests live on `loop`, which `thread` runs.

    Deadlines use the loop's clock, which is `time.monotonic`.
    """

    # Lacks CONTINUES because vLLM gets the `said` tokens as part of the prompt, and its penalties, seeds and grammars
    # begin only after the prompt.
    lacks = frozenset({Promise.SAME_IN_ANY_BATCH, Promise.STEPS_FAIL_ALONE, Promise.EXACT_MINIMUM, Promise.CONTINUES})

    def __init__(
        self,
        llm: AsyncLLM,
        loop: asyncio.AbstractEventLoop,
        thread: threading.Thread,
        tokenizer: Any,
        gate: FairGate,
        counts: StepCounts,
        limits: Limits,
        *,
        hang: HangDetector,
        processes: Sequence[BaseProcess],
        max_adapters: int = 0,
        fingerprint: str = "",
    ) -> None:
        self.max_context = limits.max_context
        self.max_running = limits.max_running
        self.fingerprint = fingerprint
        self.chat = ChatRenderer(tokenizer, limits.max_context)
        self._llm = llm
        self._loop = loop
        self._thread = thread
        self._gate = gate
        self._counts = counts
        counts.on_step = self._after_step
        self._hang = hang
        self._processes = processes
        self._limits = limits
        self._adapters = Adapters(
            _LoraStore(llm), max_adapters, lambda path: read_adapter(path, fingerprint, logger.info)
        )
        self._vocabulary = Vocabulary(tokenizer)
        self._grammars = GrammarCompiler(tokenizer, limits.vocab_size, limits.eos_token_ids)
        self._outbox = Outbox(self._abort_soon)
        self._delivery: asyncio.Handle | None = None
        self._live: dict[str, _Live] = {}
        self._prompt_tokens = 0
        self._prefix_hit_tokens = 0
        self._closing = False
        self._failure: str | None = None  # why the engine has ended without a call of `close`

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """Implements `EnginePort.generate`."""
        params = request.sampling
        room = ranges.output_room(request, self.max_context, self._limits.vocab_size)
        ranges.check_sampling(params, self._limits.vocab_size)
        lark = state = None
        if params.grammar is not None and request.said:
            raise UnsupportedGrammar("vLLM can't continue a reply that has a grammar")
        if params.grammar is not None:
            compiled = await self._grammars.prepare(params.grammar, request.tenant)
            lark, state = compiled.lark, self._grammars.start_grammar(params.grammar, compiled, request.tenant)
        max_output = min(params.max_tokens, self._limits.max_output, room)
        if request.said and len(request.said) >= max_output:  # nothing is left, but vLLM would generate a token
            raise ValueError("the reply to continue has already ended")
        keywords = request_params.keywords(
            params,
            max_output,
            self._limits.eos_token_ids,
            lark,
            len(request.said),
            speculates=self._llm.vllm_config.speculative_config is not None,
        )
        structured = None if lark is None else StructuredOutputsParams(grammar=request_params.grammar_text(lark))
        try:
            sampling = VllmSampling(**keywords, output_kind=RequestOutputKind.DELTA, structured_outputs=structured)
        except VLLMClientError as error:
            raise _refusal(error, params) or error from error
        sink = LoopSink(asyncio.get_running_loop())
        finished = False
        try:
            text = ReplyText(self._vocabulary, params, max_output)
            said_text = text.replay(request.said)
            submit = partial(self._submit, request, sampling, text, said_text, state, sink)
            if not await self._submit_once_loaded(request, submit):
                finished = True
                yield Finished(FinishReason.DEADLINE, len(request.prompt_token_ids), 0, 0)
            while not finished:
                event = await sink.events.get()
                finished = isinstance(event, Finished)
                if finished and sink.refusal is not None:
                    raise sink.refusal
                yield event
        finally:
            if not finished:
                with contextlib.suppress(RuntimeError):  # the engine was closed, and with it the loop
                    self._loop.call_soon_threadsafe(self._give_up, request.request_id, sink)

    async def _submit_once_loaded(self, request: GenerationRequest, submit: Callable[[], None]) -> bool:
        """Submit the request when its adapter is loaded; return False if its first token is due before that."""
        while True:
            with contextlib.suppress(AdapterLoading):
                await self._on_loop(submit)
                return True
            loading = asyncio.run_coroutine_threadsafe(self._adapters.until_settled(request.adapter), self._loop)
            left_s = None if request.first_token_by is None else request.first_token_by - time.monotonic()
            try:
                await asyncio.wait_for(asyncio.wrap_future(loading), left_s)
            except TimeoutError:
                return False

    def fingerprint_of(self, adapter: str) -> str:
        return self._adapters.fingerprint(adapter)

    def set_adapters(self, adapters: Mapping[str, str]) -> None:
        with contextlib.suppress(RuntimeError):  # the engine was closed, and with it the loop
            self._loop.call_soon_threadsafe(self._adapters.change, dict(adapters))

    def stats(self) -> EngineStats:
        counts, blocks = self._counts, self._limits.kv_blocks
        running = self._gate.running
        # vLLM reports only after steps, so once no request runs, its last report is stale.
        used = round(counts.kv_usage * blocks) if running else 0
        return EngineStats(
            running=running,
            waiting=self._gate.waiting,
            kv_blocks_total=blocks,
            kv_blocks_used=used,
            oldest_wait_s=self._gate.oldest_wait_s(time.monotonic()),
            queued_prefill_tokens=self._gate.queued_prefill_tokens(),
            steps=counts.steps,
            tokens_produced=counts.tokens_produced,
            preemptions=counts.preemptions,
            kv_blocks_cached=0,  # vLLM does not report them
            prefix_hit_tokens=self._prefix_hit_tokens,
            prompt_tokens=self._prompt_tokens,
            step_seconds=counts.step_seconds,
            step_sequences=counts.step_sequences,
        )

    def samples(self) -> Iterable[Sample]:
        return own_metrics()

    def check_health(self) -> None:
        """Raises EngineFailed if the engine was closed, hangs, or vLLM's process has ended.

        If vLLM hangs, this ends all requests and kills vLLM's process, which does not react to anything else.
        """
        if not self._closing and self._failure is None and (problem := self._hang.problem()) is not None:
            logger.critical("vLLM is killed: %s.", problem)
            self._failure = f"vLLM hangs: {problem}"
            for process in self._processes:
                process.kill()
            with contextlib.suppress(RuntimeError):  # the engine was closed, and with it the loop
                self._loop.call_soon_threadsafe(self._abort_all)
        if self._failure is not None:
            raise EngineFailed(self._failure)
        if self._closing or not self._thread.is_alive():
            raise EngineFailed("the engine was closed")
        if self._llm.errored:
            raise EngineFailed("vLLM's engine process has failed; the replica's log says why")

    def close(self) -> None:
        """Abort all requests and end vLLM's process; returns after it has ended. May be called twice."""
        if self._thread.is_alive():
            try:
                # These errors mean that another call has closed the engine in the meantime.
                with contextlib.suppress(RuntimeError, CancelledError):
                    asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
            finally:
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._grammars.close()

    # Everything below runs on the engine's loop.

    def _submit(
        self,
        request: GenerationRequest,
        sampling: VllmSampling,
        text: ReplyText,
        said_text: str,
        grammar: GrammarState | None,
        sink: LoopSink,
    ) -> None:
        if self._closing or self._failure is not None or self._llm.errored:
            raise EngineClosed("The engine is closed.")
        if request.request_id in self._live:
            raise ValueError(f"a request with the id {request.request_id!r} is running already")
        adapter = self._take_adapter(request)
        try:
            place = self._gate.add(request, self._loop.time())
        except BaseException:
            self._drop_adapter(adapter)
            raise
        live = _Live(place, sampling, text, said_text, grammar, sink, adapter)
        self._live[request.request_id] = live
        if request.first_token_by is not None:
            live.deadline = self._loop.call_at(request.first_token_by, self._end, live, FinishReason.DEADLINE)
        if request.first_token_by is None or request.first_token_by > self._loop.time():
            self._release()

    def _release(self) -> None:
        was_idle = not self._gate.running
        released = self._gate.release()
        if was_idle and released:
            self._hang.step_begins()
        for place in released:
            live = self._live[place.request.request_id]
            if live.deadline is not None:
                live.deadline.cancel()
            self._emit(live, self._started_event(live, live.said_text))
            live.task = self._loop.create_task(self._run(live))
            # Releases the adapter when the request has ended in vLLM too. Until then, a step may need the adapter.
            live.task.add_done_callback(partial(self._task_ended, live))

    def _task_ended(self, live: _Live, _: asyncio.Task[None]) -> None:
        self._drop_adapter(live.adapter)

    def _take_adapter(self, request: GenerationRequest) -> Adapter | None:
        if not request.adapter:
            return None
        first = self._live.get(request.request_id.partition("#")[0])  # the first choice of the same call
        if first is not None and first.adapter is not None:
            return self._adapters.take_again(first.adapter)
        return self._adapters.take(request.adapter)

    def _drop_adapter(self, adapter: Adapter | None) -> None:
        if adapter is not None:
            self._adapters.release(adapter)

    async def _run(self, live: _Live) -> None:
        request = live.request
        tokens = [*request.prompt_token_ids, *request.said]
        prompt = tokens_input(tokens, cache_salt=request.tenant or request.request_id)
        try:
            outputs = self._llm.generate(
                prompt,
                live.params,
                request.request_id,
                lora_request=None if live.adapter is None else live.adapter.handle,
                priority=live.place.priority,
            )
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    if live.grammar is not None:
                        await live.grammar.become_ready()
                    if (reason := self._take(live, output)) is not None:
                        self._end(live, reason)
                        return
            logger.error("vLLM ended request %s without a reason.", request.request_id)
        except EngineDeadError:
            logger.error("Request %s is lost: vLLM's engine process has failed.", request.request_id)
            self._end(live, FinishReason.ABORT)
        except Exception as error:
            live.sink.refusal = None if live.has_started else _refusal(error, request.sampling)
            log = logger.error if live.sink.refusal is None else logger.warning
            log("vLLM failed on request %s: %s.", request.request_id, first_line(error.__cause__ or error))
        self._end(live, FinishReason.ERROR)  # no effect if the request has already ended

    def _take(self, live: _Live, output: RequestOutput) -> FinishReason | None:
        """Convert vLLM's new tokens to events; return the reason why the reply ends, or None."""
        if not live.has_started:
            self._started(live, output.num_cached_tokens or 0)
            if live.params.prompt_logprobs is not None and not self._emit_scores(live, output.prompt_logprobs or ()):
                return FinishReason.ERROR
        [completion] = output.outputs
        tokens, logprobs = completion.token_ids, completion.logprobs
        before = live.text.num_tokens
        reason = None
        for index, token in enumerate(tokens):
            if (reason := self._grammar_failure(live, token)) is not None:
                break
            scored: tuple[Any, ...] = (None,)
            if logprobs is not None:
                scored = _chosen_and_top(logprobs[index], token, live.params.logprobs or 0)
            if not live.text.has_room:  # the request asks for no output tokens
                reason = live.text.end(FinishReason.LENGTH)
            elif token in self._limits.eos_token_ids and not live.params.ignore_eos:
                reason = live.text.end_with(token, *scored)
            elif live.text.ends_before(token):
                reason = live.text.end(FinishReason.STOP)
            else:
                reason = live.text.push(token, *scored)
            if reason is None and live.grammar is not None and live.grammar.finished:
                reason = live.text.end(FinishReason.STOP)
            if reason is not None:
                break
        if reason is None and output.finished:
            # The checks above end most replies first. This one has ended for a reason that only vLLM knows.
            known = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}.get(str(completion.finish_reason))
            reason = FinishReason.ERROR if known is None else live.text.end(known)
        self._gate.produced(live.place, live.text.num_tokens - before)
        if (delta := live.text.take()) is not None:
            self._emit(live, delta)
        return reason

    def _emit_scores(self, live: _Live, by_position: Sequence[Any]) -> bool:
        """Send the prompt's log-probabilities, which come with vLLM's first token. Returns False if any are missing."""
        prompt, count = live.request.prompt_token_ids, live.params.prompt_logprobs or 0
        if len(by_position) != len(prompt):
            found = f"{len(by_position)} log-probabilities for {len(prompt)} tokens of a prompt"
            logger.error("vLLM reports %s: request %s ends.", found, live.request.request_id)
            return False
        scores = PromptScores(self._vocabulary, prompt)
        scores.add(1, [_chosen_and_top(by_position[at], prompt[at], count) for at in range(1, len(prompt))])
        for scored in scores.take():
            self._emit(live, scored)
        return True

    def _grammar_failure(self, live: _Live, token: int) -> FinishReason | None:
        """The reason to end the reply before this token if the grammar has failed, else None.

        vLLM would report such a reply as complete.
        """
        if live.grammar is None:
            return None
        live.grammar.accept(token)
        if live.grammar.error is None:
            return None
        if live.grammar.too_large:  # as in the native engine, the reply keeps its text and is billed
            logger.warning("The reply of request %s ends early: %s.", live.request.request_id, live.grammar.error)
            return live.text.end(FinishReason.LENGTH)
        logger.error("No token for request %s: %s.", live.request.request_id, live.grammar.error)
        return FinishReason.ERROR

    def _started(self, live: _Live, cached_tokens: int) -> None:
        live.has_started = True
        prompt_tokens = len(live.request.prompt_token_ids)
        cached_tokens = live.cached_tokens = min(cached_tokens, prompt_tokens)
        self._prompt_tokens += prompt_tokens
        self._prefix_hit_tokens += cached_tokens
        self._gate.started(live.place, cached_tokens)
        self._emit(live, self._started_event(live))
        self._release()

    def _started_event(self, live: _Live, said_text: str = "") -> Started:
        request = live.request
        return Started(
            len(request.prompt_token_ids),
            live.cached_tokens,
            fingerprint="" if live.adapter is None else live.adapter.fingerprint,
            said=len(request.said),
            said_text=said_text,
        )

    def _end(self, live: _Live, reason: FinishReason) -> None:
        """End a request; no effect if it has already ended."""
        if self._live.get(live.request.request_id) is not live:
            return
        del self._live[live.request.request_id]
        if live.deadline is not None:
            live.deadline.cancel()
        self._gate.leave(live.place)
        if not self._gate.running:
            self._hang.step_ends()
        if live.task is not None and live.task is not asyncio.current_task(self._loop):
            live.task.cancel()  # this aborts the request in vLLM
        if live.task is None:
            self._drop_adapter(live.adapter)
        self._emit(live, live.text.finished(reason, len(live.request.prompt_token_ids), live.cached_tokens))
        if not self._closing and self._failure is None:
            self._release()

    def _give_up(self, request_id: str, sink: LoopSink) -> None:
        """Abort a request whose caller has ended; has no effect on a later request with the same id."""
        if (live := self._live.get(request_id)) is not None and live.sink is sink:
            self._end(live, FinishReason.ABORT)

    def _abort_soon(self, request_id: str) -> None:
        """Abort a request whose caller's loop is closed, once the outbox, which is delivering now, has finished."""
        if (live := self._live.get(request_id)) is not None:
            self._loop.call_soon(self._end, live, FinishReason.ABORT)

    def _emit(self, live: _Live, event: Event) -> None:
        """Deliver the event after all callbacks that are ready now, so that a step wakes the caller's loop once."""
        self._outbox.put(live.request.request_id, live.sink, event)
        if self._delivery is None:
            self._delivery = self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._outbox.deliver()
        self._delivery = None

    def _after_step(self) -> None:
        if self._gate.running:
            self._hang.step_begins()

    def _abort_all(self) -> None:
        for live in list(self._live.values()):
            self._end(live, FinishReason.ABORT)

    async def _close(self) -> None:
        self._closing = True
        tasks = [live.task for live in self._live.values() if live.task is not None]
        self._abort_all()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._outbox.deliver()
        self._llm.shutdown()

    async def _on_loop(self, work: Callable[[], None]) -> None:
        """Run `work` on the engine's loop, in the order of the calls. Raises EngineClosed if the loop is closed."""
        done: Future[None] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return  # the caller was cancelled
            try:
                work()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        try:
            if self._closing:
                raise EngineClosed("The engine is closed.")
            self._loop.call_soon_threadsafe(run)
        except RuntimeError:
            raise EngineClosed("The engine is closed.") from None
        await asyncio.wrap_future(done)


def _refusal(error: Exception, params: SamplingParams) -> Exception | None:
    """The service's error for vLLM's `error` about a request; None if vLLM itself has failed."""
    cause = error.__cause__ if isinstance(error, EngineGenerateError) else error
    if isinstance(cause, GracefulHTTPError):
        # The request exceeds a limit of vLLM's own on waiting requests. Operators can set such limits with
        # `VllmSettings.further`.
        return QueueFull(0)
    if not isinstance(cause, VLLMClientError | ValueError):
        return None
    message = first_line(Exception(*cause.args))  # str(cause) would repeat the parameter and its value
    return request_params.refusal(message, getattr(cause, "parameter", None), params)


class _LoraStore:
    """Loads adapters into vLLM."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    async def load(self, adapter: Adapter, folder: Path) -> LoRARequest:
        # vLLM finds cached prompts by this name. Without the number, it would find prompts of an earlier adapter.
        request = LoRARequest(f"{adapter.name}-{adapter.number}", adapter.number, str(folder))
        await self._llm.add_lora(request)
        return request

    async def unload(self, adapter: Adapter) -> None:
        await self._llm.remove_lora(adapter.number)


def _chosen_and_top(logprobs: Any, token: int, count: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """The token's log-probability, and the `count` most likely tokens with theirs, most likely first."""
    likeliest = sorted(
        ((other, value.logprob) for other, value in logprobs.items()), key=lambda pair: (-pair[1], pair[0])
    )
    return logprobs[token].logprob, tuple(likeliest[:count])
