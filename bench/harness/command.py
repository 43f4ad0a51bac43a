"""Common parts of the benchmarks' commands: they report progress and always end what they started."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from serve_app.launch.driver import become_subreaper

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".bench"  # programs to compare with, and the logs and state of a run

Result = TypeVar("Result")


def say(text: str) -> None:
    """Reports progress; standard output is for the tables alone."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def completed(measure: Callable[[], Result], failures: tuple[type[Exception], ...]) -> Result:
    """Returns the result of `measure`.

    Raises:
        SystemExit: with 1 after one of `failures`, with 130 after Ctrl-C or SIGTERM.
    """
    become_subreaper()  # a server's children that outlive it are ended too
    try:
        with interrupted_by_sigterm():
            return measure()
    except KeyboardInterrupt:
        say("stopped; all that was started has ended")
        raise SystemExit(130) from None
    except failures as error:
        say(str(error))
        raise SystemExit(1) from None


@contextlib.contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, so that everything that was started is ended."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
