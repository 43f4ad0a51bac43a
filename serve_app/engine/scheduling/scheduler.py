"""Decides what each step computes: continuous batching with chunked prefill, preemption by recompute, and guesses.

Pure Python: no torch, no clock, no threads, so that every decision can be tested in microseconds. Continuous
batching follows Orca (OSDI '22), chunked prefill Sarathi-Serve (arXiv 2403.02310), fairness the Virtual Token Counter
(arXiv 2401.00588) with one addition: it can take back a slot (see `_yielding_to`).
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq

from serve_app.engine.errors import QueueFull
from serve_app.engine.scheduling.blocks import BlockAllocator
from serve_app.engine.scheduling.prefix import extend_chain, root_key
from serve_app.engine.scheduling.sequence import Chunk, Sequence, SequenceStatus, StepPlan
from serve_app.engine.scheduling.shares import share_evenly, share_prefill_among_tenants
from serve_app.engine.scheduling.waiting import FifoQueue, WaitingQueue

Guess = Callable[[Sequence, int], tuple[int, ...]]  # at most so many tokens that may follow a sequence's last

_OVERFLOW = 2  # times `max_waiting` wait at most, those let in beyond it for their tenants' shares included


class Scheduler:
    """Holds the waiting and the running sequences and hands out one `StepPlan` per step.

    `prefill_chunk` are the prompt tokens of a step while nothing decodes; `busy_chunk(rows)` says how many fit beside
    `rows` decoding sequences, and 0 puts them off. `speculation_rows` bounds what guesses add to a step: so many rows
    beside one decoding sequence, one less for each further one, since a batch fills the matrices without guesses.
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
        busy_chunk: Callable[[int], int],
        class_bounds: Seq[int] = (),
        prefix_reuse: bool = True,
        speculation_rows: int = 0,
        queue: WaitingQueue | None = None,
    ) -> None:
        self.allocator = allocator
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.prefill_chunk = prefill_chunk
        self.busy_chunk = busy_chunk
        self.class_bounds = tuple(class_bounds)
        self.prefix_reuse = prefix_reuse
        self.speculation_rows = speculation_rows
        self.waiting: WaitingQueue = queue if queue is not None else FifoQueue()
        self.running: list[Sequence] = []  # by arrival
        self.num_preemptions = 0
        self.prefix_hit_tokens = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that are not running, preempted ones included."""
        return len(self.waiting)

    @property
    def queued_prefill_tokens(self) -> int:
        """Tokens to compute before every sequence here has its next token; decoding ones aside.

        An upper bound: what a waiting sequence will find in the cache is not known before it is admitted.
        """
        return sum(s.num_pending for s in self.waiting) + sum(s.num_pending for s in self.running if not s.is_decoding)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            QueueFull: `max_waiting` sequences wait beyond those that free slots will take in the next step, and the
                tenant has its share of them.
        """
        excess = self.num_waiting - max(0, self.max_running - len(self.running)) - self.max_waiting
        if excess >= 0 and (
            excess >= (_OVERFLOW - 1) * self.max_waiting
            or not self.waiting.has_share(sequence.request.tenant, self.max_waiting)
        ):
            raise QueueFull(self.num_waiting)
        self.waiting.push(sequence)

    def schedule(self, guess: Guess | None = None) -> StepPlan:
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
        budget = self.prefill_chunk
        if decodes and prefills:
            budget = self.busy_chunk(len(decodes))
        streaming = {s.request.tenant for s in decodes}
        shares = share_prefill_among_tenants([(s.request.tenant, s.num_pending) for s in prefills], budget, streaming)
        guesses = self._guess(decodes, guess)
        chunks = [Chunk(s, s.num_computed, 1 + len(g), g) for s, g in zip(decodes, guesses, strict=True)]
        chunks += [Chunk(s, s.num_computed, n) for s, n in zip(prefills, shares, strict=True) if n]
        for chunk in chunks:
            chunk.sequence.unproven = True
        preempted = self.num_preemptions - preempted_before
        return StepPlan(tuple(chunks), tuple(started), preempted, self.allocator.take_uncleared())

    def computed(self, chunk: Chunk, produced: int = 0) -> None:
        """Note that a chunk of a running sequence went through the model: the blocks that it filled can be found.

        The `produced` tokens that came of it are in the sequence by now. Those of the draft that are among them were
        computed with it; the others' K and V will be overwritten, and the blocks taken for them are free again.
        """
        sequence = chunk.sequence
        sequence.num_computed = chunk.end + _agreement(chunk.draft, sequence.tokens[chunk.end : chunk.end + produced])
        if produced:
            self.waiting.charge(sequence, output_tokens=produced)
        if produced or chunk.samples:
            sequence.num_proven, sequence.unproven = sequence.num_computed, False
        if chunk.draft:
            kept = self.allocator.blocks_for(len(sequence.tokens))
            self.allocator.release(sequence.block_table[kept:])
            del sequence.block_table[kept:]
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
        elif sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        self._free(sequence)
        sequence.status = SequenceStatus.FINISHED

    def condemn(self, sequence: Sequence) -> None:
        """Take out a sequence whose logits held NaN: it may lie in any block that led there, so nobody finds one."""
        sequence.num_proven, sequence.unproven = 0, True
        self.allocator.forget()
        self.finish(sequence)

    def live(self) -> list[Sequence]:
        """Every sequence that has not finished."""
        return [*self.running, *self.waiting]

    def _length_class(self, num_tokens: int) -> int:
        """A function of the length alone, so that preemption never changes what a sequence computes."""
        return bisect.bisect_left(self.class_bounds, num_tokens)

    def _move_to_longer_class(self) -> None:
        # Keys that were rotated by other frequencies are of no use: the sequence is computed anew. That happens at
        # most once per class in a sequence's life.
        for sequence in [s for s in self.running if self._length_class(len(s.tokens)) != s.length_class]:
            self._preempt(sequence)

    def _grow_decodes(self) -> None:
        """Give each decoding sequence room for its next token, oldest first; the youngest pay for it.

        The youngest of the tenant with the most running, so that a flood makes room for itself. Never the oldest of
        all while another runs: so it ends, and then the next.
        """
        for sequence in list(self.running):
            if sequence.status is not SequenceStatus.RUNNING or not sequence.is_decoding:
                continue
            missing = self.allocator.blocks_for(len(sequence.tokens)) - len(sequence.block_table)
            while missing > self.allocator.num_free and sequence.status is SequenceStatus.RUNNING:
                slots = Counter(s.request.tenant for s in self.running)
                self._preempt(max(self.running, key=lambda s: (slots[s.request.tenant], s.arrival)))
            if sequence.status is SequenceStatus.RUNNING:
                sequence.block_table += self.allocator.allocate(missing)

    def _admit(self) -> list[Sequence]:
        """Let in what fits, in the queue's order; the first that does not fit waits, and all behind it."""
        started = []
        while (sequence := self.waiting.peek()) is not None:
            # Also where no slot is free, since one may be made free for it.
            found = self._find_prefix(sequence)
            yielding = self._yielding_to(sequence, found)
            if yielding is None:
                break
            self.waiting.pop()
            for other in yielding:
                other.yielded = True
                self._preempt(other)
            self.allocator.share(found)  # before allocating, which could evict them
            needed = self.allocator.blocks_for(len(sequence.tokens))
            sequence.block_table = found + self.allocator.allocate(needed - len(found))
            sequence.num_published = len(found)
            sequence.num_computed = sequence.num_proven = len(found) * self.allocator.block_size
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

    def _fits(self, sequence: Sequence, found: list[int], leaving: Seq[Sequence] = ()) -> bool:
        """Whether a waiting sequence, whose first blocks were `found`, can run once `leaving` have left."""
        running = len(self.running) - len(leaving)
        free = self.allocator.num_free + sum(self.allocator.freed_by(s.block_table) for s in leaving)
        taken = self.allocator.blocks_for(len(sequence.tokens)) - self.allocator.num_in_use(found)
        # One block per running sequence stays free for its growth, else the newcomer is preempted at once.
        return running < self.max_running and taken + running <= free

    def _yielding_to(self, claimant: Sequence, found: list[int]) -> list[Sequence] | None:
        """Who makes room for a waiting sequence: nobody where it fits, None where it has to wait.

        A tenant that has nothing running may take the place of others that run more than their even share of slots or
        blocks and were served no less; else one tenant's long replies could hold all slots for minutes. The youngest
        of the most served tenant go first, and no tenant's last. What is claimed is one slot and at most an even share
        of the blocks, and nobody yields twice: so there are never more of these preemptions than requests.
        """
        leaving: list[Sequence] = []
        tenant = claimant.request.tenant
        slots = Counter(s.request.tenant for s in self.running)
        held: Counter[str] = Counter()
        for sequence in self.running:
            held[sequence.request.tenant] += len(sequence.block_table)
        slot_share = self.max_running // (len(slots) + 1)
        block_share = self.allocator.num_blocks // (len(slots) + 1)
        may_claim = not slots[tenant] and self.allocator.blocks_for(len(claimant.tokens)) <= block_share
        while not self._fits(claimant, found, leaving):
            youngest = {s.request.tenant: s for s in self.running if not s.yielded and s not in leaving}
            over = [t for t in youngest if slots[t] > 1 and (slots[t] > slot_share or held[t] > block_share)]
            most = self.waiting.most_served(tenant, over) if may_claim else None
            if most is None:
                return None
            leaving.append(youngest[most])
            slots[most] -= 1
            held[most] -= len(youngest[most].block_table)
        return leaving

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

    def _guess(self, decodes: Seq[Sequence], guess: Guess | None) -> list[tuple[int, ...]]:
        """What is verified beside each decoding sequence's next token. Nobody is preempted for it."""
        rows = self.speculation_rows + 1 - len(decodes)
        if guess is None or rows < 1:
            return [()] * len(decodes)
        wanted = [guess(s, min(rows, self._room(s))) for s in decodes]
        shares = share_evenly([len(tokens) for tokens in wanted], rows)
        return [self._place(s, tokens[:n]) for s, tokens, n in zip(decodes, wanted, shares, strict=True)]

    def _room(self, sequence: Sequence) -> int:
        """Tokens of a guess that could all be kept: beyond, they'd exceed the reply or its length class."""
        room = sequence.max_output - sequence.num_output - 1
        if self.class_bounds:
            room = min(room, self.class_bounds[sequence.length_class] - len(sequence.tokens))
        return max(0, room)

    def _place(self, sequence: Sequence, guess: tuple[int, ...]) -> tuple[int, ...]:
        """Find room for a guess's K and V, or for its first tokens."""
        held = len(sequence.block_table)
        missing = self.allocator.blocks_for(len(sequence.tokens) + len(guess)) - held
        missing = min(missing, self.allocator.num_free)
        sequence.block_table += self.allocator.allocate(missing)
        return guess[: (held + missing) * self.allocator.block_size - len(sequence.tokens)]

    def _preempt(self, sequence: Sequence) -> None:
        """Send a running sequence back. What it has produced becomes part of its prefill: nothing is repeated."""
        self.running.remove(sequence)
        self._free(sequence)
        sequence.status = SequenceStatus.WAITING
        self.waiting.restore(sequence)
        self.num_preemptions += 1

    def _free(self, sequence: Sequence) -> None:
        if sequence.unproven:
            self.allocator.suspect(sequence.block_table[sequence.num_proven // self.allocator.block_size :])
        self.allocator.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed = sequence.num_proven = 0
        sequence.unproven = False


def _agreement(draft: Seq[int], said: Seq[int]) -> int:
    """How many tokens of the draft were said, from the first."""
    return next((i for i, (a, b) in enumerate(zip(draft, said, strict=False)) if a != b), min(len(draft), len(said)))
