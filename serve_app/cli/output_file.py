"""A file that is there complete or not at all: written beside its place, flushed to disk, then moved into it."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from serve_app.cli.errors import CommandError


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """A new text file in UTF-8, readable by its owner alone; what leaves in any way but its end leaves nothing behind.

    An older file of that name stays as it is until then. Raises CommandError.
    """
    if path.is_dir():
        raise CommandError(f"{path} is a folder: name a file in it", code="output")
    with _interruptible():
        try:
            descriptor, draft = tempfile.mkstemp(prefix=f".{path.name[:100]}-", suffix=".part", dir=path.parent)
        except OSError as error:
            raise _failed(path, error) from None
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        except BaseException as error:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)
            if isinstance(error, OSError):
                raise _failed(path, error) from None
            raise


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C and SIGTERM raise KeyboardInterrupt: the command line lets them end the process, which removes nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    # What is ignored (nohup, a job in the background) stays so.
    kept = {number: signal.getsignal(number) for number in numbers}
    changed = {number: handler for number, handler in kept.items() if handler not in (signal.SIG_IGN, None)}
    for number in changed:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in changed.items():
            signal.signal(number, handler)


def _failed(path: Path, error: OSError) -> CommandError:
    return CommandError(f"can't write {path}: {error.strerror or error}", code="output")
