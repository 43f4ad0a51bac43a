"""Cache of prepared (converted or quantized) model files: location, file names and locks.

Does not import torch, so a launcher can cheaply check whether a model is prepared.
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

from serve_app.engine.config import EngineSettings
from serve_app.engine.errors import ModelError
from serve_app.engine.loading.checkpoint import identity_files
from serve_app.engine.loading.progress import Say

# Format of the int8 weights file. The version rises when the layout or the rounding of weights changes.
INT8_FORMAT = "serve-app int8 weights, version 1"


def cache_dir(setting: str | None = None) -> Path:
    """The setting, else `cache` in SERVE_APP_HOME, else `serve-app` in the user's XDG cache folder. Creates nothing."""
    if setting is not None:
        return Path(setting).expanduser().absolute()
    if home := os.environ.get("SERVE_APP_HOME"):
        return Path(home).expanduser().absolute() / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "serve-app"


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in the cache for a file or folder made from one version of a model's files."""

    folder: Path
    stem: str  # the same for all versions of a model
    identity: str  # hexadecimal digest of this version of the model's files
    suffix: str

    @classmethod
    def of(cls, folder: Path, name: str, identity: str, suffix: str) -> Slot:
        """Create a slot; `name` is the model's path or its name on the hub, `identity` describes its files."""
        readable = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(name).name).strip(".-")[:60] or "model"
        return cls(folder, f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}", identity, suffix)

    @property
    def path(self) -> Path:
        return self.folder / f"{self.stem}-{self.identity[:16]}{self.suffix}"

    @property
    def lock(self) -> Path:
        """The file that a process locks while it makes the slot's content."""
        return self.folder / f".{self.stem}{self.suffix}.lock"

    def outdated(self) -> list[Path]:
        """Paths made from earlier versions of the model's files."""
        versions = self.folder.glob(f"{self.stem}-{'[0-9a-f]' * 16}{self.suffix}")
        return sorted(path for path in versions if path != self.path)


def identity_of(paths: Iterable[Path], extra: str = "") -> str:
    """A digest of `extra` and of each file's name and content (JSON files) or size and modification time (other files).

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
    """Create the folder and its missing parents, readable by the owner alone; return it.

    Raises:
        OSError: it cannot be created or written.
    """
    for each in (*reversed(folder.parents), folder):
        if not each.exists():
            each.mkdir(mode=0o700, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(13, "Permission denied", str(folder))
    return folder


@contextlib.contextmanager
def only_one(path: Path, say: Say, what: str) -> Iterator[None]:
    """Hold an exclusive lock on `path`. The system releases it when the process ends, so no stale lock remains.

    While another process or thread holds the lock, this sends one line about `what` to `say` and waits.

    Raises:
        OSError: the file cannot be created, or its file system has no locks.
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
    """A new folder below `parent` for this process. At the end of the context, it is removed if it is empty.

    Otherwise, it stays locked until the process ends. Before it is created, folders that are not locked are removed:
    their processes have ended.

    Raises:
        OSError: it cannot be created.
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


_held: list[IO[str]] = []  # locks of `own_folder`, kept until the process ends


@dataclass(frozen=True, slots=True)
class Source:
    """A model's files."""

    name: str  # an absolute path, or a name on the hub: the same for all versions of the model
    folder: Path


def gguf_slot(path: Path, cache: Path) -> Slot:
    """The slot for the folder converted from a GGUF file; OSError if there is no such file."""
    path = path.absolute()
    return Slot.of(cache / "gguf", str(path), identity_of([path]), "")


def int8_slot(source: Source, cache: Path) -> Slot:
    """The slot for the model's int8 weights.

    Raises:
        ModelError: the folder has no weights.
        OSError: it has no config.json.
    """
    identity = identity_of(identity_files(source.folder), INT8_FORMAT)
    return Slot.of(cache / "int8", source.name, identity, ".safetensors")


def is_ready(settings: EngineSettings) -> bool:
    """Whether everything that `loader.prepare` makes is already there.

    Hub names, and paths without a model, count as ready: only the loader contacts the network and reports errors.
    """
    path, cache = Path(settings.model).expanduser().absolute(), cache_dir(settings.cache_dir)
    try:
        if path.is_file():
            folder = gguf_slot(path, cache).path
            if not folder.is_dir():
                return path.suffix.lower() != ".gguf"
        elif path.is_dir():
            folder = path
        else:
            return True
        return settings.dtype != "int8" or int8_slot(Source(str(path), folder), cache).path.is_file()
    except (ModelError, OSError):
        return True
