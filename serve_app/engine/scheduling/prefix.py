"""Names for the contents of KV blocks: a chain of hashes over everything that K and V depend on.

K and V of a token depend on all tokens before it and on the rope frequencies that they were rotated by. So a block's
key is the hash of the key before it and the block's own tokens, and the chain starts from the sequence's length class
(see `rope`) and its tenant.

The tenant is part of it although K and V don't depend on it: a prompt that is answered sooner, or billed as cached,
would tell one account what another has sent. Within an account everything is shared.

Keys are 256 bits of BLAKE2b, so no two contents with the same key can be found even on purpose, and a hit needs no
comparison of tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from hashlib import blake2b

_KEY_BYTES = 32


def root_key(tenant: str, length_class: int) -> bytes:
    """What a tenant's sequences of one length class start from."""
    return blake2b(f"{length_class}:{tenant}".encode(errors="surrogatepass"), digest_size=_KEY_BYTES).digest()


def extend_chain(chain: list[bytes], tokens: Seq[int], block_size: int, num_blocks: int) -> None:
    """Append the keys of blocks up to the `num_blocks`-th of `tokens`; `chain` holds the root, then a key per block."""
    done = len(chain) - 1
    packed = array("I", tokens[done * block_size : num_blocks * block_size])
    for begin in range(0, len(packed), block_size):
        content = packed[begin : begin + block_size].tobytes()
        chain.append(blake2b(chain[-1] + content, digest_size=_KEY_BYTES).digest())
