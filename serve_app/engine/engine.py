"""The engine: one thread that schedules, runs the model, samples and hands events to callers."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch

from serve_app.engine import loader, sampler
from serve_app.engine.blocks import BlockAllocator
from serve_app.engine.chat import ChatRenderer
from serve_app.engine.config import EngineSettings
from serve_app.engine.delivery import LoopSink, Outbox, Sink
from serve_app.engine.detokenizer import Vocabulary
from serve_app.engine.errors import ContextLengthExceeded, EngineClosed
from serve_app.engine.fair_queue import FairQueue
from serve_app.engine.request import Delta, Event, Finished, FinishReason, GenerationRequest, Started
from serve_app.engine.runner import ModelRunner
from serve_app.engine.scheduler import Scheduler
from serve_app.engine.sequence import Chunk, Sequence, SequenceStatus, StepPlan
from serve_app.engine.stream import Stream

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """What the engine needs of a model runner; see `runner.ModelRunner`."""

    num_blocks: int
    class_bounds: tuple[int, ...]

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""

    def execute(self, chunks: Seq[Chunk]) -> torch.Tensor:
        """Compute the chunks' tokens; logits of those that sample, in order."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A moment of the engine. Counters run from its start."""

    running: int
    waiting: int
    kv_blocks_total: int
    kv_blocks_used: int
    oldest_wait_s: float  # of the requests that wait now; 0 when none does
    queued_prefill_tokens: int
    steps: int
    tokens_produced: int
    preemptions: int
    kv_blocks_cached: int  # reusable, but free to be taken
    prefix_hit_tokens: int  # tokens of prompts that were not computed anew


