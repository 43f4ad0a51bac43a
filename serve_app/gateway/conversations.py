"""What makes requests one conversation, and which replica of a backend gets them.

The one that has computed the beginning of the conversation.

Gateways agree without a message: the order of replicas is a function of the conversation and of their names
(rendezvous hashing, Thaler and Ravishankar 1998). A replica that is added or lost moves only the conversations that it
gets or had. A replica with far more than the mean is passed over (consistent hashing with bounded loads, Mirrokni et
al., arXiv 1608.01350): computing a prompt again costs less than waiting behind a full one while others are idle.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import Any

MIN_BOUND = 8  # requests; below it a replica is never passed over: so few differ by chance
BOUND = 1.25  # times the mean number of requests


def conversation_key(account_id: str, messages: Sequence[Mapping[str, Any]]) -> bytes:
    """A digest that the requests of a conversation share: of the account and of the messages up to the user's first.

    The account is part of it because no cached prompt is shared between two (docs/design/engine.md, Prefix reuse), and
    because many accounts send the same system prompt.
    """
    before = len(list(takewhile(lambda message: message.get("role") != "user", messages)))
    return blake2b(json.dumps([account_id, *messages[: before + 1]]).encode(), digest_size=16).digest()


def replicas_for(conversation: bytes, running: Mapping[str, int]) -> list[str]:
    """All replicas in the order in which to ask them. `running` has the number of requests that each one has."""
    order = sorted(running, key=lambda replica: blake2b(replica.encode(), key=conversation, digest_size=8).digest())
    most = load_bound(sum(running.values()) + 1, len(running))
    return sorted(order, key=lambda replica: running[replica] >= most)  # keeps the order of those that compare equal


def load_bound(requests: int, replicas: int) -> int:
    """The most requests that one of `replicas` gets of so many, while another has fewer."""
    return max(MIN_BOUND, math.ceil(BOUND * requests / max(1, replicas)))
