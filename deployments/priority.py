"""Gives models priority over the other processes that share their machine's cores."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

YIELDING = 5  # niceness; the process still gets a quarter of a core that a model uses fully
# Niceness of the console, which gets 3% of such a core. With 5, chat would wait longer, and pages would not be faster.
PAGES_YIELDING = 15


def yield_to_models(niceness: int = YIELDING) -> None:
    """Lowers the priority of this process, which runs only in short bursts, so that models on this machine run first.

    Otherwise each chunk that this process sends interrupts the thread that computes the next chunk, even if another
    core is idle. On two cores this costs a quarter of the tokens per second at 16 streams.
    """
    if not hasattr(os, "setpriority"):
        return
    tasks = Path("/proc/self/task")
    # On Linux each thread has a separate niceness; elsewhere the process has one.
    for thread in [int(task.name) for task in tasks.iterdir()] if tasks.is_dir() else [0]:
        with contextlib.suppress(OSError):  # the thread has ended, or this process is not allowed to change it
            if os.getpriority(os.PRIO_PROCESS, thread) < niceness:
                os.setpriority(os.PRIO_PROCESS, thread, niceness)
