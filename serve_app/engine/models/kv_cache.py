"""The tensors of the paged KV cache; `scheduling.blocks` allocates the blocks.

Paging as in PagedAttention (arXiv 2309.06180): a sequence's keys and values are in blocks of `block_size` tokens that
need not be adjacent. So no memory is reserved for the longest possible reply.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy
import torch

from serve_app.engine.config import EngineSettings
from serve_app.engine.errors import ModelError


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape and device of the K and V that one attention layer stores per token."""

    key: tuple[int, int]  # heads, size of a head
    value: tuple[int, int]
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        return (self.key[0] * self.key[1] + self.value[0] * self.value[1]) * self.dtype.itemsize


class KVCache:
    """K and V tensors of every layer, each on its layer's device, shape (blocks, block_size, heads, head size)."""

    def __init__(self, layers: Mapping[int, LayerShape], num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {
            index: (
                _zeros((num_blocks, block_size, *shape.key), shape),
                _zeros((num_blocks, block_size, *shape.value), shape),
            )
            for index, shape in layers.items()
        }

    @classmethod
    def within(cls, settings: EngineSettings, layers: Mapping[int, LayerShape], max_context: int) -> KVCache:
        """The cache that `settings.kv_cache_memory` allows.

        Raises:
            ModelError: the setting is below one block, or there is too little memory.
        """
        size = settings.block_size
        num_blocks = blocks_within(settings, size * sum(s.bytes_per_token for s in layers.values()), max_context)
        try:
            return cls(layers, num_blocks, size)
        except (RuntimeError, MemoryError) as error:
            raise ModelError(
                f"No memory for a KV cache of {settings.kv_cache_bytes:,} bytes: lower kv_cache_memory."
            ) from error

    def clear(self, blocks: Sequence[int]) -> None:
        for tensors in self.layers.values():
            for tensor in tensors:
                tensor[list(blocks)] = 0


def blocks_within(settings: EngineSettings, block_bytes: int, max_context: int) -> int:
    """Number of blocks that `kv_cache_memory` allows, but at most as many as `max_running` full contexts need.

    `block_bytes` is the size of a block over all layers.

    Raises:
        ModelError: the setting is below one block.
    """
    useful = settings.max_running * -(-max_context // settings.block_size)
    num_blocks = min(settings.kv_cache_bytes // block_bytes, useful)
    if num_blocks < 1:
        raise ModelError(f"kv_cache_memory of {settings.kv_cache_bytes:,} bytes is below one block: raise it.")
    return num_blocks


def _zeros(size: tuple[int, ...], shape: LayerShape) -> torch.Tensor:
    """Tensor of zeros, because attention multiplies masked values by 0, and uninitialised memory may hold NaN.

    On the CPU, numpy allocates the tensor, and the system fills its pages on first use. So a cache of 2 GiB takes no
    time and no memory until it is used.
    """
    if shape.device.type != "cpu":
        return torch.zeros(size, dtype=shape.dtype, device=shape.device)
    bytes_ = math.prod(size) * shape.dtype.itemsize
    return torch.from_numpy(numpy.zeros(bytes_, dtype=numpy.uint8)).view(shape.dtype).view(size)
