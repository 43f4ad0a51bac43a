"""Decode steps over fixed buffers, so that a CUDA graph can replay them: one launch instead of hundreds.

A graph has fixed shapes and addresses. So a step is padded to a bucket (rows × KV blocks per row), its inputs are
written into buffers that never move, and padding rows work on a spare KV block that belongs to nobody. Everything but
capture and replay themselves runs on any device and is tested on the CPU; no GPU has run any of it yet.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 -- torch's own convention

from serve_app.engine.models.attention import AttentionStep, additive_mask
from serve_app.engine.models.kv_cache import KVCache
from serve_app.engine.models.pointwise import PLAIN, Pointwise
from serve_app.engine.models.rope import RopeTable
from serve_app.engine.scheduling.sequence import Chunk

logger = logging.getLogger(__name__)

MAX_GRAPHS = 64
MIN_ROWS = 16  # verification of drafts needs more rows than there are sequences
GATHER_BYTES = 2**30  # K and V that one layer copies out of the cache in one step; steps beyond it run eagerly

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]


class Decoder(Protocol):
    """What is replayed; see `fused.LlamaDecoder`."""

    device: torch.device
    dtype: torch.dtype

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""

    def forward(
        self,
        ids: torch.Tensor,
        rope_rows: torch.Tensor,
        keep: torch.Tensor | None,
        step: AttentionStep,
        pointwise: Pointwise,
    ) -> torch.Tensor:
        """Logits of all rows where `keep` is None."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A size that steps are padded to."""

    rows: int
    context: int  # tokens per row


