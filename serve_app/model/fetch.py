"""Fetches models from the hub ahead of time, so that replicas find them in a shared cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from serve_app.engine.errors import ModelError
from serve_app.engine.loading import checkpoint, hub
from serve_app.engine.loading.progress import Say


@dataclass(frozen=True, slots=True)
class Fetched:
    """A complete, undamaged model in the local cache."""

    model: str
    revision: str  # commit on the hub
    folder: Path
    num_bytes: int
    fingerprint: str  # for the requested dtype, on the native engine


def fetch(model: str, revision: str | None, dtype: str, say: Say) -> Fetched:
    """Downloads missing files and keeps files from an interrupted run. `say` receives lines of progress.

    Raises:
        ModelError: see `hub.fetch` and `checkpoint.check`; also if `model` is a path or the bundled model.
    """
    if model == "bundled" or Path(model).expanduser().exists():
        raise ModelError(f"{model} is not on the hub: there is nothing to fetch.")
    folder = hub.fetch(model, say, revision)
    checkpoint.check(folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    return Fetched(model, folder.name, folder, size, checkpoint.fingerprint(folder, dtype))


def find(model: str, revision: str | None, dtype: str) -> str:
    """Returns the fingerprint of a model in a folder or in the hub's local cache; "" for a .gguf file.

    Raises:
        ModelError: the model is missing or incomplete.
    """
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"There is no file {path}.")
        return ""
    folder = path if path.exists() or model.startswith((".", "~", "/")) else hub.cached(model, revision)
    checkpoint.check(folder)
    return checkpoint.fingerprint(folder, dtype)
