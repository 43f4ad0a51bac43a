"""One step of the engine, without threads, locks or a clock: plan, compute, commit.

`engine` runs it on a thread; tests run it step by step.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from serve_app.contracts.generation import Event, FinishReason, Started
from serve_app.engine.config import EngineSettings
from serve_app.engine.delivery import Outbox
from serve_app.engine.output_stream import Accepted, OutputStream
from serve_app.engine.port import EngineStats
from serve_app.engine.sampling import sampler
from serve_app.engine.sampling.draw import INVALID, Native
from serve_app.engine.sampling.sampler import SampledToken
from serve_app.engine.scheduling.blocks import BlockAllocator
from serve_app.engine.scheduling.fair_queue import FairQueue
from serve_app.engine.scheduling.pacing import PrefillPacer
from serve_app.engine.scheduling.scheduler import Scheduler
from serve_app.engine.scheduling.sequence import Chunk, SequenceStatus, StepPlan, TokenSequence

logger = logging.getLogger(__name__)

# Maximum bytes of logits for prompts' log-probabilities in one step. Computing them needs a few times this memory.
_SCORED_BYTES = 64 * 2**20
_MIN_CHUNK = 16  # minimum prompt tokens per step while streams run: in a long context, fewer tokens are hardly faster


class Runner(Protocol):
    """A model with its KV cache; `models.choose_runner` makes one. Belongs to one thread."""

    num_blocks: int
    class_bounds: tuple[int, ...]  # maximum tokens of a sequence in each length class, see `rope`

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""

    def execute(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Compute the chunks' tokens; return float32 logits (n, vocabulary): `num_logits` rows per chunk, in order.

        K and V of all tokens are in the cache afterwards; the caller advances `num_computed`. The next call may
        overwrite the logits.
        """

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        """Overwrite KV blocks with zeros, because they may hold NaN."""


