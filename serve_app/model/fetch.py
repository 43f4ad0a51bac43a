"""Fetches models from the hub ahead of time, so that replicas find them in a cache that they share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from serve_app.engine.errors import ModelError
from serve_app.engine.loading import checkpoint, hub
from serve_app.engine.loading.progress import Say


@dataclass(frozen=True, slots=True)
class Fetched:
    """A model in the local cache, complete and not damaged."""

    model: str
    revision: str  # the commit
    folder: Path
    num_bytes: int
    fingerprint: str  # with the dtype that was asked for, on the native engine


def fetch(model: str, revision: str | None, dtype: str, say: Say) -> Fetched:
    """Downloads what is missing; what an interrupted run has downloaded is kept. `say` receives lines of progress.

    Raises:
        ModelError: as `hub.fetch` and `checkpoint.check`, and for a path.
    """
    if model == "bundled" or Path(model).expanduser().exists():
        raise ModelError(f"{model} is not on the hub: there is nothing to fetch.")
    folder = hub.fetch(model, say, revision)
    checkpoint.check(folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    return Fetched(model, folder.name, folder, size, checkpoint.fingerprint(folder, dtype))


def find(model: str, revision: str | None, dtype: str) -> str:
    """The fingerprint of a model that is on this machine: a folder, in the hub's cache, or a .gguf file, which has "".

    Raises:
        ModelError: it is not there as a whole.
    """
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"There is no file {path}.")
        return ""
    folder = path if path.exists() or model.startswith((".", "~", "/")) else hub.cached(model, revision)
    checkpoint.check(folder)
    return checkpoint.fingerprint(folder, dtype)
