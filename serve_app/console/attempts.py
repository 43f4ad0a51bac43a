"""How often somebody may try a password: by address and by e-mail, in this process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

WINDOW_S: Final = 900.0
OF_EMAIL: Final = 5
OF_ADDRESS: Final = 30
MOST_KEPT: Final = 10_000


class Attempts:
    """`clock` returns seconds. An attempt counts when it begins, so that many at once count too."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began: OrderedDict[str, list[float]] = OrderedDict()

    def begin(self, address: str, email: str) -> bool:
        """Counts an attempt; False: it is one too many, and must not be made."""
        bounds = {f"address {address}": OF_ADDRESS, f"email {email.strip().lower()[:200]}": OF_EMAIL}
        since = self._clock() - WINDOW_S
        for name in bounds:
            self._began[name] = [at for at in self._began.pop(name, []) if at > since]
        if any(len(self._began[name]) >= most for name, most in bounds.items()):
            return False
        for name in bounds:
            self._began[name].append(self._clock())
        while len(self._began) > MOST_KEPT:
            self._began.popitem(last=False)
        return True

    def succeeded(self, email: str) -> None:
        self._began.pop(f"email {email.strip().lower()[:200]}", None)
