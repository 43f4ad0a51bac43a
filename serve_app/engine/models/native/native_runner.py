"""Runs llama-like models in int8 on the CPU through the native decoder, and draws their tokens in C++."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Sequence

import numpy
import torch

from serve_app.engine.config import EngineSettings
from serve_app.engine.errors import ModelError
from serve_app.engine.models.kv_cache import blocks_within
from serve_app.engine.models.llama_weights import LlamaWeights
from serve_app.engine.models.native import library as native
from serve_app.engine.models.quantize import Int8Weight
from serve_app.engine.models.rope import RopeTable
from serve_app.engine.sampling.draw import MIN_WEIGHT, FirstDraw
from serve_app.engine.scheduling.sequence import Chunk

_HUGE_PAGE = 2 * 2**20  # bytes

# Work of a step. The unit is one computed token that attends to one earlier token. A step with at least _HEAVY_WORK
# units uses all threads. Lighter steps wait for memory rather than for processors, so half of the threads are as fast.
# With fewer threads, it is also less likely that a barrier waits for a thread whose processor the rest of the service
# uses.
_HEAVY_WORK = 40_000
# Units added for the matrix products of each prompt token. A decoding stream, which computes one token and its guesses,
# adds none: its products wait for memory.
_PROMPT_TOKEN_WORK = 1_500
_READING_WORK = 4  # units of reading the keys and values of one earlier token


def why_not(weights: LlamaWeights) -> str | None:
    """The reason why the native decoder cannot run these weights, or None."""
    shape = weights.shape
    if shape.head_dim % 16:
        return f"heads of {shape.head_dim} values are not a multiple of 16"
    for layer in weights.layers:
        for weight in (layer.qkv, layer.output, layer.gate_up, layer.down):
            if not isinstance(weight, Int8Weight):
                return "the weights are not int8"
            if weight.values.device.type != "cpu":
                return f"weights are on {weight.values.device}"
    return None


class NativeDraw:
    """Implements `draw.Native` for the CPU, on at most `threads` threads; `library` comes from `library.load`."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self._library = library
        self._threads = threads

    def draw(self, blocks: torch.Tensor, steepness: list[float], uniform: list[float]) -> FirstDraw:
        """Return the same result as the torch implementation, except for the rounding of exp."""
        assert blocks.is_contiguous()
        rows, count, _ = blocks.shape
        peaks, sums = torch.empty(rows, count), torch.zeros(rows, count)
        tokens, drawn = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
        scale, numbers = torch.tensor(steepness), torch.tensor(uniform, dtype=torch.float64)
        call = native.Draw(
            *(tensor.data_ptr() for tensor in (blocks, peaks, sums, scale, numbers, tokens, drawn)),
            rows=rows,
            blocks=count,
            least=MIN_WEIGHT,
            threads=min(self._threads, rows),
        )
        self._library.native_draw(ctypes.byref(call))
        return FirstDraw(tokens, drawn, peaks, sums)


