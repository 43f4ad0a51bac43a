"""Files that other users of the machine can't reach, and addresses that other machines can't."""

from __future__ import annotations

import os
import stat
from ipaddress import IPv6Address, ip_address
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


def is_loopback(host: str) -> bool:
    """Returns whether only this machine reaches the address, which may be written as IPv6 (`::ffff:127.0.0.1`)."""
    address = ip_address(host)
    return ((address.ipv4_mapped if isinstance(address, IPv6Address) else None) or address).is_loopback