class EngineCore:
    """The live requests and the scheduling of their steps. Events go to `outbox`; the caller delivers them.

    Calls must not overlap, except that `add`, `stats` and, once the engine has given up a hung step, `finish_all` may
    run during `compute`.
    """

    def __init__(self, runner: Runner, settings: EngineSettings, outbox: Outbox) -> None:
        self._runner = runner
        self._native: Native | None = getattr(runner, "sampling", None)  # only compiled runners have `sampling`
        self._outbox = outbox
        fixed = settings.prefill_chunk_busy
        self._pacer = PrefillPacer(_MIN_CHUNK, settings.prefill_chunk)
        self.scheduler = Scheduler(
            BlockAllocator(runner.num_blocks, settings.block_size),
            max_running=settings.max_running,
            max_waiting=settings.max_waiting,
            prefill_chunk=settings.prefill_chunk,
            busy_chunk=self._pacer.chunk if fixed is None else lambda rows: fixed,
            long_chunk=self._pacer.idle_chunk if fixed is None else None,
            class_bounds=runner.class_bounds,
            prefix_reuse=settings.prefix_reuse,
            speculation_rows=settings.speculation_rows,
            scored_tokens=max(_MIN_CHUNK, _SCORED_BYTES // (4 * runner.vocab_size)),
            queue=FairQueue(settings.fair_prompt_weight, settings.fair_output_weight),
        )
        self.streams: dict[TokenSequence, OutputStream] = {}
        self.by_id: dict[str, TokenSequence] = {}
        self._earliest_deadline = math.inf  # seconds; no request reaches its deadline before this
        self._steps = 0
        self._step_seconds = 0.0
        self._step_sequences = 0
        self._tokens_produced = 0
        self._prompt_tokens = 0
        self._drafted = 0
        self._accepted = 0

    def add(self, stream: OutputStream) -> None:
        """Queue a request; see `Scheduler.add` for what it raises."""
        sequence = stream.sequence
        self.scheduler.add(sequence)
        self.streams[sequence] = stream
        self.by_id[sequence.request_id] = sequence
        self._earliest_deadline = min(self._earliest_deadline, _deadline(sequence))

    def plan(self, now: float) -> StepPlan:
        """End requests whose deadline is at or before `now` (seconds), and return the work of the next step."""
        if now >= self._earliest_deadline:
            for sequence in [s for s in self.streams if _deadline(s) <= now]:
                self.finish(sequence, FinishReason.DEADLINE)
            self._earliest_deadline = min(map(_deadline, self.streams), default=math.inf)
        try:
            plan = self.scheduler.schedule(lambda sequence, limit: self.streams[sequence].guess(limit))
        except Exception:
            logger.exception("Scheduling failed; all requests end with an error.")
            self.finish_all(FinishReason.ERROR)
            return StepPlan((), ())
        for sequence in plan.started:
            self._prompt_tokens += sequence.num_prompt
            said, text = len(sequence.request.said), self.streams[sequence].said_text
            self._emit(sequence, Started(sequence.num_prompt, sequence.cached_tokens, said=said, said_text=text))
        chunks = tuple(chunk for chunk in plan.chunks if self.streams[chunk.sequence].ready)
        if chunks or not plan.to_clear:
            return replace(plan, chunks=chunks)
        self._runner.clear_blocks(plan.to_clear)  # no step follows, so nothing else clears them
        return replace(plan, chunks=(), to_clear=())

    def compute(self, plan: StepPlan, streams: Sequence[OutputStream]) -> list[list[SampledToken]]:
        """Run the model; return the next tokens of each chunk that samples. `streams` has the stream of each chunk."""
        if plan.to_clear:
            self._runner.clear_blocks(plan.to_clear)
        sampling = [(stream, chunk.draft) for stream, chunk in zip(streams, plan.chunks, strict=True) if chunk.samples]
        for stream, draft in sampling:
            stream.prepare(draft)
        logits = self._runner.execute(plan.chunks)
        if any(chunk.is_scored for chunk in plan.chunks):
            logits = _score(logits, plan.chunks, streams)
        if not sampling:
            return []
        states, drafts = [stream.sampling for stream, _ in sampling], [draft for _, draft in sampling]
        return sampler.sample(logits, states, drafts, self._native)

    def commit(self, plan: StepPlan, sampled: Iterable[Sequence[SampledToken]], seconds: float) -> None:
        """Apply the results of a step that took `seconds`; results of requests that have since ended are dropped."""
        self._steps += 1
        self._step_seconds += seconds
        self._step_sequences += len(plan.chunks)
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
            if stream.was_interrupted(entries):
                self.scheduler.computed(chunk, billed=False)
                self._compute_last_again(sequence)
                continue
            if chunk.draft:
                self._drafted += len(chunk.draft)
                self._accepted += stream.verify(chunk.draft, entries)
            accepted = stream.accept(entries)
            if stream.scores is not None and accepted.reason is not FinishReason.ERROR:
                if stream.scores.has_nan:
                    logger.error("Request %s ends: the logits of its prompt are not numbers.", sequence.request_id)
                    accepted = Accepted(accepted.produced, None, FinishReason.ERROR)
                else:
                    for scored in stream.scores.take():
                        self._emit(sequence, scored)
            self._tokens_produced += accepted.produced
            self.scheduler.computed(chunk, accepted.produced, billed=accepted.reason is not FinishReason.ERROR)
            if accepted.delta is not None:
                self._emit(sequence, accepted.delta)
            if accepted.reason is FinishReason.ERROR and entries[-1].token == INVALID:
                self.scheduler.condemn(sequence)
            if accepted.reason is not None:
                self.finish(sequence, accepted.reason)
            else:
                self._compute_last_again(sequence)

    @staticmethod
    def _compute_last_again(sequence: TokenSequence) -> None:
        """If all tokens are computed, let the next step compute the last one again, because its logits are needed.

        This happens if the grammar interrupts a step: the step computes all tokens but chooses no next token.
        """
        sequence.num_computed = min(sequence.num_computed, len(sequence.tokens) - 1)

    def fail(self, plan: StepPlan) -> None:
        """End the requests of a failed step; blocks that the step may have written are cleared before reuse."""
        self.scheduler.allocator.suspect(plan.to_clear)
        for chunk in plan.chunks:
            self.finish(chunk.sequence, FinishReason.ERROR)

    def finish(self, sequence: TokenSequence, reason: FinishReason) -> None:
        """End a request; no effect if it has already ended."""
        stream = self.streams.pop(sequence, None)
        if stream is None:
            return
        del self.by_id[sequence.request_id]
        self.scheduler.finish(sequence, billed=reason is not FinishReason.ERROR)
        self._outbox.put(sequence.request_id, stream.sink, stream.finished(reason))

    def finish_all(self, reason: FinishReason) -> None:
        for sequence in list(self.streams):
            self.finish(sequence, reason)

    def stats(self, now: float) -> EngineStats:
        scheduler, allocator = self.scheduler, self.scheduler.allocator
        # A preempted request was served before, so its age does not describe the queue.
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
            step_seconds=self._step_seconds,
            step_sequences=self._step_sequences,
        )

    def _observe(self, plan: StepPlan, seconds: float) -> None:
        decoding = [c for c in plan.chunks if c.end - c.start == 1 and c.end > c.sequence.num_prompt]
        prompt_tokens = plan.num_tokens - sum(chunk.length for chunk in decoding)
        self._pacer.observe(len(decoding), prompt_tokens, seconds)

    def _emit(self, sequence: TokenSequence, event: Event) -> None:
        self._outbox.put(sequence.request_id, self.streams[sequence].sink, event)


def _score(logits: torch.Tensor, chunks: Sequence[Chunk], streams: Sequence[OutputStream]) -> torch.Tensor:
    """Give the streams the log-probabilities of their prompts; return the rows of logits that sampling needs."""
    rows: list[int] = []
    targets: list[int] = []
    counts: list[int] = []
    sampled: list[int] = []
    first = 0
    for chunk in chunks:
        request, scored = chunk.sequence.request, chunk.scored
        rows += range(first, first + len(scored))
        targets += request.prompt_token_ids[scored.start : scored.stop]
        counts += [request.sampling.prompt_logprobs or 0] * len(scored)
        end = first + chunk.num_logits
        if chunk.samples:
            sampled += range(end - 1 - len(chunk.draft), end)
        first = end
    found = iter(sampler.score(logits, rows, targets, counts) if rows else ())
    for chunk, stream in zip(chunks, streams, strict=True):
        if stream.scores is not None and chunk.is_scored:
            stream.scores.add(chunk.scored.start, list(itertools.islice(found, len(chunk.scored))))
    return logits[sampled]


def _deadline(sequence: TokenSequence) -> float:
    """Clock time in seconds at which the sequence ends if it has not started by then."""
    first_token_by = sequence.request.first_token_by
    return math.inf if first_token_by is None or sequence.started else first_token_by
