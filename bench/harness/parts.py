"""Measures processor time by part of the service, such as gateway or HAProxy. Each process belongs to one part."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence

import psutil

from bench.harness.processes import Tree

REST = "Ray's own"  # controller, raylet, its stores and agents, idle workers
_REPLICA = re.compile(r"ray::ServeReplica:[^:]+:(\w[\w-]*)")


def part_of(name: str, command: Sequence[str]) -> str:
    """Returns the part to which a process with this name and command line belongs."""
    if replica := _REPLICA.match(command[0] if command else ""):
        return replica[1]
    if "haproxy" in name:
        return "HAProxy"
    if any(part in " ".join(command) for part in ("ray", "deployments.run", "serve_app.launch")):
        return REST
    return name


def cpu_by_part(tree: Tree) -> dict[str, float]:
    """Processor seconds used so far by the processes that run now, added up by part."""
    found: dict[str, float] = {}
    for process in tree.processes():
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            part = part_of(process.name(), process.cmdline())
            found[part] = found.get(part, 0.0) + times.user + times.system
    return found


def spent(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Processor seconds between two readings. A part whose sum fell because a process ended counts as 0."""
    return {part: max(0.0, seconds - before.get(part, 0.0)) for part, seconds in after.items()}


def per_request_ms(seconds: dict[str, float], requests: int) -> dict[str, float]:
    """Processor milliseconds per request, by part."""
    return {part: 1000 * value / requests for part, value in seconds.items()} if requests else {}


def largest(parts: Iterable[dict[str, float]]) -> list[str]:
    """Returns all parts, sorted by their highest values, largest first."""
    most: dict[str, float] = {}
    for one in parts:
        for part, value in one.items():
            most[part] = max(value, most.get(part, 0.0))
    return sorted(most, key=lambda part: -most[part])
