"""Prints on standard error what a command is doing, once it has taken two seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

PATIENCE_S = 2.0  # a faster command prints no progress
TERMINAL_S = 0.5  # seconds between two updates on a terminal
LOG_S = 10.0


class Progress:
    """Prints periodically what a command is doing: on a terminal in one line that changes, otherwise in new lines.

    On a terminal, `start` keeps the seconds in the line current, even during a long call. With `quiet`, only `log`
    prints: a command with `-o json` prints a failure as JSON on standard error, and progress must not mix with it.
    """

    def __init__(
        self, stream: TextIO | None = None, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._on_terminal = self._stream.isatty()
        self._quiet = quiet
        self._began = clock()
        self._next = self._began + PATIENCE_S
        self._text = "working"
        self._shown = False
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def start(self) -> None:
        """Starts a thread that updates the line. Does nothing without a terminal."""
        if self._on_terminal and not self._quiet:
            threading.Thread(target=self._tick, daemon=True).start()

    def say(self, text: str) -> None:
        """Sets what the command is doing, and prints it if an update is due."""
        with self._lock:
            self._text = text
            self._print_if_due()

    def step(self, text: str) -> None:
        """Prints a step immediately, unless `quiet` is set."""
        if not self._quiet:
            self.log(f"{text} …")

    def log(self, text: str) -> None:
        """Prints a permanent line immediately, even if `quiet` is set."""
        with self._lock:
            self._erase()
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def end(self) -> None:
        """Removes the line and stops updating it. Commands call this before they print their results."""
        self._ended.set()
        with self._lock:
            self._erase()

    def _tick(self) -> None:
        while not self._ended.wait(TERMINAL_S):
            with self._lock:
                self._print_if_due()

    def _print_if_due(self) -> None:
        now = self._clock()
        if self._quiet or self._ended.is_set() or now < self._next:
            return
        self._next = now + (TERMINAL_S if self._on_terminal else LOG_S)
        line = f"{self._text} … {now - self._began:.0f} s"
        self._stream.write(f"\r\x1b[K{line}" if self._on_terminal else f"{line}\n")
        self._stream.flush()
        self._shown = self._on_terminal

    def _erase(self) -> None:
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._shown = False
