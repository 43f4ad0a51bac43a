"""Opens files that only their owner can use, and checks whether other users or machines can reach a path or address."""

from __future__ import annotations

import os
import stat
from ipaddress import IPv6Address, ip_address
from pathlib import Path

OTHERS = stat.S_IRWXG | stat.S_IRWXO
PASS = stat.S_IXGRP | stat.S_IXOTH  # other users may pass through the folder


def open_private(path: str, flags: int) -> int:
    """An `opener` for `open`. Only the owner can use a file that it creates."""
    return os.open(path, flags, 0o600)


def is_open_to_others(path: Path) -> bool:
    """Returns whether the modes of `path` and of the folders above it let another user in. Raises OSError."""
    real = path.resolve(strict=True)
    return bool(real.stat().st_mode & OTHERS) and all(folder.stat().st_mode & PASS for folder in real.parents)


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach the address. IPv4 may be written as IPv6 (`::ffff:127.0.0.1`)."""
    address = ip_address(host)
    return ((address.ipv4_mapped if isinstance(address, IPv6Address) else None) or address).is_loopback
