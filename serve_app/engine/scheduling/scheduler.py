"""Decides what each step computes: continuous batching, chunked prefill, preemption by recompute, speculation.

Pure Python without torch, clock or threads, so tests can check every decision in microseconds. Continuous batching
follows Orca (OSDI '22), chunked prefill Sarathi-Serve (arXiv 2403.02310). Fairness follows the Virtual Token Counter
(arXiv 2401.00588) with one addition: a tenant can claim another tenant's slot (see `_yielding_to`).
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Container, Sequence

from serve_app.contracts.fairness import count_fairly
from serve_app.engine.scheduling.blocks import BlockAllocator, extend_chain, root_key
from serve_app.engine.scheduling.fair_queue import (
    FairQueue,
    limit_long_prompts,
    share_evenly,
    share_prefill_among_tenants,
    without_long_prompts,
)
from serve_app.engine.scheduling.sequence import Chunk, SequenceStatus, StepPlan, TokenSequence

Guess = Callable[[TokenSequence, int], tuple[int, ...]]  # (sequence, limit) → tokens that may follow its last token

_ALWAYS_COUNTS = 4  # chunks; up to this many, a tenant's tokens always count in `queued_prefill_tokens`
_SHORT = 128  # tokens; a prompt up to this length never counts as long


class Scheduler:
    """Holds the waiting and the running sequences and makes one `StepPlan` per step.

    - `prefill_chunk`: prompt tokens per step while nothing decodes.
    - `long_chunk()`: maximum tokens of long prompts among these, so that a prompt that takes seconds does not delay
      another account's prompt; None for no limit.
    - `busy_chunk(rows)`: prompt tokens per step with `rows` decoding sequences; 0 postpones the prompts.
    - `speculation_rows`: rows of guesses with one decoding sequence, one less for each additional sequence, because
      larger batches use the processor well without guesses.
    - `scored_tokens`: tokens per step of prompts whose log-probabilities are computed; each needs a row of logits.
    - `class_bounds`: the maximum number of tokens in each length class (see `rope`), ascending; the last bound is the
      context length.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        max_running: int,
        max_waiting: int,
        prefill_chunk: int,
        busy_chunk: Callable[[int], int],
        long_chunk: Callable[[], int] | None = None,
        class_bounds: Sequence[int] = (),
        prefix_reuse: bool = True,
        speculation_rows: int = 0,
        scored_tokens: int = 128,
        queue: FairQueue[TokenSequence] | None = None,
    ) -> None:
        self.allocator = allocator
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.prefill_chunk = prefill_chunk
        self.busy_chunk = busy_chunk
        self.long_chunk = long_chunk
        self.class_bounds = tuple(class_bounds)
        self.prefix_reuse = prefix_reuse
        self.speculation_rows = speculation_rows
        self.scored_tokens = scored_tokens
        self.waiting: FairQueue[TokenSequence] = FairQueue() if queue is None else queue
        self.running: list[TokenSequence] = []  # in the order of arrival
        self._had_long = False  # whether the last step with prompts computed part of a long prompt
        self.num_preemptions = 0
        self.prefix_hit_tokens = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that are not running, including preempted ones."""
        return len(self.waiting)

    @property
    def queued_prefill_tokens(self) -> int:
        """Number of tokens to compute until all waiting sequences and prompts in prefill have their next token.

        A tenant that has queued much more than the others does not delay them, because the queue is fair. So its tokens
        beyond twice the others' mean do not count. The number is an upper bound, because the cached prefix of a waiting
        sequence is known only at admission.
        """
        queued: Counter[str] = Counter()
        for sequence in (*self.waiting, *(s for s in self.running if not s.is_decoding)):
            queued[sequence.request.tenant] += sequence.num_pending
        return int(count_fairly(queued.values(), _ALWAYS_COUNTS * self.prefill_chunk))

    def add(self, sequence: TokenSequence) -> None:
        """Queue a sequence.

        Raises:
            QueueFull: see `FairQueue.require_place`.
        """
        free = max(0, self.max_running - len(self.running))
        self.waiting.require_place(sequence.request.tenant, free, self.max_waiting)
        self.waiting.push(sequence)

    def schedule(self, guess: Guess | None = None) -> StepPlan:
        """Start and preempt sequences and allocate blocks; return the chunks to compute, decoding sequences first.

        The plan is empty only if no sequence can run.
        """
        self._move_to_longer_class()
        self._grow_decodes()
        started = self._start_waiting()
        # This follows admission, because a preempted sequence that finds all its blocks in the cache decodes at once.
        decodes = [s for s in self.running if s.is_decoding]
        prefills = [s for s in self.running if not s.is_decoding]
        budget = self.prefill_chunk
        if decodes and prefills:
            budget = self.busy_chunk(len(decodes))
        streaming = {s.request.tenant for s in decodes}
        needs = self._limit_scored(prefills, self._prefill_needs(prefills, not decodes), streaming)
        shares = share_prefill_among_tenants(needs, budget, streaming)
        guesses = self._guess(decodes, guess)
        chunks = [Chunk(s, s.num_computed, 1 + len(g), g) for s, g in zip(decodes, guesses, strict=True)]
        chunks += [
            Chunk(s, s.num_computed, n, is_scored=s.is_scored) for s, n in zip(prefills, shares, strict=True) if n
        ]
        for chunk in chunks:
            chunk.sequence.num_written = max(chunk.sequence.num_written, chunk.start + chunk.length)
        return StepPlan(tuple(chunks), tuple(started), self.allocator.pop_uncleared())

    def _prefill_needs(self, prefills: Sequence[TokenSequence], is_idle: bool) -> list[tuple[str, int]]:
        """The tenant of each prompt and the number of its tokens that this step may compute.

        While other tenants have short prompts, long prompts run only in every second step. A short prompt then waits
        for one step with a long prompt, instead of sharing every step with part of one.
        """
        needs = [(s.request.tenant, s.num_pending) for s in prefills]
        if self.long_chunk is None or not prefills:
            return needs
        limit = self.long_chunk()
        short = max(limit, _SHORT)
        long = {i for i, s in enumerate(prefills) if len(s.tokens) - s.cached_tokens > short}
        if self._had_long:
            needs = without_long_prompts(needs, long)
        self._had_long = any(needs[i][1] for i in long)
        return limit_long_prompts(needs, long, limit) if is_idle else needs

    def _limit_scored(
        self, prefills: Sequence[TokenSequence], needs: list[tuple[str, int]], streaming: Container[str]
    ) -> list[tuple[str, int]]:
        """Limit the prompts that are scored to `scored_tokens` in total."""
        scored = [i for i, s in enumerate(prefills) if s.is_scored]
        if scored:
            shares = share_prefill_among_tenants([needs[i] for i in scored], self.scored_tokens, streaming)
            for i, share in zip(scored, shares, strict=True):
                needs[i] = (needs[i][0], share)
        return needs

    def computed(self, chunk: Chunk, produced: int = 0, *, billed: bool = True) -> None:
        """Record that a running sequence's chunk was computed, and add the blocks that it filled to the index.

        The `produced` tokens are already in the sequence. K and V of confirmed draft tokens are kept. K and V of
        rejected draft tokens will be overwritten, and blocks that only they use are released.

        Other sequences find a prompt's blocks only after its first token. Until then, the client can cancel the request
        free of charge. Other requests would then pay only the cached price for tokens that no account has paid for. For
        the same reason, a step that is not `billed` adds no blocks: it ended with an error, or chose no token.
        """
        sequence = chunk.sequence
        sequence.num_scored = max(sequence.num_scored, chunk.scored.stop)
        sequence.num_computed = chunk.end + _agreement(chunk.draft, sequence.tokens[chunk.end : chunk.end + produced])
        if produced:
            self.waiting.count_served(sequence, output_tokens=produced)
        if produced or chunk.samples:
            sequence.num_proven = sequence.num_written = sequence.num_computed
        if chunk.draft:
            kept = self.allocator.blocks_for(len(sequence.tokens))
            self.allocator.free(sequence.block_table[kept:])
            del sequence.block_table[kept:]
        if billed and (sequence.num_output or chunk.samples):  # only `samples` is true for a reply without tokens
            sequence.num_published = self._publish(sequence, lambda key: key)

    def _publish(self, sequence: TokenSequence, key_of: Callable[[bytes], bytes]) -> int:
        """Add computed blocks to the index under the keys that `key_of` returns; return the number of full blocks."""
        if not self.prefix_reuse:
            return 0
        full = sequence.num_computed // self.allocator.block_size
        extend_chain(sequence.chain, sequence.tokens, self.allocator.block_size, full)
        for index in range(sequence.num_published, full):
            key = key_of(sequence.chain[index + 1])
            sequence.block_table[index] = self.allocator.publish(sequence.block_table, index, key, sequence.chain[0])
        return full

    def finish(self, sequence: TokenSequence, *, billed: bool = True) -> None:
        """Remove a sequence and free its blocks; no effect if it has already finished.

        If it is not `billed`, the blocks that it computed and that no other sequence uses are removed from the index.
        """
        if not billed:
            self.allocator.withdraw(sequence.block_table[sequence.cached_tokens // self.allocator.block_size :])
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self.waiting.withdraw(sequence)
        self._free(sequence)
        sequence.status = SequenceStatus.FINISHED

    def condemn(self, sequence: TokenSequence) -> None:
        """Remove a sequence whose logits held NaN.

        Also removes its tenant's blocks from the index, because any of them may hold NaN. Other tenants' sequences
        share no block with it; their own logits show whether they are affected.
        """
        sequence.num_proven, sequence.num_written = 0, len(sequence.block_table) * self.allocator.block_size
        self.allocator.forget(sequence.chain[0])
        self.finish(sequence)

    def _length_class(self, num_tokens: int) -> int:
        """The length class for this many tokens. It depends on nothing else, so preemption never changes a result."""
        return bisect.bisect_left(self.class_bounds, num_tokens)

    def _move_to_longer_class(self) -> None:
        # K and V with other rotary frequencies cannot be reused. So the sequence is recomputed, at most once per class.
        for sequence in [s for s in self.running if self._length_class(len(s.tokens)) != s.length_class]:
            self._preempt(sequence)

    def _grow_decodes(self) -> None:
        """Allocate room for each decoding sequence's next token, oldest first; preempt sequences if blocks are missing.

        The scheduler preempts the youngest sequence of the tenant with the most running sequences, so a tenant that
        floods the engine makes room at its own expense. It never preempts the oldest sequence while other sequences
        run. So the oldest sequence always ends, and then the next oldest.
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

    def _start_waiting(self) -> list[TokenSequence]:
        """Start the sequences that fit, in queue order; the first that does not fit blocks all sequences behind it."""
        started = []
        while (sequence := self.waiting.peek()) is not None:
            # Needed even if no slot is free, because another sequence may yield its slot.
            found = self._find_prefix(sequence)
            yielding = self._yielding_to(sequence, found)
            if yielding is None:
                break
            self.waiting.pop()
            for other in yielding:
                other.yielded = True
                self._preempt(other)
            self.allocator.share(found)  # before `allocate`, which could evict these blocks
            needed = self.allocator.blocks_for(len(sequence.tokens))
            sequence.block_table = found + self.allocator.allocate(needed - len(found))
            sequence.num_computed = len(found) * self.allocator.block_size
            sequence.num_proven = sequence.num_written = sequence.num_computed
            sequence.status = SequenceStatus.RUNNING
            bisect.insort(self.running, sequence, key=lambda s: s.arrival)
            if not sequence.started:
                sequence.started = True
                sequence.cached_tokens = min(sequence.num_computed, sequence.num_prompt)
                self.prefix_hit_tokens += sequence.cached_tokens
                # Charged once, for the tokens to compute: the tenant pays for neither a cache hit nor a recomputation.
                self.waiting.count_served(sequence, prompt_tokens=len(sequence.tokens) - sequence.num_computed)
                started.append(sequence)
        return started

    def _fits(self, sequence: TokenSequence, found: list[int], leaving: Sequence[TokenSequence] = ()) -> bool:
        """Whether a waiting sequence, with cached blocks `found`, can run once `leaving` have left."""
        running = len(self.running) - len(leaving)
        free = self.allocator.num_free + sum(self.allocator.freed_by(s.block_table) for s in leaving)
        taken = self.allocator.blocks_for(len(sequence.tokens)) - self.allocator.num_in_use(found)
        # One block per running sequence stays free for growth; otherwise the new sequence would be preempted at once.
        return running < self.max_running and taken + running <= free

    def _yielding_to(self, claimant: TokenSequence, found: list[int]) -> list[TokenSequence] | None:
        """The sequences to preempt for a waiting sequence: empty if it already fits, None if it has to wait.

        A tenant without a running sequence may claim room from tenants that hold more than an even share of slots or
        blocks and have received at least as much service. Otherwise one tenant's long replies could hold all slots for
        minutes. The youngest sequences of the most served tenant yield first, but never a tenant's last one. A claim
        covers one slot and at most an even share of the blocks, and a sequence yields at most once. So these
        preemptions never outnumber the requests.
        """
        leaving: list[TokenSequence] = []
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
            loser = self.waiting.most_served(tenant, over) if may_claim else None
            if loser is None:
                return None
            leaving.append(youngest[loser])
            slots[loser] -= 1
            held[loser] -= len(youngest[loser].block_table)
        return leaving

    def _find_prefix(self, sequence: TokenSequence) -> list[int]:
        """Cached blocks of a waiting sequence's first tokens. At least one token is left to compute, for its logits.

        Shared blocks come first; their number is stored in `num_published`. Then come blocks that the sequence computed
        before it was preempted and that no other sequence can find.
        """
        length_class = self._length_class(len(sequence.tokens))
        if not sequence.chain or length_class != sequence.length_class:
            sequence.chain = [root_key(sequence.request.tenant, length_class)]
        sequence.length_class = length_class
        if not self.prefix_reuse or sequence.is_scored:
            sequence.num_published = 0
            return []
        limit = (len(sequence.tokens) - 1) // self.allocator.block_size
        extend_chain(sequence.chain, sequence.tokens, self.allocator.block_size, limit)
        keys = sequence.chain[1 : limit + 1]
        found = self.allocator.find(keys)
        sequence.num_published = len(found)
        if sequence.started and not sequence.num_output:
            found += self.allocator.find(sequence.own_key(key) for key in keys[len(found) :])
        return found

    def _guess(self, decodes: Sequence[TokenSequence], guess: Guess | None) -> list[tuple[int, ...]]:
        """The guess to verify with each decoding sequence's next token. Guesses never preempt a sequence."""
        rows = self.speculation_rows + 1 - len(decodes)
        if guess is None or rows < 1:
            return [()] * len(decodes)
        wanted = [guess(s, min(rows, self._room(s))) for s in decodes]
        shares = share_evenly([len(tokens) for tokens in wanted], rows)
        return [self._place(s, tokens[:n]) for s, tokens, n in zip(decodes, wanted, shares, strict=True)]

    def _room(self, sequence: TokenSequence) -> int:
        """The longest guess that stays within the reply's limit and the sequence's length class."""
        room = sequence.max_output - sequence.num_output - 1
        if self.class_bounds:
            room = min(room, self.class_bounds[sequence.length_class] - len(sequence.tokens))
        return max(0, room)

    def _place(self, sequence: TokenSequence, guess: tuple[int, ...]) -> tuple[int, ...]:
        """Allocate blocks for a guess; return the part of the guess that fits into them."""
        held = len(sequence.block_table)
        missing = self.allocator.blocks_for(len(sequence.tokens) + len(guess)) - held
        missing = min(missing, self.allocator.num_free)
        sequence.block_table += self.allocator.allocate(missing)
        return guess[: (held + missing) * self.allocator.block_size - len(sequence.tokens)]

    def _preempt(self, sequence: TokenSequence) -> None:
        """Return a running sequence to the queue. Its output becomes part of its prefill, so no text is repeated."""
        self.running.remove(sequence)
        if not sequence.num_output:
            self._publish(sequence, sequence.own_key)  # only this sequence can find these blocks again
        self._free(sequence)
        sequence.status = SequenceStatus.WAITING
        self.waiting.restore(sequence)
        self.num_preemptions += 1

    def _free(self, sequence: TokenSequence) -> None:
        if sequence.num_written > sequence.num_proven:
            first, end = (
                sequence.num_proven // self.allocator.block_size,
                self.allocator.blocks_for(sequence.num_written),
            )
            self.allocator.suspect(sequence.block_table[first:end])
        self.allocator.free(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed = sequence.num_proven = sequence.num_written = 0


def _agreement(draft: Sequence[int], output: Sequence[int]) -> int:
    """Length of the longest common prefix of draft and output."""
    pairs = zip(draft, output, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(draft), len(output)))
