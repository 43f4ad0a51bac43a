"""A file that appears under its name only when it is complete."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from serve_app.cli.output import CommandError
from serve_app.storage.spool_file import flush_folder


@contextlib.contextmanager
def complete_file(path: Path, mode: str, **form: Any) -> Iterator[IO[Any]]:
    """Opens a new file as `open` does. Only its owner can read it.

    Writes a draft next to `path`, flushes it to disk, then moves it to `path`. Until then, an existing file at `path`
    stays. Deletes the draft after an error or a signal. Raises CommandError.
    """
    if path.is_dir():
        raise CommandError(f"{path} is a folder: name a file in it", code="output")
    with interruptible():
        try:
            descriptor, draft = tempfile.mkstemp(prefix=f".{path.name[:100]}-", suffix=".part", dir=path.parent)
        except OSError as error:
            raise _write_error(path, error) from None
        try:
            with os.fdopen(descriptor, mode, **form) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
            flush_folder(path.parent)
        except BaseException as error:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)
            if isinstance(error, OSError):
                raise _write_error(path, error) from None
            raise


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Makes Ctrl-C and SIGTERM raise KeyboardInterrupt. Otherwise they would end the process before it cleans up."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    # A signal that is ignored (under nohup, or in a background job) stays ignored.
    previous = {number: signal.getsignal(number) for number in numbers}
    changed = {number: handler for number, handler in previous.items() if handler not in (signal.SIG_IGN, None)}
    for number in changed:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in changed.items():
            signal.signal(number, handler)


def _write_error(path: Path, error: OSError) -> CommandError:
    return CommandError(f"can't write {path}: {error.strerror or error}", code="output")
