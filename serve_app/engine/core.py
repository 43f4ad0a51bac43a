"""What the engine does in a step, without threads, locks or a clock of its own: plan, compute, commit.

`engine` runs it on a thread; tests run it step by step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch

from serve_app.engine.config import EngineSettings
from serve_app.engine.delivery import Outbox
from serve_app.engine.request import Event, FinishReason, Started
from serve_app.engine.sampling import sampler
from serve_app.engine.sampling.draw import Native
from serve_app.engine.sampling.sampler import INVALID, SampledToken
from serve_app.engine.scheduling.blocks import BlockAllocator
from serve_app.engine.scheduling.fair_queue import FairQueue
from serve_app.engine.scheduling.pacing import PrefillPacer
from serve_app.engine.scheduling.scheduler import Scheduler
from serve_app.engine.scheduling.sequence import Chunk, Sequence, SequenceStatus, StepPlan
from serve_app.engine.stream import Stream

logger = logging.getLogger(__name__)

_LEAST_CHUNK = 16  # prompt tokens beside streams: deep in a long context fewer cost hardly less


class Runner(Protocol):
    """What the engine needs of a model runner; see `runner.ModelRunner`."""

    num_blocks: int
    class_bounds: tuple[int, ...]

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""

    def execute(self, chunks: Seq[Chunk]) -> torch.Tensor:
        """Compute the chunks' tokens; float32 logits, `num_logits` rows a chunk, in order."""

    def clear_blocks(self, blocks: Seq[int]) -> None:
        """Zero KV blocks that may hold NaN."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A moment of the engine. Counters run from its start."""

    running: int
    waiting: int
    kv_blocks_total: int
    kv_blocks_used: int
    oldest_wait_s: float  # of the requests that wait for their first turn; 0 when none does
    queued_prefill_tokens: int
    steps: int
    tokens_produced: int
    preemptions: int
    kv_blocks_cached: int  # reusable, but free to be taken
    prefix_hit_tokens: int  # tokens of prompts that were not computed anew
    drafted: int = 0  # tokens that were guessed and verified
    accepted: int = 0  # of these, the ones that were right
    prompt_tokens: int = 0  # of the prompts that began, cached ones too


