"""Limits password attempts by address and by e-mail, in this process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

WINDOW_S: Final = 900.0
OF_EMAIL: Final = 5
OF_ADDRESS: Final = 30
MAX_KEPT: Final = 10_000  # addresses, and the same number of e-mails


class Attempts:
    """Counts password attempts. `clock` returns seconds.

    An attempt counts when it begins, so concurrent attempts count too. Only the latest allowed attempts are kept. Each
    takes the time of a password check, so an attacker cannot make enough attempts within the window to evict a name.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._of_addresses: OrderedDict[str, list[float]] = OrderedDict()
        self._of_emails: OrderedDict[str, list[float]] = OrderedDict()

    def begin(self, address: str, email: str) -> bool:
        """Counts an attempt. False: the limit is reached, and the attempt must not be made."""
        counted = ((self._of_addresses, address, OF_ADDRESS), (self._of_emails, _normal(email), OF_EMAIL))
        now = self._clock()
        recent = [[at for at in table.get(name, ()) if at > now - WINDOW_S] for table, name, _ in counted]
        if any(len(times) >= most for times, (_, _, most) in zip(recent, counted, strict=True)):
            return False
        for times, (table, name, _) in zip(recent, counted, strict=True):
            table[name] = [*times, now]
            table.move_to_end(name)
            if len(table) > MAX_KEPT:
                table.popitem(last=False)
        return True

    def succeeded(self, email: str) -> None:
        self._of_emails.pop(_normal(email), None)


def _normal(email: str) -> str:
    return email.strip().lower()[:200]
