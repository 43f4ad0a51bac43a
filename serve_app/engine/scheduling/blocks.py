"""Which KV blocks are whose, and which hold a known prefix that another sequence can take over. Pure Python.

Automatic prefix reuse as in vLLM and SGLang's RadixAttention (arXiv 2312.07104): a full block has a key that names its
content and everything before it (see `prefix`). Blocks keep their content after their sequences have ended, and are
taken for something else only when no other block is free: least recently used first, and never a block before those
that continue it, since they can't be found without it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq


class OutOfBlocks(Exception):
    """Fewer blocks are free than were asked for; nothing was allocated."""


class BlockAllocator:
    """Blocks 0 .. `num_blocks` - 1 with reference counts, and an index of those whose content is known.

    A block is in use (somebody holds a reference), cached (nobody does, but its content can be found) or empty. Two
    blocks of the index never have the same key, and whoever holds a block of the index holds all those before it: that
    makes the order in which references are dropped the order of eviction. Every operation is O(blocks named).
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1:
            raise ValueError("a KV cache needs at least one block")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # in the order of eviction
        self._references = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        self._suspects: set[int] = set()
        self._to_clear: list[int] = []

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds but whose content can still be found."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that some sequence holds; one that several hold counts once."""
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one reference; cached ones lose their content.

        Raises:
            OutOfBlocks: fewer are free.
        """
        if count > self.num_free:
            raise OutOfBlocks
        taken = [self._empty.pop() if self._empty else self._evict() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        if self._suspects:
            self._to_clear += self._suspects.intersection(taken)
            self._suspects.difference_update(taken)
        return taken

    def suspect(self, blocks: Iterable[int]) -> None:
        """Note that blocks may hold NaN: before they hold anything else they have to be cleared."""
        self._suspects.update(blocks)

    def take_uncleared(self) -> tuple[int, ...]:
        """The suspect blocks that were allocated since the last call, for the caller to clear before they are used."""
        uncleared, self._to_clear = tuple(self._to_clear), []
        return uncleared

    def freed_by(self, table: Iterable[int]) -> int:
        """How many blocks become free when one holder of `table` lets go of it."""
        return sum(self._references[block] == 1 for block in table)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest run of `keys`, from the first, that the index knows. Takes no reference."""
        found: list[int] = []
        for key in keys:
            block = self._index.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_in_use(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` somebody holds: to share these takes nothing from `num_free`."""
        return sum(self._references[block] > 0 for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks that are in use or cached.

        Raises:
            ValueError: a block is empty.
        """
        for block in blocks:
            if self._references[block] == 0:
                if block not in self._cached:
                    raise ValueError(f"block {block} is free")
                del self._cached[block]
            self._references[block] += 1

    def publish(self, table: Seq[int], index: int, key: bytes) -> int:
        """Let others find `table[index]`, a block of a running sequence whose tokens have all been computed.

        Returns the block to use in its place: itself, or one published before with the same content, which takes over
        its reference. A block is not published where the one before it was not, because nobody could find it.
        """
        block = table[index]
        if index and self._keys[table[index - 1]] is None:
            return block
        same = self._index.get(key)
        if same is None:
            self._index[key] = block
            self._keys[block] = key
            return block
        self.share([same])
        self.release([block])
        return same

    def release(self, blocks: Seq[int]) -> None:
        """Drop a reference to each block of a sequence, in the sequence's order.

        Raises:
            ValueError: nobody holds a block.
        """
        for block in reversed(blocks):  # the last is evicted first: without those before it nobody can use it
            if self._references[block] == 0:
                raise ValueError(f"block {block} is already free")
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._keys[block] is None:
                self._empty.append(block)
            else:
                self._cached[block] = None

    def forget(self) -> None:
        """Make all contents impossible to find; blocks in use stay so, and nothing that continues them is published."""
        self._empty += self._cached
        self._cached.clear()
        self._index.clear()
        self._keys = [None] * self.num_blocks

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        key = self._keys[block]
        assert key is not None
        del self._index[key]
        self._keys[block] = None
        return block
