"""Identifies the requests of one conversation, and orders a backend's replicas for it.

The replica that has computed the beginning of the conversation comes first.

Gateways agree without exchanging messages: the order of replicas is a function of the conversation and of the replicas'
names (rendezvous hashing, Thaler and Ravishankar 1998). When a replica is added, only the conversations that it gets
move; when one is lost, only those that it had. A replica with far more requests than the mean is passed over
(consistent hashing with bounded loads, Mirrokni et al., arXiv 1608.01350). Computing a prompt again costs less than
waiting behind a full replica while others are idle.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import Any

MIN_BOUND = 8  # a replica with fewer requests is never passed over, because such small numbers differ by chance
BOUND = 1.25  # limit per replica, as a multiple of the mean number of requests


def conversation_key(account_id: str, messages: Sequence[Mapping[str, Any]]) -> bytes:
    """Returns a digest that all requests of a conversation share.

    It covers the account and the messages up to the first user message. The account is included because accounts do not
    share cached prompts (docs/design/engine.md, Prefix reuse), and because many accounts send the same system prompt.
    """
    before = len(list(takewhile(lambda message: message.get("role") != "user", messages)))
    return blake2b(json.dumps([account_id, *messages[: before + 1]]).encode(), digest_size=16).digest()


def replicas_for(conversation: bytes, running: Mapping[str, int]) -> list[str]:
    """Returns all replicas in the order in which to ask them. `running` has the load of each, in requests."""
    order = sorted(running, key=lambda replica: blake2b(replica.encode(), key=conversation, digest_size=8).digest())
    most = load_bound(sum(running.values()) + 1, len(running))
    return sorted(order, key=lambda replica: running[replica] >= most)  # only moves full replicas to the end


def load_bound(requests: int, replicas: int) -> int:
    """Returns the number of requests at which a replica is passed over.

    `requests` is the number of requests on all `replicas` together.
    """
    return max(MIN_BOUND, math.ceil(BOUND * requests / max(1, replicas)))