def row_buckets(most: int) -> list[int]:
    """1, 2, 4, 8, then multiples of 8 whose steps grow with them: padding stays within a third above 8 rows."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + max(8, 1 << (sizes[-1].bit_length() - 2)))
    return [size for size in sizes if size < most] + [most]


def plan_buckets(max_running: int, max_context: int, bytes_per_token: int) -> list[Bucket]:
    """The buckets worth a graph: at most MAX_GRAPHS, none that gathers over GATHER_BYTES, large ones first.

    `bytes_per_token` is what one layer stores. Contexts double from 256 tokens on, or grow faster where that would
    make too many graphs; if there still are, short contexts and few rows stay.
    """
    rows = row_buckets(max(max_running, MIN_ROWS))
    buckets: list[Bucket] = []
    for factor in (2, 4, 8):
        contexts = [min(256, max_context)]
        while contexts[-1] < max_context:
            contexts.append(min(contexts[-1] * factor, max_context))
        buckets = [Bucket(r, c) for c in contexts for r in rows if r * c * bytes_per_token <= GATHER_BYTES]
        if len(buckets) <= MAX_GRAPHS:
            break
    return sorted(buckets[:MAX_GRAPHS], key=lambda b: (b.rows * b.context, b.rows), reverse=True)


def choose_bucket(buckets: Seq[Bucket], rows: int, context: int) -> Bucket | None:
    """The cheapest bucket that holds a step, None if none does."""
    fitting = [b for b in buckets if b.rows >= rows and b.context >= context]
    return min(fitting, key=lambda b: (b.rows * b.context, b.rows), default=None)


def is_decode(chunks: Seq[Chunk]) -> bool:
    """Whether every token of a step has its logits wanted: decoding and verification, no prefill."""
    return all(chunk.num_logits == chunk.length for chunk in chunks)


class StaticInputs:
    """The inputs of one bucket: views into a buffer that never moves, so all of them travel in one copy.

    Rows are filled from `chunks` in order, draft tokens as rows of their own. Rows left over are padding: token 0 at
    position 0, one token long, in the spare block.
    """

    def __init__(self, buffer: torch.Tensor, bucket: Bucket, block_size: int, spare_block: int) -> None:
        self.bucket = bucket
        self.blocks = -(-bucket.context // block_size)
        self._block_size = block_size
        self._spare = spare_block
        rows = bucket.rows
        self.size = self.size_of(bucket, block_size)
        self._buffer = buffer[: self.size]
        self.ids, self.rope_rows, self.slots, self.lengths = self._buffer[: 4 * rows].view(4, rows).unbind()
        self.block_tables = self._buffer[4 * rows :].view(rows, self.blocks)

    @staticmethod
    def size_of(bucket: Bucket, block_size: int) -> int:
        """Numbers that a bucket's inputs take."""
        return bucket.rows * (4 + -(-bucket.context // block_size))

    def reset(self) -> None:
        """Make every row padding."""
        self.ids.zero_()
        self.rope_rows.zero_()
        self.slots.fill_(self._spare * self._block_size)
        self.lengths.fill_(1)
        self.block_tables.fill_(self._spare)

    def fill(self, chunks: Seq[Chunk], table: RopeTable) -> None:
        """Write a step's rows; for the copy in host memory."""
        self.reset()
        ids: list[int] = []
        rope_rows: list[int] = []
        slots: list[int] = []
        lengths: list[int] = []
        for chunk in chunks:
            blocks = chunk.sequence.block_table
            used = -(-(chunk.start + chunk.length) // self._block_size)
            first = len(ids)
            ids += chunk.token_ids
            for position in range(chunk.start, chunk.start + chunk.length):
                rope_rows.append(table.row(chunk.sequence.length_class, position))
                slots.append(blocks[position // self._block_size] * self._block_size + position % self._block_size)
                lengths.append(position + 1)
            self.block_tables[first : len(ids), :used] = torch.tensor(blocks[:used])
        here = slice(len(ids))
        self.ids[here], self.rope_rows[here] = torch.tensor(ids), torch.tensor(rope_rows)
        self.slots[here], self.lengths[here] = torch.tensor(slots), torch.tensor(lengths)


class StaticDecodeStep:
    """Attention of one token per row over K and V gathered from the cache, up to the bucket's context."""

    def __init__(self, cache: KVCache, inputs: StaticInputs) -> None:
        self._cache = cache
        self._inputs = inputs
        self._masks: dict[int | None, torch.Tensor] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """Store each row's K and V, then attend every row over its sequence; rows of drafts see those before them."""
        inputs, (k_cache, v_cache) = self._inputs, self._cache.layers[layer]
        k_cache.flatten(0, 1).index_copy_(0, inputs.slots, key)
        v_cache.flatten(0, 1).index_copy_(0, inputs.slots, value)
        rows, heads, kv_heads = query.shape[0], query.shape[1], k_cache.shape[2]
        flat = inputs.block_tables.flatten()
        # (rows, kv heads, context, size); the query heads that share a K/V head become its rows, nothing is repeated.
        k = k_cache.index_select(0, flat).view(rows, -1, *k_cache.shape[2:]).transpose(1, 2)
        v = v_cache.index_select(0, flat).view(rows, -1, *v_cache.shape[2:]).transpose(1, 2)
        q = query.reshape(rows, kv_heads, heads // kv_heads, -1)
        mask = self._mask(window, query.dtype)
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale).reshape(rows, heads, -1)

    def _mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Additive, (rows, 1, 1, context); computed by the first layer that needs it, as part of the step."""
        if window not in self._masks:
            lengths = self._inputs.lengths[:, None]
            positions = torch.arange(self._inputs.blocks * self._cache.block_size, device=lengths.device)
            visible = positions < lengths
            if window is not None:
                visible &= positions >= lengths - window
            self._masks[window] = additive_mask(visible, dtype)[:, None, None]
        return self._masks[window]


class DecodeReplay:
    """Runs decode steps through captured graphs, one per bucket."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        table: RopeTable,
        buckets: Seq[Bucket],
        capture: Capture,
        pointwise: Pointwise = PLAIN,
    ) -> None:
        """`cache` has a spare block behind its own. `capture` turns a function into one that repeats its work."""
        self._decoder = decoder
        self._cache = cache
        self._table = table
        self._capture = capture
        self._pointwise = pointwise
        self._buckets = list(buckets)
        size = max((StaticInputs.size_of(b, cache.block_size) for b in buckets), default=0)
        # Host memory is pinned so that the copy does not hold up the thread; int64 is what index operations take.
        self._host = torch.zeros(size, dtype=torch.long, pin_memory=decoder.device.type == "cuda")
        self._device = torch.zeros(size, dtype=torch.long, device=decoder.device)
        self._copied = torch.cuda.Event() if decoder.device.type == "cuda" else None
        # One buffer of results for all graphs: no graph's own memory has to outlive its replay.
        most = max((b.rows for b in buckets), default=0)
        self._logits = torch.zeros(most, decoder.vocab_size, dtype=decoder.dtype, device=decoder.device)
        self._replays: dict[Bucket, Replay] = {}

    @property
    def buckets(self) -> list[Bucket]:
        """Those that have been captured."""
        return list(self._replays)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Capture all buckets in their order: large ones first size the shared memory once.

        Steps of those that fail run eagerly; one line says so. Anything but a lack of memory ends the attempts.
        """
        started = time.monotonic()
        failure = ""
        for number, bucket in enumerate(self._buckets):
            if number % 16 == 0:
                logger.info("Capturing decode graphs: %d of %d.", number, len(self._buckets))
            try:
                self._replays[bucket] = self._capture(self._step(bucket))
            except torch.OutOfMemoryError as error:  # a smaller one may still fit
                failure = str(error)
            except Exception as error:
                failure = str(error)
                break
        count = len(self._replays)
        logger.info("%d decode graphs captured in %.1f s.", count, time.monotonic() - started)
        if failure:
            missing, reason = len(self._buckets) - count, failure.partition("\n")[0]
            logger.warning("%d decode graphs are not captured, those steps run eagerly: %s", missing, reason)

    @torch.inference_mode()
    def run(self, chunks: Seq[Chunk]) -> torch.Tensor | None:
        """Float32 logits (tokens of the step, vocabulary), or None if no captured bucket is for such a step."""
        if not chunks or not is_decode(chunks):
            return None
        rows = sum(chunk.length for chunk in chunks)
        bucket = choose_bucket(self.buckets, rows, max(chunk.start + chunk.length for chunk in chunks))
        if bucket is None:
            return None
        if self._copied is not None:
            self._copied.synchronize()  # the previous step's copy may still read the host's buffer
        host = self._inputs(self._host, bucket)
        host.fill(chunks, self._table)
        self._device[: host.size].copy_(self._host[: host.size], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._decoder.device))
        self._replays[bucket]()
        # Always a copy: the next replay overwrites the buffer.
        return self._logits[:rows].to(torch.float, copy=True)

    def _inputs(self, buffer: torch.Tensor, bucket: Bucket) -> StaticInputs:
        return StaticInputs(buffer, bucket, self._cache.block_size, self._cache.num_blocks)

    def _step(self, bucket: Bucket) -> Callable[[], None]:
        """The work of one bucket, over buffers alone. Its inputs are padding until `run` fills them."""
        inputs = self._inputs(self._device, bucket)
        inputs.reset()

        def step() -> None:
            attention = StaticDecodeStep(self._cache, inputs)
            logits = self._decoder.forward(inputs.ids, inputs.rope_rows, None, attention, self._pointwise)
            self._logits[: bucket.rows].copy_(logits)

        return step


def repeat(step: Callable[[], None]) -> Replay:
    """Stands in for a capture: runs the step anew each time. The padded step is tested with it on the CPU."""
    step()
    return step


def capture_cuda(device: torch.device) -> Capture:
    """Capture on one GPU: graphs share one memory pool, which they may since they never run at the same time.

    As torch's notes on CUDA graphs demand, the work first runs on a side stream, where libraries set themselves up
    and allocate, and is then captured on that stream. Captures fail only on what this thread does meanwhile.
    """
    pool = torch.cuda.graph_pool_handle()
    side = torch.cuda.Stream(device)

    def capture(step: Callable[[], None]) -> Replay:
        with torch.cuda.device(device), _capturable_attention():
            current = torch.cuda.current_stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for _ in range(2):
                    step()
            current.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                    step()
            finally:
                torch.cuda.set_stream(current)  # a capture that fails to end leaves its own stream in place
        return graph.replay

    return capture


@contextmanager
def _capturable_attention() -> Iterator[None]:
    """Leave cuDNN's attention out: it builds a plan for every new shape, and its choice could differ between runs."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        yield
