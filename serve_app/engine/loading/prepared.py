"""The folder of things that are prepared once from a model's files: where it is, what a thing is called, who makes it.

Free of torch, so that a launcher can ask cheaply whether something is ready.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from serve_app.engine.loading.progress import Say


def cache_dir(setting: str | None = None) -> Path:
    """The setting, else `cache` in SERVE_APP_HOME, else `serve-app` in the user's cache folder (XDG). May not exist."""
    if setting is not None:
        return Path(setting).expanduser().absolute()
    if home := os.environ.get("SERVE_APP_HOME"):
        return Path(home).expanduser().absolute() / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "serve-app"


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in the cache for what is made from one model; another version of the model has another place."""

    folder: Path
    stem: str  # the same for all versions of one model
    identity: str  # hexadecimal: of this version of its files
    suffix: str

    @classmethod
    def of(cls, folder: Path, name: str, identity: str, suffix: str) -> Slot:
        """For the model called `name` (its path, or its name on the hub), whose files are described by `identity`."""
        readable = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(name).name).strip(".-")[:60] or "model"
        return cls(folder, f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}", identity, suffix)

    @property
    def path(self) -> Path:
        """Where it lies once it is made."""
        return self.folder / f"{self.stem}-{self.identity[:16]}{self.suffix}"

    @property
    def lock(self) -> Path:
        """The file that whoever makes it holds a lock on."""
        return self.folder / f".{self.stem}{self.suffix}.lock"

    def outdated(self) -> list[Path]:
        """What was made from earlier versions of the model's files."""
        versions = self.folder.glob(f"{self.stem}-{'[0-9a-f]' * 16}{self.suffix}")
        return sorted(path for path in versions if path != self.path)


def identity_of(paths: Iterable[Path], extra: str = "") -> str:
    """A digest of the files' names, sizes and times of change, and of the whole content of small JSON files.

    Raises:
        OSError: a file is missing.
    """
    digest = hashlib.sha256(extra.encode())
    for path in sorted(paths):
        if path.suffix == ".json":
            digest.update(f"\n{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}".encode())
        else:
            about = path.stat()
            digest.update(f"\n{path.name} {about.st_size} {about.st_mtime_ns}".encode())
    return digest.hexdigest()


def make_folder(folder: Path) -> Path:
    """Create the folder, readable by its owner alone, as its parents where they are missing too; return it.

    Raises:
        OSError: it can't be created or written.
    """
    for each in (*reversed(folder.parents), folder):
        if not each.exists():
            each.mkdir(mode=0o700, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(13, "Permission denied", str(folder))
    return folder


@contextlib.contextmanager
def only_one(path: Path, say: Say, what: str) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the system drops it with the process, so no stale lock stays behind.

    While another process or thread holds it, `say` hears that it is preparing `what`, and this waits.

    Raises:
        OSError: the file can't be created, or its file system has no locks.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"Another process is preparing {what}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def own_folder(parent: Path) -> Iterator[Path]:
    """A new folder below `parent` for this process alone, in use until the process ends; removed here if still empty.

    Those that ended processes have left are removed: their locks are free.

    Raises:
        OSError: it can't be created.
    """
    make_folder(parent)
    for left_over in parent.glob("process-*"):
        with contextlib.suppress(OSError), (left_over / ".lock").open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left_over, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix="process-", dir=parent))
    lock = (folder / ".lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield folder
    finally:
        if [path.name for path in folder.iterdir()] == [".lock"]:
            lock.close()
            shutil.rmtree(folder, ignore_errors=True)
        else:
            _held.append(lock)


_held: list[IO[str]] = []  # locks of `own_folder` that last as long as the process


def bytes_in(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
