"""Decides what each step computes: continuous batching with chunked prefill and preemption by recompute.

Pure Python: no torch, no clock, no threads, so that every decision can be tested in microseconds. Continuous
batching follows Orca (OSDI '22), chunked prefill Sarathi-Serve (arXiv 2403.02310).
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence as Seq

from serve_app.engine.blocks import BlockAllocator
from serve_app.engine.errors import QueueFull
from serve_app.engine.prefix import extend_chain, root_key
from serve_app.engine.sequence import Chunk, Sequence, SequenceStatus, StepPlan
from serve_app.engine.waiting import FifoQueue, WaitingQueue


def share_prefill(remaining: Seq[int], budget: int) -> list[int]:
    """Divide a step's prefill tokens among prompts, oldest first in `remaining`.

    The oldest gets at least half, so that it always advances; the rest goes to the prompts nearest to their first
    token, so that a short question does not wait behind a book; what they leave goes to the oldest.
    """
    if not remaining:
        return []
    shares = [0] * len(remaining)
    shares[0] = min(remaining[0], budget if len(remaining) == 1 else -(-budget // 2))
    left = budget - shares[0]
    for index in sorted(range(1, len(remaining)), key=lambda i: remaining[i]):
        shares[index] = min(remaining[index], left)
        left -= shares[index]
    shares[0] += min(remaining[0] - shares[0], left)
    return shares


class Scheduler:
    """Holds the waiting and the running sequences and hands out one `StepPlan` per step.

    `class_bounds` are the most tokens a sequence may have in each length class (see `rope`), ascending; the last is
    the context length.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        max_running: int,
        max_waiting: int,
        prefill_chunk: int,
        prefill_chunk_busy: int,
        class_bounds: Seq[int] = (),
        prefix_reuse: bool = True,
        queue: WaitingQueue | None = None,
    ) -> None:
        self.allocator = allocator
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.prefill_chunk = prefill_chunk
        self.prefill_chunk_busy = prefill_chunk_busy
        self.class_bounds = tuple(class_bounds)
        self.prefix_reuse = prefix_reuse
        self.waiting: WaitingQueue = queue if queue is not None else FifoQueue()
        self.running: list[Sequence] = []  # by arrival
        self.preempted: list[Sequence] = []  # by arrival; ahead of the queue, since their callers already read
        self.num_preemptions = 0
        self.prefix_hit_tokens = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that are not running."""
        return len(self.waiting) + len(self.preempted)

    @property
    def queued_prefill_tokens(self) -> int:
        """Tokens to compute before every sequence here has its next token; decoding ones aside.

        An upper bound: what a waiting sequence will find in the cache is not known before it is admitted.
        """
        waiting = sum(s.num_pending for s in self.waiting) + sum(s.num_pending for s in self.preempted)
        return waiting + sum(s.num_pending for s in self.running if not s.is_decoding)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            QueueFull: `max_waiting` sequences wait beyond those that free slots will take in the next step.
        """
        if self.num_waiting - max(0, self.max_running - len(self.running)) >= self.max_waiting:
            raise QueueFull(self.num_waiting)
        self.waiting.push(sequence)

    def schedule(self) -> StepPlan:
        """Admit, preempt and allocate; return the chunks to compute, decoding sequences first.

        Every chunk's blocks are allocated when this returns. The plan is empty only when nothing is runnable.
        """
        preempted_before = self.num_preemptions
        self._move_to_longer_class()
        self._grow_decodes()
        started = self._admit()
        # After admission, because a preempted sequence that finds all its blocks again decodes at once.
        decodes = [s for s in self.running if s.is_decoding]
        prefills = [s for s in self.running if not s.is_decoding]
        budget = self.prefill_chunk_busy if decodes else self.prefill_chunk
        shares = share_prefill([s.num_pending for s in prefills], budget)
        chunks = [Chunk(s, s.num_computed, 1) for s in decodes]
        chunks += [Chunk(s, s.num_computed, n) for s, n in zip(prefills, shares, strict=True) if n]
        return StepPlan(tuple(chunks), tuple(started), self.num_preemptions - preempted_before)

    def computed(self, chunk: Chunk) -> None:
        """Note that a chunk of a running sequence went through the model: the blocks that it filled can be found."""
        sequence = chunk.sequence
        sequence.num_computed += chunk.length
        if chunk.samples:
            self.waiting.charge(sequence, output_tokens=1)
        if not self.prefix_reuse:
            return
        full = sequence.num_computed // self.allocator.block_size
        extend_chain(sequence.chain, sequence.tokens, self.allocator.block_size, full)
        for index in range(sequence.num_published, full):
            key = sequence.chain[index + 1]
            sequence.block_table[index] = self.allocator.publish(sequence.block_table, index, key)
        sequence.num_published = full

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free its blocks. Harmless if it has already finished."""
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is SequenceStatus.WAITING and sequence in self.preempted:
            self.preempted.remove(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        self._free(sequence)
        sequence.status = SequenceStatus.FINISHED

    def live(self) -> list[Sequence]:
        """Every sequence that has not finished."""
        return [*self.running, *self.preempted, *self.waiting]

    def _length_class(self, num_tokens: int) -> int:
        """A function of the length alone, so that preemption never changes what a sequence computes."""
        return bisect.bisect_left(self.class_bounds, num_tokens)

    def _move_to_longer_class(self) -> None:
        # Keys that were rotated by other frequencies are of no use: the sequence is computed anew. That happens at
        # most once per class in a sequence's life.
        for sequence in [s for s in self.running if self._length_class(len(s.tokens)) != s.length_class]:
            self._preempt(sequence)

    def _grow_decodes(self) -> None:
        """Give each decoding sequence room for its next token, oldest first; the youngest pay for it."""
        for sequence in list(self.running):
            if sequence.status is not SequenceStatus.RUNNING or not sequence.is_decoding:
                continue
            missing = self.allocator.blocks_for(len(sequence.tokens)) - len(sequence.block_table)
            while missing > self.allocator.num_free and sequence.status is SequenceStatus.RUNNING:
                self._preempt(self.running[-1])
            if sequence.status is SequenceStatus.RUNNING:
                sequence.block_table += self.allocator.allocate(missing)

    def _admit(self) -> list[Sequence]:
        """Let in what fits, in the queue's order; the first that does not fit waits, and all behind it."""
        started = []
        while len(self.running) < self.max_running:
            sequence = self.preempted[0] if self.preempted else self.waiting.peek()
            if sequence is None:
                break
            found = self._find_prefix(sequence)
            needed = self.allocator.blocks_for(len(sequence.tokens))
            taken = needed - self.allocator.num_in_use(found)
            # One block per running sequence stays free for its growth, else the newcomer is preempted at once.
            if taken + len(self.running) > self.allocator.num_free:
                break
            if self.preempted:
                self.preempted.pop(0)
            else:
                self.waiting.pop()
            self.allocator.share(found)  # before allocating, which could evict them
            sequence.block_table = found + self.allocator.allocate(needed - len(found))
            sequence.num_published = len(found)
            sequence.num_computed = len(found) * self.allocator.block_size
            sequence.status = SequenceStatus.RUNNING
            bisect.insort(self.running, sequence, key=lambda s: s.arrival)
            if not sequence.started:
                sequence.started = True
                sequence.cached_tokens = sequence.num_computed
                self.prefix_hit_tokens += sequence.cached_tokens
                # Once, for what has to be computed; neither a hit nor a second run after preemption is the tenant's.
                self.waiting.charge(sequence, prompt_tokens=sequence.num_prompt - sequence.cached_tokens)
                started.append(sequence)
        return started

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks that hold a waiting sequence's first tokens. One token is left to compute at least, for its logits."""
        length_class = self._length_class(len(sequence.tokens))
        if not sequence.chain or length_class != sequence.length_class:
            sequence.chain = [root_key(sequence.request.tenant, length_class)]
        sequence.length_class = length_class
        if not self.prefix_reuse:
            return []
        limit = (len(sequence.tokens) - 1) // self.allocator.block_size
        extend_chain(sequence.chain, sequence.tokens, self.allocator.block_size, limit)
        return self.allocator.find(sequence.chain[1 : limit + 1])

    def _preempt(self, sequence: Sequence) -> None:
        """Send a running sequence back. What it has produced becomes part of its prefill: nothing is repeated."""
        self.running.remove(sequence)
        self._free(sequence)
        sequence.status = SequenceStatus.WAITING
        bisect.insort(self.preempted, sequence, key=lambda s: s.arrival)
        self.num_preemptions += 1

    def _free(self, sequence: Sequence) -> None:
        self.allocator.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed = 0
