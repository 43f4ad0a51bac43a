"""Allocates KV blocks and indexes known prefixes that other sequences can reuse. Pure Python.

Automatic prefix reuse as in vLLM and SGLang's RadixAttention (arXiv 2312.07104): a full block has a key that identifies
its content and everything before it. Blocks keep their content after their sequences have ended. A block is evicted
only if no block is empty: least recently used first, and never before the blocks that follow it in a chain,
because those are found only through it.

K and V of a token depend on all tokens before it and on its rotary frequencies. So a block's key is the hash of the
previous key and the block's tokens. The chain starts from the sequence's length class (see `rope`) and its tenant. K
and V do not depend on the tenant, but a faster reply, or a prompt billed as cached, would tell one account what another
has sent. Within an account, everything is shared. Keys are 256 bits of BLAKE2b. Not even an attacker can find two
contents with the same key, so a hit needs no comparison of tokens.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

_KEY_BYTES = 32


def root_key(tenant: str, length_class: int) -> bytes:
    """The start of the key chain for a tenant's sequences of one length class."""
    return blake2b(f"{length_class}:{tenant}".encode(errors="surrogatepass"), digest_size=_KEY_BYTES).digest()


def extend_chain(chain: list[bytes], tokens: Sequence[int], block_size: int, num_blocks: int) -> None:
    """Append keys to `chain` until it has the keys of the first `num_blocks` blocks of `tokens`.

    `chain` holds the root, then a key per block.
    """
    done = len(chain) - 1
    packed = array("I", tokens[done * block_size : num_blocks * block_size])
    for begin in range(0, len(packed), block_size):
        content = packed[begin : begin + block_size].tobytes()
        chain.append(blake2b(chain[-1] + content, digest_size=_KEY_BYTES).digest())


class OutOfBlocks(Exception):
    """Fewer blocks are free than requested; nothing was allocated."""


class BlockAllocator:
    """Blocks 0 .. `num_blocks` - 1 with reference counts, and an index of the blocks whose content is known.

    A block is in use (it has a reference), cached (no reference, but its content can be found) or empty.

    Invariants: no two indexed blocks have the same key; a holder of an indexed block also holds all blocks before it.
    Blocks are evicted in the order in which their last references were dropped, and `free` begins with a sequence's
    last block. So no block is evicted before the blocks that follow it. Every operation except `forget` is linear in
    the blocks passed.
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
        self._roots = [b""] * num_blocks  # start of the chain of each indexed block's key
        self._index: dict[bytes, int] = {}
        self._suspects: set[int] = set()
        self._to_clear: list[int] = []

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated now, including cached blocks."""
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Number of blocks in use; a shared block counts once."""
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Return `count` free blocks, each with one reference; cached blocks lose their content.

        Raises:
            OutOfBlocks: fewer than `count` blocks are free.
        """
        if count > self.num_free:
            raise OutOfBlocks
        blocks = [self._empty.pop() if self._empty else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        if self._suspects:
            self._to_clear += self._suspects.intersection(blocks)
            self._suspects.difference_update(blocks)
        return blocks

    def suspect(self, blocks: Iterable[int]) -> None:
        """Record that blocks may hold NaN and so must be cleared before their next use."""
        self._suspects.update(blocks)

    def pop_uncleared(self) -> tuple[int, ...]:
        """Return the suspect blocks allocated since the last call; the caller clears them before it uses them."""
        uncleared, self._to_clear = tuple(self._to_clear), []
        return uncleared

    def freed_by(self, table: Iterable[int]) -> int:
        """Number of blocks that become free when one holder of `table` releases it."""
        return sum(self._references[block] == 1 for block in table)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest indexed run of `keys`, starting with the first key. Adds no reference."""
        blocks: list[int] = []
        for key in keys:
            block = self._index.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_in_use(self, blocks: Iterable[int]) -> int:
        """Number of `blocks` that are in use; sharing them does not reduce `num_free`."""
        return sum(self._references[block] > 0 for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks that are in use or cached.

        Raises:
            ValueError: a block is empty.
        """
        for block in blocks:
            if self._references[block] == 0:
                if block not in self._cached:
                    raise ValueError(f"block {block} is empty")
                del self._cached[block]
            self._references[block] += 1

    def publish(self, table: Sequence[int], index: int, key: bytes, root: bytes) -> int:
        """Add `table[index]`, a fully computed block of a running sequence, to the index. `root` starts its key chain.

        Returns the block to use in its place: the block itself, or an indexed block with the same content, which takes
        over the reference. A block whose predecessor is not indexed is not indexed either, because it could not be
        found. A key that the block already has is replaced.
        """
        block = table[index]
        if index and self._keys[table[index - 1]] is None:
            return block
        old = self._keys[block]
        if old is not None:
            del self._index[old]
            self._keys[block] = None
        same = self._index.get(key)
        if same is None:
            self._index[key] = block
            self._keys[block], self._roots[block] = key, root
            return block
        self.share([same])
        self.free([block])
        return same

    def withdraw(self, blocks: Sequence[int]) -> None:
        """Remove a running sequence's blocks from the index, last block first, up to the first shared block."""
        for block in reversed(blocks):
            if self._references[block] > 1:
                return
            key, self._keys[block] = self._keys[block], None
            if key is not None:
                del self._index[key]

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each of a sequence's `blocks`, which are in the sequence's order.

        Raises:
            ValueError: a block has no reference.
        """
        for block in reversed(blocks):  # the last block is evicted first, because it is found only through the others
            if self._references[block] == 0:
                raise ValueError(f"block {block} is already free")
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._keys[block] is None:
                self._empty.append(block)
            else:
                self._cached[block] = None

    def forget(self, root: bytes) -> None:
        """Remove the blocks of all chains from `root` from the index.

        Blocks in use stay in use, and later blocks of their sequences are not indexed.
        """
        for key, block in list(self._index.items()):
            if self._roots[block] == root:
                del self._index[key]
                self._keys[block] = None
                if not self._references[block]:
                    del self._cached[block]
                    self._empty.append(block)

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        key = self._keys[block]
        assert key is not None
        del self._index[key]
        self._keys[block] = None
        return block