class NativeRunner:
    """An int8 decoder with its KV cache in half precision; a `core.Runner`.

    A token's logits have the same bits in any batch and in chunks of any size: sums are exact, or their order does not
    depend on the batch. The matrices are packed into new memory, so the caller can release `weights`.
    """

    def __init__(self, library: ctypes.CDLL, weights: LlamaWeights, table: RopeTable, settings: EngineSettings) -> None:
        """Pack the weights and reserve the cache.

        Raises:
            ModelError: `kv_cache_memory` is below one block, or there is too little memory.
        """
        shape, block_size = weights.shape, settings.block_size
        self._library = library
        self._threads = settings.num_threads or torch.get_num_threads()
        self._kept_alive: list[object] = []
        self.sampling = NativeDraw(library, self._threads)
        self.vocab_size = shape.vocab
        self.class_bounds = table.bounds
        self._table = table
        per_head = 2 * shape.head_dim * block_size  # values of K and V per head in a block
        per_block = per_head * 2 * shape.kv_heads * shape.num_layers  # bytes, two per value
        self.num_blocks = blocks_within(settings, per_block, table.bounds[-1])
        try:
            cache = huge_pages(self.num_blocks * per_block)
            self._arena = huge_pages(self._packed_bytes(weights))
        except (OSError, MemoryError) as error:
            raise ModelError(
                f"No memory for the weights and a KV cache of {settings.kv_cache_bytes:,} bytes: lower kv_cache_memory."
            ) from error
        self._cache = cache.view(numpy.uint16).reshape(shape.num_layers, shape.kv_heads, self.num_blocks, per_head)
        self._arena_used = 0
        layers = (native.Layer * shape.num_layers)()
        for index, layer in enumerate(weights.layers):
            layers[index] = native.Layer(
                input_norm=self._floats(layer.input_norm),
                q_norm=self._floats(layer.q_norm),
                k_norm=self._floats(layer.k_norm),
                post_norm=self._floats(layer.post_norm),
                qkv=self._matrix(layer.qkv, layer.qkv_bias),
                output=self._matrix(layer.output, layer.output_bias),
                gate_up=self._matrix(self._interleave(layer.gate_up), None),
                down=self._matrix(layer.down, None),
                cache=self._cache[index].ctypes.data,
                window=shape.windows[index] or 0,
            )
        head = self._matrix(weights.head, None)
        sizes = native.Shape(
            layers=shape.num_layers,
            hidden=shape.hidden,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            intermediate=shape.intermediate,
            vocab=shape.vocab,
            num_blocks=self.num_blocks,
            block_size=block_size,
            norm_eps=shape.norm_eps,
        )
        self._logits = torch.empty(0, shape.vocab)
        cos, sin = (self._floats(table) for table in (table.cos, table.sin))
        self._kept_alive += [layers, head, sizes]
        self._decoder = library.native_decoder(
            ctypes.byref(sizes),
            self._floats(weights.embedding),
            cos,
            sin,
            self._floats(weights.final_norm),
            layers,
            ctypes.byref(head),
        )

    def __del__(self) -> None:
        if decoder := getattr(self, "_decoder", None):
            self._library.native_free(decoder)

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        self._cache[:, :, list(blocks)] = 0

    def execute(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        # The logits' memory is reused, because allocating it in every step takes longer than computing the logits.
        ids: list[int] = []
        rope_rows: list[int] = []
        keep: list[int] = []
        tables: list[numpy.ndarray] = []
        spans = (native.Span * len(chunks))()
        for index, chunk in enumerate(chunks):
            sequence = chunk.sequence
            table = numpy.array(sequence.block_table, numpy.int32)
            tables.append(table)
            spans[index] = native.Span(table.ctypes.data, len(ids), chunk.length, chunk.start)
            ids += chunk.token_ids
            positions = range(chunk.start, chunk.start + chunk.length)
            rope_rows += [self._table.row(sequence.length_class, position) for position in positions]
            keep += range(len(ids) - chunk.num_logits, len(ids))
        if len(keep) > len(self._logits):
            self._logits = torch.empty(len(keep), self.vocab_size)
        logits = self._logits[: len(keep)]
        arrays = [numpy.array(values, numpy.int32) for values in (ids, rope_rows, keep)]
        step = native.Step(
            ids=arrays[0].ctypes.data,
            rope_rows=arrays[1].ctypes.data,
            spans=ctypes.addressof(spans),
            keep=arrays[2].ctypes.data,
            logits=logits.data_ptr(),
            rows=len(ids),
            num_spans=len(chunks),
            kept=len(keep),
            threads=self._threads if _is_heavy(chunks) else -(-self._threads // 2),
        )
        self._library.native_run(self._decoder, ctypes.byref(step))
        return logits

    def _floats(self, tensor: torch.Tensor | None) -> int | None:
        """The address of a tensor's float32 values, which stay alive with this object."""
        if tensor is None:
            return None
        held = tensor.detach().float().contiguous()
        self._kept_alive.append(held)
        return held.data_ptr()

    def _matrix(self, weight: torch.Tensor | Int8Weight, bias: torch.Tensor | None) -> native.Matrix:
        assert isinstance(weight, Int8Weight)
        out, in_ = weight.shape
        values = weight.values.contiguous()
        panels = self._arena.ctypes.data + self._arena_used
        self._arena_used += self._space(out, in_)
        self._library.native_pack(values.data_ptr(), out, in_, panels)
        return native.Matrix(panels, self._floats(weight.scales), self._floats(bias), out, in_)

    def _space(self, out: int, in_: int) -> int:
        """Bytes of a packed matrix, in whole cache lines."""
        return -(-self._library.native_packed_size(out, in_) // 64) * 64

    def _packed_bytes(self, weights: LlamaWeights) -> int:
        padding = 4 * self._library.native_lanes()
        total = self._space(*weights.head.shape)
        for layer in weights.layers:
            for weight in (layer.qkv, layer.output, layer.gate_up, layer.down):
                total += self._space(weight.shape[0] + padding, weight.shape[1])
        return total

    def _interleave(self, gate_up: torch.Tensor | Int8Weight) -> Int8Weight:
        """Interleave panels of the gate and the up matrix, so that one tile of the product has matching panels."""
        assert isinstance(gate_up, Int8Weight)
        lanes = self._library.native_lanes()
        inner = gate_up.shape[0] // 2
        padded = -(-inner // lanes) * lanes

        def arrange(tensor: torch.Tensor) -> torch.Tensor:
            parts = tensor.unflatten(0, (2, inner))
            if padded != inner:
                parts = torch.cat([parts, parts.new_zeros(2, padded - inner, *parts.shape[2:])], dim=1)
            return parts.unflatten(1, (-1, lanes)).transpose(0, 1).flatten(0, 2)

        return Int8Weight(arrange(gate_up.values), arrange(gate_up.scales))


def _is_heavy(chunks: Sequence[Chunk]) -> bool:
    """Whether a step has enough work for all threads."""
    work = 0
    for chunk in chunks:
        work += (chunk.length + _READING_WORK) * chunk.start
        if chunk.length - len(chunk.draft) > 1:
            work += chunk.length * _PROMPT_TOKEN_WORK
    return work >= _HEAVY_WORK


def huge_pages(size: int) -> numpy.ndarray:
    """Allocate `size` bytes of zeros, in pages of 2 MiB if the system has them: every step reads all weights in order.

    A page takes no memory before its first use.
    """
    memory = mmap.mmap(-1, size + _HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    array = numpy.frombuffer(memory, numpy.uint8)
    return array[-array.ctypes.data % _HUGE_PAGE :][:size]
