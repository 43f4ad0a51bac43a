"""Tells one set of weights from another by a short name, the same on every machine that has the same files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from serve_app import __version__
from serve_app.engine.loading import checkpoint

_SAMPLES: Final = 16  # of each file, spread evenly: fine-tuning changes all of the weights, and files have gigabytes
_SAMPLE_BYTES: Final = 64 * 1024
_TOLD: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def fingerprint(folder: Path, dtype: str) -> str:
    """Twelve hex digits of what decides about replies: weights, tokenizer, template, type, and this release.

    Files are read in samples, so weights that differ in a few places only may not be told apart. Raises ModelError or
    OSError for a folder that is no model.
    """
    found = hashlib.sha256(f"{__version__} {dtype}".encode())
    told = [folder / name for name in _TOLD if (folder / name).is_file()]
    for path in [*checkpoint.identity_files(folder), *told]:
        size = path.stat().st_size
        found.update(f"\0{path.name} {size}\0".encode())
        with path.open("rb") as file:
            if size <= _SAMPLES * _SAMPLE_BYTES:
                found.update(file.read())
                continue
            for sample in range(_SAMPLES):
                file.seek((size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                found.update(file.read(_SAMPLE_BYTES))
    return found.hexdigest()[:12]
