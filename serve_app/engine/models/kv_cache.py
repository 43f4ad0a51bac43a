"""The tensors of the paged KV cache; `blocks` says which blocks are whose.

Paging as in PagedAttention (arXiv 2309.06180): a sequence's keys and values lie in blocks of `block_size` tokens
that need not be neighbours, so no memory is lost to the longest possible reply.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from serve_app.engine.errors import ModelError

if TYPE_CHECKING:
    import torch

    from serve_app.engine.config import EngineSettings


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer stores per token, and where: found by the runner's probe of the model."""

    key: tuple[int, int]  # heads, size of a head
    value: tuple[int, int]
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token."""
        return (self.key[0] * self.key[1] + self.value[0] * self.value[1]) * self.dtype.itemsize


class KVCache:
    """K and V tensors of every layer, each on its layer's device, shape (blocks, block_size, heads, head size).

    `spare` blocks lie behind the `num_blocks` that the allocator hands out: padding can be written there.
    """

    def __init__(self, layers: Mapping[int, LayerShape], num_blocks: int, block_size: int, *, spare: int = 0) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {
            index: (
                _zeros((num_blocks + spare, block_size, *shape.key), shape),
                _zeros((num_blocks + spare, block_size, *shape.value), shape),
            )
            for index, shape in layers.items()
        }

    @classmethod
    def within(
        cls, settings: EngineSettings, layers: Mapping[int, LayerShape], max_context: int, *, spare: int = 0
    ) -> KVCache:
        """The cache that `settings.kv_cache_memory` allows, and no larger than `max_running` full contexts.

        Raises:
            ModelError: the setting is below one block, or the memory is not there.
        """
        size = settings.block_size
        # A context's worth is all that one sequence can use, but every running one may need a block of its own.
        useful = settings.max_running * -(-max_context // size)
        num_blocks = min(cls.blocks_within(settings.kv_cache_memory, layers, size) - spare, useful)
        if num_blocks < 1:
            raise ModelError(f"kv_cache_memory of {settings.kv_cache_memory:,} bytes is below one block: raise it.")
        try:
            return cls(layers, num_blocks, size, spare=spare)
        except (RuntimeError, MemoryError) as error:
            raise ModelError(f"No memory for a KV cache of {settings.kv_cache_memory:,} bytes: lower it.") from error

    def clear(self, blocks: Sequence[int]) -> None:
        """Overwrite blocks with zeros in every layer."""
        for tensors in self.layers.values():
            for tensor in tensors:
                tensor[list(blocks)] = 0

    @staticmethod
    def blocks_within(memory: int, layers: Mapping[int, LayerShape], block_size: int) -> int:
        """Blocks that fit into `memory` bytes, over all layers and devices."""
        return memory // (block_size * sum(shape.bytes_per_token for shape in layers.values()))


def _zeros(size: tuple[int, ...], shape: LayerShape) -> torch.Tensor:
    """Zeros, because attention multiplies what it masks by 0 and must not meet a NaN in memory that was never written.

    On the CPU they come from numpy, whose zeros are pages that the system fills when they are first touched: a cache of
    2 GiB takes no time and no memory until it is used.
    """
    import numpy
    import torch

    if shape.device.type != "cpu":
        return torch.zeros(size, dtype=shape.dtype, device=shape.device)
    bytes_ = math.prod(size) * shape.dtype.itemsize
    return torch.from_numpy(numpy.zeros(bytes_, dtype=numpy.uint8)).view(shape.dtype).view(size)
