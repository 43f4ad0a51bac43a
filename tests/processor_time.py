"""A bound on work that separates what grows in proportion from what grows faster, on slow hosts too.

How fast something is, `bench/` measures.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Fails if the body takes more processor time of this thread.

    The bound is ten times or more what the body needs, and the input so large that a step more per step takes longer.
    """
    gc.freeze()  # else the collector walks what earlier tests have left, for seconds late in a session
    began = time.thread_time()
    try:
        yield
        took = time.thread_time() - began
    finally:
        gc.unfreeze()
    assert took < seconds, f"{took:.2f} s of processor time, and {seconds:g} are allowed"
