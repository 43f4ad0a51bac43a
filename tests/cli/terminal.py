"""A pseudo terminal in place of standard output and error."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
import tty
from collections.abc import Iterator

import pytest

ESCAPE = re.compile(r"\x1b\[[0-9;]*[a-zA-Z]")


class Terminal:
    """What a program wrote to its terminal, as bytes and as lines without colours."""

    def __init__(self) -> None:
        self.raw = ""

    @property
    def lines(self) -> list[str]:
        return ESCAPE.sub("", self.raw.replace("\r\n", "\n")).splitlines()


@contextlib.contextmanager
def terminal(patch: pytest.MonkeyPatch, columns: int = 80) -> Iterator[Terminal]:
    """Standard output and error are a terminal of so many columns. What was written is complete after the block."""
    read, written = pty.openpty()
    tty.setraw(written)
    fcntl.ioctl(written, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    patch.delenv("COLUMNS", raising=False)
    patch.setenv("TERM", "xterm-256color")
    found, parts = Terminal(), bytearray()

    def drain() -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while part := os.read(read, 65536):
                parts.extend(part)

    reader = threading.Thread(target=drain)
    reader.start()
    with open(written, "w", encoding="utf-8") as stream, patch.context() as streams:
        streams.setattr(sys, "stdout", stream)
        streams.setattr(sys, "stderr", stream)
        yield found
        stream.flush()
    reader.join(60)
    os.close(read)
    found.raw = parts.decode()