class EngineCore:
    """The live requests and the decisions about them. Events go to `outbox`; whoever calls delivers them.

    One at a time may call; `compute` alone touches nothing that the others use, and may run beside them.
    """

    def __init__(self, runner: Runner, settings: EngineSettings, outbox: Outbox) -> None:
        self._runner = runner
        self._native: Native | None = getattr(runner, "sampling", None)  # only compiled runners have one
        self._outbox = outbox
        fixed = settings.prefill_chunk_busy
        self._pacer = PrefillPacer(_LEAST_CHUNK, settings.prefill_chunk)
        self.scheduler = Scheduler(
            BlockAllocator(runner.num_blocks, settings.block_size),
            max_running=settings.max_running,
            max_waiting=settings.max_waiting,
            prefill_chunk=settings.prefill_chunk,
            busy_chunk=self._pacer.chunk if fixed is None else lambda rows: fixed,
            class_bounds=runner.class_bounds,
            prefix_reuse=settings.prefix_reuse,
            speculation_rows=settings.speculation_rows,
            queue=FairQueue(settings.fair_prompt_weight, settings.fair_output_weight),
        )
        self.streams: dict[Sequence, Stream] = {}
        self.by_id: dict[str, Sequence] = {}
        self._earliest = math.inf  # no request ends for a deadline before this, seconds
        self._steps = 0
        self._tokens_produced = 0
        self._prompt_tokens = 0
        self._drafted = 0
        self._accepted = 0

    def add(self, stream: Stream) -> None:
        """Queue a request; see `Scheduler.add` for what it raises."""
        sequence = stream.sequence
        self.scheduler.add(sequence)
        self.streams[sequence] = stream
        self.by_id[sequence.request_id] = sequence
        self._earliest = min(self._earliest, _due(sequence))

    def plan(self, now: float) -> StepPlan:
        """Drop requests whose deadline has passed by `now`, seconds, and decide what the next step computes."""
        if now >= self._earliest:
            for sequence in [s for s in self.streams if _due(s) <= now]:
                self.finish(sequence, FinishReason.DEADLINE)
            self._earliest = min(map(_due, self.streams), default=math.inf)
        try:
            plan = self.scheduler.schedule(lambda sequence, limit: self.streams[sequence].guess(limit))
        except Exception:
            logger.exception("Scheduling failed; all requests end with an error.")
            self.finish_all(FinishReason.ERROR)
            return StepPlan((), ())
        for sequence in plan.started:
            self._prompt_tokens += sequence.num_prompt
            self._emit(sequence, Started(sequence.num_prompt, sequence.cached_tokens))
        return plan

    def compute(self, plan: StepPlan, streams: Seq[Stream]) -> list[list[SampledToken]]:
        """Run the model: the next tokens of each chunk that samples. `streams` are those of the plan's chunks."""
        if plan.to_clear:
            self._runner.clear_blocks(plan.to_clear)
        sampling = [(stream, chunk.draft) for stream, chunk in zip(streams, plan.chunks, strict=True) if chunk.samples]
        for stream, draft in sampling:
            stream.prepare(draft)
        logits = self._runner.execute(plan.chunks)
        if not sampling:
            return []
        states, drafts = [stream.sampling for stream, _ in sampling], [draft for _, draft in sampling]
        return sampler.sample(logits, states, drafts, self._native)

    def commit(self, plan: StepPlan, sampled: Iterable[Seq[SampledToken]], seconds: float) -> None:
        """Take over a step's results, which took `seconds`. Those of a request that has left meanwhile are dropped."""
        self._steps += 1
        self._observe(plan, seconds)
        remaining = iter(sampled)
        for chunk in plan.chunks:
            entries = next(remaining) if chunk.samples else None
            sequence = chunk.sequence
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            if entries is None:
                self.scheduler.computed(chunk)
                continue
            stream = self.streams[sequence]
            if chunk.draft:
                self._drafted += len(chunk.draft)
                self._accepted += stream.judge(chunk.draft, entries)
            accepted = stream.accept(entries)
            self._tokens_produced += accepted.produced
            self.scheduler.computed(chunk, accepted.produced)
            if accepted.delta is not None:
                self._emit(sequence, accepted.delta)
            if accepted.reason is FinishReason.ERROR and entries[-1].token == INVALID:
                self.scheduler.condemn(sequence)
            if accepted.reason is not None:
                self.finish(sequence, accepted.reason)

    def fail(self, plan: StepPlan) -> None:
        """End the requests of a step that raised; what it may have written is not handed on."""
        self.scheduler.allocator.suspect(plan.to_clear)
        for chunk in plan.chunks:
            self.finish(chunk.sequence, FinishReason.ERROR)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a request wherever it is; harmless if it has ended."""
        stream = self.streams.pop(sequence, None)
        if stream is None:
            return
        del self.by_id[sequence.request_id]
        self.scheduler.finish(sequence)
        self._outbox.put(sequence.request_id, stream.sink, stream.finished(reason))

    def finish_all(self, reason: FinishReason) -> None:
        """End every request."""
        for sequence in list(self.streams):
            self.finish(sequence, reason)

    def stats(self, now: float) -> EngineStats:
        """This moment, `now` in seconds."""
        scheduler, allocator = self.scheduler, self.scheduler.allocator
        # One that gave its slot back has been served: its age says nothing about the queue.
        oldest = min((s.arrival_time for s in scheduler.waiting if not s.started), default=None)
        return EngineStats(
            running=len(scheduler.running),
            waiting=scheduler.num_waiting,
            kv_blocks_total=allocator.num_blocks,
            kv_blocks_used=allocator.num_used,
            oldest_wait_s=0.0 if oldest is None else max(0.0, now - oldest),
            queued_prefill_tokens=scheduler.queued_prefill_tokens,
            steps=self._steps,
            tokens_produced=self._tokens_produced,
            preemptions=scheduler.num_preemptions,
            kv_blocks_cached=allocator.num_cached,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            drafted=self._drafted,
            accepted=self._accepted,
            prompt_tokens=self._prompt_tokens,
        )

    def _observe(self, plan: StepPlan, seconds: float) -> None:
        decoding = [c for c in plan.chunks if c.end - c.start == 1 and c.end > c.sequence.num_prompt]
        prompt_tokens = plan.num_tokens - sum(chunk.length for chunk in decoding)
        self._pacer.observe(len(decoding), prompt_tokens, seconds)

    def _emit(self, sequence: Sequence, event: Event) -> None:
        self._outbox.put(sequence.request_id, self.streams[sequence].sink, event)


def _due(sequence: Sequence) -> float:
    """When the sequence ends for a deadline if nothing comes of it until then, in the clock's seconds."""
    request = sequence.request
    due = math.inf if request.deadline is None else request.deadline
    if request.first_token_by is None or sequence.num_output:
        return due
    return min(due, request.first_token_by)
