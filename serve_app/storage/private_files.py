"""Files and folders that other users of the machine can't reach."""

from __future__ import annotations

import os
import stat
from pathlib import Path

OTHERS = stat.S_IRWXG | stat.S_IRWXO
PASS = stat.S_IXGRP | stat.S_IXOTH


def open_private(path: str, flags: int) -> int:
    """Opens a file as `open` does, as its `opener`. Only the owner can use a file that this creates."""
    return os.open(path, flags, 0o600)


def is_open_to_others(path: Path) -> bool:
    """Returns whether the modes of `path` and of the folders above it let another user in. Raises OSError."""
    real = path.resolve(strict=True)
    return bool(real.stat().st_mode & OTHERS) and all(folder.stat().st_mode & PASS for folder in real.parents)
