"""Tunes Python's garbage collector, so that it does not interrupt streams."""

from __future__ import annotations

import gc


def spare_lasting_objects() -> None:
    """Excludes the existing objects from later scans.

    Call this when the process has started: objects that exist then live until it ends.
    """
    gc.collect()
    gc.freeze()


def collect_in_short_pauses() -> None:
    """Scans new objects less often than by default, but often enough that a pass stays short.

    A gateway with 512 streams would otherwise spend a seventh of its time on scans. With a
    higher first or second threshold, single passes take longer: collecting the tracebacks of 512 hang-ups took 1.2 s.
    """
    gc.set_threshold(10_000, 5, 50)
