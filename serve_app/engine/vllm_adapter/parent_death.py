"""Kills a child process when its parent ends for any reason."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Make the kernel kill this process, a child of `multiprocessing`, when the thread that started it ends.

    This also works if this process is stopped or waits for a GPU. Has an effect only on Linux.
    """
    parent = multiprocessing.parent_process()
    if sys.platform != "linux" or parent is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # the parent ended before `prctl` was called
        os.kill(os.getpid(), signal.SIGKILL)
