from __future__ import annotations

from typing import Any


class Counted(str):
    """Text that counts how often a part of it is looked at."""

    looks = 0

    def __getitem__(self, part: Any) -> str:
        self.looks += 1
        return super().__getitem__(part)

    def startswith(self, *args: Any) -> bool:
        self.looks += 1
        return super().startswith(*args)
