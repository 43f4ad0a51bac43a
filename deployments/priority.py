"""Who goes first where models share a machine's cores with the rest of the service."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

YIELDING = 5  # niceness: under full load still a quarter of a processor beside a model


def yield_to_models() -> None:
    """Lets models on this machine go first: this process, which only ever works for a moment, takes what they leave.

    Without it, each chunk that is sent interrupts the thread that computes the next one, although another core is
    idle: on two cores that cost a quarter of the tokens per second at 16 streams.
    """
    if not hasattr(os, "setpriority"):
        return
    tasks = Path("/proc/self/task")
    # On Linux each thread has a niceness of its own; elsewhere a process has one.
    for thread in [int(task.name) for task in tasks.iterdir()] if tasks.is_dir() else [0]:
        with contextlib.suppress(OSError):  # it has ended, or is nicer already
            if os.getpriority(os.PRIO_PROCESS, thread) < YIELDING:
                os.setpriority(os.PRIO_PROCESS, thread, YIELDING)
