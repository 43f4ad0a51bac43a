"""A model's files, where what is made from them is kept, and whether that is ready. Free of torch, so quick to ask."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from serve_app.engine.config import EngineSettings
from serve_app.engine.errors import ModelError
from serve_app.engine.loading import checkpoint, prepared

#: Of the file with int8 weights. To be raised when its layout or the way of rounding weights changes.
INT8_FORMAT = "serve-app int8 weights, version 1"


@dataclass(frozen=True, slots=True)
class Source:
    """A model's files."""

    name: str  # an absolute path, or a name on the hub: the same for all versions of the model
    folder: Path


def gguf_slot(path: Path, cache: Path) -> prepared.Slot:
    """Where the folder converted from a GGUF file is kept.

    Raises:
        OSError: there is no such file.
    """
    path = path.absolute()
    return prepared.Slot.of(cache / "gguf", str(path), prepared.identity_of([path]), "")


def int8_slot(source: Source, cache: Path) -> prepared.Slot:
    """Where the model's int8 weights are kept.

    Raises:
        ModelError: the folder has no weights.
        OSError: it has no config.json.
    """
    identity = prepared.identity_of(checkpoint.identity_files(source.folder), INT8_FORMAT)
    return prepared.Slot.of(cache / "int8", source.name, identity, ".safetensors")


def is_ready(settings: EngineSettings) -> bool:
    """Whether a start finds prepared what `loader.prepare` makes.

    Hub names, and what is no model at all, count as ready: asking the network and explaining are the loader's.
    """
    path, cache = Path(settings.model).expanduser().absolute(), prepared.cache_dir(settings.cache_dir)
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
