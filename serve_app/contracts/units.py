"""Sizes and times that many modules use."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final, Literal

GIB: Final = 2**30  # bytes
HOUR_S: Final = 3600.0
DAY_S: Final = 86_400.0


def utc_text(at: float, precision: Literal["seconds", "milliseconds"] = "seconds") -> str:
    """Returns a Unix time as text, for example "2026-11-26T03:21:15Z" (RFC 3339)."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec=precision).replace("+00:00", "Z")
