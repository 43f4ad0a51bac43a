"""Checks the chain of timeouts: each part must allow a longer reply than the part before it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.settings import GatewaySettings, IdentifierSettings

SLOWEST = 10  # tokens per second; the timeouts may cut off slower replies
MODEL_STOPS_S = 600.0  # default `graceful_shutdown_timeout_s` of model replicas; GATEWAY_STOPS_S is that of gateways
GATEWAY_STOPS_S = 660.0
STOPS = "graceful_shutdown_timeout_s"
# Environment variables of the nodes, and Ray's defaults for them.
HARD_STOP, RAY_HARD_STOP_S = "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S", 120.0
DRAIN, RAY_DRAIN_S = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", 30.0


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the chain, and the maximum duration of a reply that it allows."""

    name: str
    seconds: float


def longest_reply_s(user_config: Mapping[str, Any]) -> float:
    """Returns the maximum duration of a reply: the longest wait in the queue, then the longest output at `SLOWEST`.

    Both come from the gateway's `user_config`.
    """
    waits = user_config.get("queue_timeout_s", GatewaySettings.model_fields["queue_timeout_s"].default)
    default = IdentifierSettings.model_fields["max_output"].default
    outputs = [one.get("max_output", default) for one in (user_config.get("models") or {}).values()]
    return float(waits) + max(outputs, default=default) / SLOWEST


def chain_problems(chain: Sequence[Sequence[Part]]) -> Iterator[str]:
    """Yields one line for each part whose time is too short. The first link of `chain` is the longest reply.

    A link has the parts that apply in parallel. An empty link is skipped, because its values are unknown.
    """
    earlier: Part | None = None
    for link in chain:
        for part in link:
            if earlier is not None and part.seconds <= earlier.seconds:
                yield (
                    f"{part.name} is {part.seconds:g} s, not longer than {earlier.name} ({earlier.seconds:g} s): "
                    f"raise it to {math.floor(earlier.seconds) + 1} s or more"
                )
        earlier = max(link, key=lambda part: part.seconds, default=earlier)
