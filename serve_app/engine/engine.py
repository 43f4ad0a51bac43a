"""The engine: one thread that schedules, runs the model, samples and hands events to callers."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
import time
from collections.abc import AsyncGenerator, Callable

from serve_app.engine.chat import ChatRenderer
from serve_app.engine.config import EngineSettings
from serve_app.engine.core import EngineCore, EngineStats, Runner
from serve_app.engine.delivery import LoopSink, Outbox, Sink
from serve_app.engine.errors import ContextLengthExceeded, EngineClosed
from serve_app.engine.loading import loader
from serve_app.engine.models.runners import create_runner
from serve_app.engine.request import Event, Finished, FinishReason, GenerationRequest
from serve_app.engine.sampling.detokenizer import Vocabulary
from serve_app.engine.sampling.grammar import GrammarCompiler
from serve_app.engine.scheduling.sequence import Sequence
from serve_app.engine.stream import Stream

logger = logging.getLogger(__name__)


class Engine:
    """Serves many requests at once over one model. All methods may be called from any thread.

    `clock` gives seconds and only ever rises: deadlines, waiting times and what steps take are measured by it.
    """

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
        self.fingerprint = fingerprint  # of what decides about replies; empty where nobody has told
        # One sequence alone must always fit the cache, or it could never finish.
        self.max_context = min(runner.class_bounds[-1], runner.num_blocks * settings.block_size)
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
        # Guards all of the above; never held while the model runs or events are delivered.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> Engine:
        """Load the model that the settings name and start an engine on it; `progress` hears how far loading is.

        Raises:
            ModelError: see `loader.load`.
        """
        loaded = loader.load(settings, progress)
        runner = create_runner(loaded.model, settings, loaded.weights)
        vocabulary = Vocabulary(loaded.tokenizer)
        max_context = min(runner.class_bounds[-1], runner.num_blocks * settings.block_size)
        chat = ChatRenderer(loaded.tokenizer, max_context)
        eos, told = loaded.eos_token_ids, loaded.fingerprint
        return cls(runner, vocabulary, eos, settings, chat=chat, fingerprint=told, clock=clock)

    @property
    def chat(self) -> ChatRenderer:
        """Renders messages for this engine's model."""
        if self._chat is None:
            raise ValueError("this engine was built without a chat renderer")
        return self._chat

    @property
    def is_alive(self) -> bool:
        """Whether the engine takes requests: it was not closed and its thread has not died."""
        return self._thread.is_alive() and not self._closing

    def submit(self, request: GenerationRequest, on_event: Callable[[Event], None]) -> None:
        """Queue a request. `on_event` is called on the engine's thread and must be quick; `Finished` is its last.

        Raises:
            ValueError: the prompt is empty, a live request has the same id, or a parameter makes no sense.
            UnsupportedGrammar: a ValueError too: the grammar can't be held to.
            ContextLengthExceeded: the prompt leaves no room for a token of output.
            QueueFull: too many requests wait.
            EngineClosed: the engine was closed.
        """
        self._submit(request, on_event)

    async def generate(
        self, request: GenerationRequest, interval_s: Callable[[], float] = lambda: 0.0
    ) -> AsyncGenerator[Event, None]:
        """Queue a request and yield its events; `Finished` is the last. Closing the generator aborts the request.

        Deltas that come within `interval_s()` seconds of the last one are joined; the first one goes at once. Raises
        the errors of `submit`, when the first event is asked for.
        """
        if request.sampling.grammar is not None:  # may take a second, which the loop has not got
            await asyncio.to_thread(self._grammars.check, request.sampling.grammar)
        sink = LoopSink(asyncio.get_running_loop(), interval_s)
        self._submit(request, sink)
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
        """A consistent picture of this moment."""
        with self._lock:
            return self._core.stats(self._clock())

    def close(self) -> None:
        """Abort all requests and end the thread; returns when it has ended. May be called twice."""
        with self._lock:
            self._closing = True
            self._work.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self._grammars.close()

    def _submit(self, request: GenerationRequest, sink: Sink) -> None:
        prompt, params = request.prompt_token_ids, request.sampling
        if not prompt:
            raise ValueError("the prompt is empty")
        if not 0 < request.weight < math.inf:
            raise ValueError(f"a weight of {request.weight} makes no sense")
        room = self.max_context - len(prompt)
        if room < 1:
            raise ContextLengthExceeded(len(prompt), self.max_context)
        vocab = self._runner.vocab_size
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise ValueError("the prompt holds ids outside the vocabulary")
        max_output = min(params.max_tokens, self.settings.max_output, room)
        sequence = Sequence(request, next(self._arrivals), self._clock(), max_output)
        rows = self.settings.speculation_rows
        grammar = None if params.grammar is None else self._grammars.start(params.grammar)
        stream = Stream(sequence, self._vocabulary, vocab, self._eos_token_ids, sink, rows, grammar)
        with self._lock:
            if self._closing:
                raise EngineClosed("The engine is closed.")
            if request.request_id in self._core.by_id:
                raise ValueError(f"a request with the id {request.request_id!r} is running already")
            self._core.add(stream)
            self._work.notify()

    def _run(self) -> None:
        reason = FinishReason.ABORT
        try:
            while self._step():
                pass
        except BaseException:
            logger.critical("The engine's thread died.", exc_info=True)
            reason = FinishReason.ERROR
            raise
        finally:
            with self._lock:
                self._closing = True
                self._core.finish_all(reason)
            self._outbox.deliver()

    def _step(self) -> bool:
        """Wait for work, do one step of it, deliver its events; False once the engine is closing."""
        with self._lock:
            while not (self._core.streams or self._closing):
                self._work.wait()
            if self._closing:
                return False
            self._take_aborts()
            plan = self._core.plan(self._clock())
            streams = [self._core.streams[chunk.sequence] for chunk in plan.chunks]
        self._outbox.deliver()
        if plan.chunks:
            began = self._clock()
            try:
                sampled = self._core.compute(plan, streams)
                seconds = self._clock() - began
                with self._lock:
                    self._take_aborts()
                    self._core.commit(plan, sampled, seconds)
            except Exception:
                logger.exception("A step of %d tokens failed; its requests end with an error.", plan.num_tokens)
                with self._lock:
                    self._core.fail(plan)
            self._outbox.deliver()
        return True

    def _take_aborts(self) -> None:
        for request_id in self._aborts:
            if request_id in self._core.by_id:
                self._core.finish(self._core.by_id[request_id], FinishReason.ABORT)
        self._aborts.clear()
