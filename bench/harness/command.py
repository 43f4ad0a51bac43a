"""Common parts of the benchmarks' commands: reporting progress, and ending with the right exit status."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from serve_app.launch.driver import become_subreaper

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".bench"  # installed programs to compare with (peers), and the logs and state of a run

Result = TypeVar("Result")


def say(text: str) -> None:
    """Reports progress on standard error, because standard output is only for results."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def completed(measure: Callable[[], Result], failures: tuple[type[Exception], ...]) -> Result:
    """Returns the result of `measure`.

    Raises:
        SystemExit: with 1 after one of `failures`, with 130 after Ctrl-C or SIGTERM.
    """
    become_subreaper()  # so that children that outlive a server can be ended
    try:
        with interrupted_by_sigterm():
            return measure()
    except KeyboardInterrupt:
        say("interrupted; everything that was started has ended")
        raise SystemExit(130) from None
    except failures as error:
        say(str(error))
        raise SystemExit(1) from None


@contextlib.contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Makes SIGTERM raise KeyboardInterrupt, so that cleanup code ends everything that was started."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
