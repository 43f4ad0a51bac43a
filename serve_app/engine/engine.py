"""The native engine: one thread that schedules, runs the model, samples and delivers events."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

from serve_app.contracts.generation import Event, Finished, FinishReason
from serve_app.engine.chat import ChatRenderer
from serve_app.engine.config import EngineSettings
from serve_app.engine.core import EngineCore, Runner
from serve_app.engine.delivery import LoopSink, Outbox
from serve_app.engine.device_faults import free_cached_memory, is_device_lost, is_out_of_memory
from serve_app.engine.errors import DeviceLost, EngineClosed, EngineFailed, UnknownAdapter, first_line
from serve_app.engine.grammar.compiler import Compiled, GrammarCompiler
from serve_app.engine.hang import HangDetector
from serve_app.engine.loading import loader
from serve_app.engine.models.choose_runner import create_runner
from serve_app.engine.output_stream import OutputStream
from serve_app.engine.port import EngineStats, Promise, Sample
from serve_app.engine.request import GenerationRequest
from serve_app.engine.sampling import ranges
from serve_app.engine.sampling.sampler import SampledToken
from serve_app.engine.scheduling.sequence import StepPlan, TokenSequence
from serve_app.engine.text.detokenizer import Vocabulary

logger = logging.getLogger(__name__)

_POLL_S = 0.01
MAX_FAILURES = 5  # consecutive failed computations after which the device counts as lost


class Engine:
    """An EnginePort that serves many requests at once with one model. All methods may be called from any thread.

    `clock` returns seconds and never goes backwards. It measures deadlines, waiting times and step durations.
    """

    lacks: frozenset[Promise] = frozenset()

    def __init__(
        self,
        runner: Runner,
        vocabulary: Vocabulary,
        eos_token_ids: frozenset[int],
        settings: EngineSettings,
        *,
        chat: ChatRenderer | None = None,
        fingerprint: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.fingerprint = fingerprint  # identifies everything that affects replies; empty if unknown
        # A single sequence must always fit into the cache; otherwise it could never finish.
        self.max_context = min(runner.class_bounds[-1], runner.num_blocks * settings.block_size)
        self.max_running = settings.max_running
        self._runner = runner
        self._vocabulary = vocabulary
        self._eos_token_ids = eos_token_ids
        self._grammars = GrammarCompiler(vocabulary.tokenizer, runner.vocab_size, eos_token_ids)
        self._chat = chat
        self._clock = clock
        self._outbox = Outbox(self.abort)
        self._core = EngineCore(runner, settings, self._outbox)
        self._aborts: set[str] = set()
        self._arrivals = itertools.count()
        self._closing = False
        self._failures = 0  # failed computations since the last successful one
        self._failure: str | None = None  # why the engine has ended without a call of `close`
        self._hang = HangDetector(settings.step_limit_s(on_cpu=settings.device_map == "cpu"), clock)
        self._is_hung = False
        # Guards all of the above. The engine's thread releases it while it runs the model or delivers events.
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_settings(
        cls,
        settings: EngineSettings,
        *,
        progress: Callable[[str], None] = logger.info,
    ) -> Engine:
        """Load the model of the settings and start an engine on it; `progress` receives lines about the loading.

        Raises:
            ModelError: see `loader.load`.
        """
        loaded = loader.load(settings, progress)
        settings = loaded.settings
        runner = create_runner(loaded.model, settings, loaded.weights)
        vocabulary = Vocabulary(loaded.tokenizer)
        max_context = min(runner.class_bounds[-1], runner.num_blocks * settings.block_size)
        chat = ChatRenderer(loaded.tokenizer, max_context)
        eos, fingerprint = loaded.eos_token_ids, loaded.fingerprint
        return cls(runner, vocabulary, eos, settings, chat=chat, fingerprint=fingerprint)

    @property
    def chat(self) -> ChatRenderer:
        if self._chat is None:
            raise ValueError("this engine was built without a chat renderer")
        return self._chat

    def samples(self) -> tuple[Sample, ...]:
        return ()

    def fingerprint_of(self, adapter: str) -> str:
        raise UnknownAdapter("the native engine has no adapters")

    def set_adapters(self, adapters: Mapping[str, str]) -> None:
        if adapters:
            logger.error("The native engine has no adapters: remove %s from user_config.", ", ".join(adapters))

    def check_health(self) -> None:
        """Raises EngineFailed if the engine was closed, hangs, or has lost its thread or its device.

        If the engine hangs, this ends all requests. Its thread ends only with the process.
        """
        self._abandon_hung_step()
        if self._closing or not self._thread.is_alive():
            raise EngineFailed(self._failure or "the engine's thread has ended")

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """Implements `EnginePort.generate`."""
        compiled = None
        if request.sampling.grammar is not None:
            compiled = await self._grammars.prepare(request.sampling.grammar, request.tenant)
        sink = LoopSink(asyncio.get_running_loop())
        self._submit(request, sink, compiled)
        finished = False
        try:
            while not finished:
                event = await sink.events.get()
                finished = isinstance(event, Finished)
                yield event
        finally:
            if not finished:
                self.abort(request.request_id)

    def abort(self, request_id: str) -> None:
        """Stop a request within one step; its last event is `Finished(ABORT)`. Unknown ids are ignored."""
        with self._lock:
            if request_id in self._core.by_id:
                self._aborts.add(request_id)
                self._work.notify()

    def stats(self) -> EngineStats:
        with self._lock:
            return self._core.stats(self._clock())

    def close(self) -> None:
        """Abort all requests and end the thread; returns after it has ended, unless it hangs. May be called twice."""
        with self._lock:
            self._closing = True
            self._work.notify()
        if threading.current_thread() is not self._thread:
            if not self._is_hung:
                self._thread.join()
            self._grammars.close()

    def _submit(self, request: GenerationRequest, sink: LoopSink, compiled: Compiled | None = None) -> None:
        if request.adapter:
            raise UnknownAdapter(f"the native engine has no adapters, but the request names {request.adapter!r}")
        params, vocab = request.sampling, self._runner.vocab_size
        room = ranges.output_room(request, self.max_context, vocab)
        max_output = min(params.max_tokens, self.settings.max_output, room)
        sequence = TokenSequence(request, next(self._arrivals), self._clock(), max_output)
        rows = self.settings.speculation_rows
        grammar = None
        if params.grammar is not None:
            grammar = self._grammars.start_grammar(params.grammar, compiled, request.tenant)
        stream = OutputStream(sequence, self._vocabulary, vocab, self._eos_token_ids, sink, rows, grammar)
        with self._lock:
            if self._closing:
                raise EngineClosed("The engine is closed.")
            if request.request_id in self._core.by_id:
                raise ValueError(f"a request with the id {request.request_id!r} is running already")
            self._core.add(stream)
            self._work.notify()

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except DeviceLost as error:
            logger.critical("The engine ends: %s", error)
            self._failure = str(error)
        except BaseException as error:
            logger.critical("The engine's thread died.", exc_info=True)
            self._failure = f"the engine's thread died: {first_line(error)}"
            raise
        finally:
            with self._lock:
                self._closing = True
                self._core.finish_all(FinishReason.ABORT)
            self._outbox.deliver()

    def _abandon_hung_step(self) -> None:
        with self._lock:
            if self._closing or (problem := self._hang.problem()) is None:
                return
            logger.critical("The engine ends: %s.", problem)
            self._is_hung = self._closing = True
            self._failure = f"the engine hangs: {problem}"
            self._core.finish_all(FinishReason.ABORT)
            self._outbox.deliver()  # safe: if the step ends after all, its thread waits for the lock before it delivers

    def _step(self) -> bool:
        """Wait for work, run one step, deliver its events; False once the engine is closing."""
        with self._lock:
            while not (self._core.streams or self._closing):
                self._work.wait()
            if self._closing:
                return False
            self._finish_aborted()
            plan = self._core.plan(self._clock())
            streams = [self._core.streams[chunk.sequence] for chunk in plan.chunks]
        self._outbox.deliver()
        if plan.chunks:
            self._run_plan(plan, streams)
            self._outbox.deliver()
        else:  # all requests wait for their grammars
            with self._lock:
                self._work.wait(_POLL_S)
        return True

    def _run_plan(self, plan: StepPlan, streams: Sequence[OutputStream]) -> None:
        """Compute a plan and apply its results. If memory runs out, compute the plan in halves.

        If a plan fails, its requests end with an error. Raises DeviceLost if nothing more can be computed.
        """
        began = self._clock()
        try:
            sampled = self._compute(plan, streams)
            seconds = self._clock() - began
            with self._lock:
                self._finish_aborted()
                self._core.commit(plan, sampled, seconds)
            self._failures = 0
            return
        except Exception as error:
            if is_device_lost(error):
                logger.exception("The device has failed.")
                raise DeviceLost(f"the device is lost: {first_line(error)}") from error
            halves = plan.halves() if is_out_of_memory(error) else ()
            if halves:
                logger.warning("A step of %d tokens lacks memory: %s", plan.num_tokens, first_line(error))
            else:
                logger.exception("A step of %d tokens failed; its requests end with an error.", plan.num_tokens)
        # Not in the except clause: until the clause ends, the exception's frames keep device memory in use.
        if halves:
            free_cached_memory()
            for half in halves:
                with self._lock:
                    half = half.still_running()
                    streams = [self._core.streams[chunk.sequence] for chunk in half.chunks]
                if half.chunks:
                    self._run_plan(half, streams)
            return
        with self._lock:
            self._core.fail(plan)
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            raise DeviceLost(f"{self._failures} computations in a row have failed")

    def _compute(self, plan: StepPlan, streams: Sequence[OutputStream]) -> list[list[SampledToken]]:
        self._hang.step_begins()
        try:
            return self._core.compute(plan, streams)
        finally:
            self._hang.step_ends()

    def _finish_aborted(self) -> None:
        for request_id in self._aborts:
            if request_id in self._core.by_id:
                self._core.finish(self._core.by_id[request_id], FinishReason.ABORT)
        self._aborts.clear()