class Engine:
    """Serves many requests at once over one model. All methods may be called from any thread.

    `clock` gives seconds and only ever rises; it is read for waiting times alone.
    """

    def __init__(
        self,
        runner: Runner,
        vocabulary: Vocabulary,
        eos_token_ids: frozenset[int],
        settings: EngineSettings,
        *,
        chat: ChatRenderer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        # One sequence alone must always fit the cache, or it could never finish.
        self.max_context = min(runner.class_bounds[-1], runner.num_blocks * settings.block_size)
        self._runner = runner
        self._vocabulary = vocabulary
        self._eos_token_ids = eos_token_ids
        self._chat = chat
        self._clock = clock
        self._scheduler = Scheduler(
            BlockAllocator(runner.num_blocks, settings.block_size),
            max_running=settings.max_running,
            max_waiting=settings.max_waiting,
            prefill_chunk=settings.prefill_chunk,
            prefill_chunk_busy=settings.prefill_chunk_busy,
            class_bounds=runner.class_bounds,
            prefix_reuse=settings.prefix_reuse,
            queue=FairQueue(settings.fair_prompt_weight, settings.fair_output_weight),
        )
        self._streams: dict[Sequence, Stream] = {}  # only the engine's thread removes from these two
        self._by_id: dict[str, Sequence] = {}
        self._aborts: set[str] = set()
        self._arrivals = itertools.count()
        self._steps = 0
        self._tokens_produced = 0
        self._closing = False
        # Guards all of the above; never held while the model runs or events are delivered.
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._outbox = Outbox(self.abort)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_settings(cls, settings: EngineSettings, *, clock: Callable[[], float] = time.monotonic) -> Engine:
        """Load the model that the settings name and start an engine on it.

        Raises:
            ModelError: see `loader.load`.
        """
        loaded = loader.load(settings)
        runner = ModelRunner(loaded.model, settings)
        vocabulary = Vocabulary(loaded.tokenizer)
        max_context = min(runner.class_bounds[-1], runner.num_blocks * settings.block_size)
        chat = ChatRenderer(loaded.tokenizer, max_context)
        return cls(runner, vocabulary, loaded.eos_token_ids, settings, chat=chat, clock=clock)

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
            ValueError: the prompt is empty, or a live request has the same id.
            ContextLengthExceeded: the prompt leaves no room for a token of output.
            QueueFull: too many requests wait.
            EngineClosed: the engine was closed.
        """
        self._submit(request, on_event)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """Queue a request and yield its events; `Finished` is the last. Closing the generator aborts the request.

        Raises the errors of `submit`, when the first event is asked for.
        """
        sink = LoopSink(asyncio.get_running_loop())
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
            if request_id in self._by_id:
                self._aborts.add(request_id)
                self._work.notify()

    def stats(self) -> EngineStats:
        """A consistent picture of this moment."""
        with self._lock:
            scheduler, allocator = self._scheduler, self._scheduler.allocator
            waiting = [*scheduler.preempted, *scheduler.waiting]
            oldest = min((s.arrival_time for s in waiting), default=None)
            return EngineStats(
                running=len(scheduler.running),
                waiting=len(waiting),
                kv_blocks_total=allocator.num_blocks,
                kv_blocks_used=allocator.num_used,
                oldest_wait_s=0.0 if oldest is None else max(0.0, self._clock() - oldest),
                queued_prefill_tokens=scheduler.queued_prefill_tokens,
                steps=self._steps,
                tokens_produced=self._tokens_produced,
                preemptions=scheduler.num_preemptions,
                kv_blocks_cached=allocator.num_cached,
                prefix_hit_tokens=scheduler.prefix_hit_tokens,
            )

    def close(self) -> None:
        """Abort all requests and end the thread; returns when it has ended. May be called twice."""
        with self._lock:
            self._closing = True
            self._work.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _submit(self, request: GenerationRequest, sink: Sink) -> None:
        prompt, params = request.prompt_token_ids, request.sampling
        if not prompt:
            raise ValueError("the prompt is empty")
        room = self.max_context - len(prompt)
        if room < 1:
            raise ContextLengthExceeded(len(prompt), self.max_context)
        vocab = self._runner.vocab_size
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise ValueError("the prompt holds ids outside the vocabulary")
        max_output = min(params.max_tokens, self.settings.max_output, room)
        sequence = Sequence(request, next(self._arrivals), self._clock(), max_output)
        stream = Stream(sequence, self._vocabulary, vocab, self._eos_token_ids, sink)
        with self._lock:
            if self._closing:
                raise EngineClosed("The engine is closed.")
            if request.request_id in self._by_id:
                raise ValueError(f"a request with the id {request.request_id!r} is running already")
            self._scheduler.add(sequence)
            self._streams[sequence] = stream
            self._by_id[request.request_id] = sequence
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
                self._finish_all(reason)
            self._outbox.deliver()

    def _step(self) -> bool:
        """Wait for work, do one step of it, deliver its events; False once the engine is closing."""
        with self._lock:
            while not (self._streams or self._closing):
                self._work.wait()
            if self._closing:
                return False
            self._take_aborts()
            plan = self._plan()
        self._outbox.deliver()
        if plan.chunks:
            try:
                tokens = self._compute(plan)
                with self._lock:
                    self._take_aborts()
                    self._commit(plan, tokens)
            except Exception:
                logger.exception("A step of %d tokens failed; its requests end with an error.", plan.num_tokens)
                with self._lock:
                    for chunk in plan.chunks:
                        self._finish(chunk.sequence, FinishReason.ERROR)
            self._outbox.deliver()
        return True

    def _plan(self) -> StepPlan:
        try:
            plan = self._scheduler.schedule()
        except Exception:
            logger.exception("Scheduling failed; all requests end with an error.")
            self._finish_all(FinishReason.ERROR)
            return StepPlan((), ())
        for sequence in plan.started:
            self._emit(sequence, Started(sequence.num_prompt, sequence.cached_tokens))
        return plan

    def _compute(self, plan: StepPlan) -> list[int]:
        """The plan's next tokens, one per chunk that samples. Runs without the lock."""
        logits = self._runner.execute(plan.chunks)
        states = [self._streams[chunk.sequence].sampling for chunk in plan.chunks if chunk.samples]
        return [entry[0].token for entry in sampler.sample(logits, states, [()] * len(states))] if states else []

    def _commit(self, plan: StepPlan, tokens: list[int]) -> None:
        """Take over a step's results. A request aborted meanwhile has left: its token is dropped."""
        self._steps += 1
        remaining = iter(tokens)
        for chunk in plan.chunks:
            token = next(remaining) if chunk.samples else None
            sequence = chunk.sequence
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            self._scheduler.computed(chunk)
            if token is None:
                continue
            before = sequence.num_output
            text, reason = self._streams[sequence].accept(token)
            self._tokens_produced += sequence.num_output - before
            if text:
                self._emit(sequence, Delta(text, sequence.num_output))
            if reason is not None:
                self._finish(sequence, reason)
            if reason is FinishReason.ERROR:
                # NaN came out, so NaN may lie in any block that led there: nobody else may find it.
                self._scheduler.allocator.forget()

    def _take_aborts(self) -> None:
        for request_id in self._aborts:
            if request_id in self._by_id:
                self._finish(self._by_id[request_id], FinishReason.ABORT)
        self._aborts.clear()

    def _finish_all(self, reason: FinishReason) -> None:
        for sequence in list(self._streams):
            self._finish(sequence, reason)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        stream = self._streams.pop(sequence, None)
        if stream is None:
            return
        del self._by_id[sequence.request_id]
        self._scheduler.finish(sequence)
        self._outbox.put(sequence.request_id, stream.sink, stream.finished(reason))

    def _emit(self, sequence: Sequence, event: Event) -> None:
        self._outbox.put(sequence.request_id, self._streams[sequence].sink, event)
