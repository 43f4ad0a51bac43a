"""The paged KV cache: which blocks are whose (pure Python) and the tensors behind them.

Paging as in PagedAttention (arXiv 2309.06180): a sequence's keys and values lie in blocks of `block_size` tokens
that need not be neighbours, so no memory is lost to the longest possible reply.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class OutOfBlocks(Exception):
    """Fewer blocks are free than were asked for; nothing was allocated."""


class BlockAllocator:
    """A free list with reference counts, so that a later prefix cache can share blocks.

    Blocks are numbered 0 .. `num_blocks` - 1. Every operation is O(number of blocks named).
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1:
            raise ValueError("a KV cache needs at least one block")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that some sequence holds."""
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one reference.

        Raises:
            OutOfBlocks: fewer are free.
        """
        if count > len(self._free):
            raise OutOfBlocks
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks that are in use."""
        for block in blocks:
            if self._references[block] == 0:
                raise ValueError(f"block {block} is free")
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop a reference to each block; those without any are free again."""
        for block in blocks:
            if self._references[block] == 0:
                raise ValueError(f"block {block} is already free")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)


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
