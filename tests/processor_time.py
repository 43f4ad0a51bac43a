"""Bounds on processor time, to tell work that grows in proportion to its input from work that grows faster.

They hold on a slow host too. Speed is measured in `bench/`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Fails if the body takes more processor time of this thread, whether or not it raises.

    The bound is several times what the body needs. The input is so large that work which grows with its square takes
    longer.
    """
    gc.freeze()  # else the collector walks what earlier tests have left, for seconds late in a session
    began = time.thread_time()
    try:
        yield
    finally:
        took = time.thread_time() - began
        gc.unfreeze()
        assert took < seconds, f"{took:.2f} s of processor time, and {seconds:g} are allowed"
