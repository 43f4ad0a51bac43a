"""The leases that holds live under: who does not renew them loses them."""

from __future__ import annotations

from collections.abc import Iterable

from serve_app.limits.holds import Hold


class Leases:
    """Open holds by request, oldest lease first.

    All leases are equally long, so a dict in the order of the last renewal is in the order of expiry, and looking for
    the expired ones costs only as much as there are.
    """

    __slots__ = ("_holds", "lease_s")

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._holds: dict[str, Hold] = {}

    def __len__(self) -> int:
        return len(self._holds)

    def get(self, request_id: str) -> Hold | None:
        """The open hold, or None."""
        return self._holds.get(request_id)

    def start(self, request_id: str, hold: Hold, now: float) -> None:
        """Begins or renews a lease."""
        self._holds.pop(request_id, None)
        hold.expires_at = now + self.lease_s
        self._holds[request_id] = hold

    def renew(self, holder: str, request_ids: Iterable[str], now: float) -> tuple[str, ...]:
        """Renews those of the holder that are open; answers those that are not."""
        unknown = []
        for request_id in request_ids:
            hold = self._holds.get(request_id)
            if hold is None or hold.holder != holder:
                unknown.append(request_id)
            else:
                self.start(request_id, hold, now)
        return tuple(unknown)

    def end(self, request_id: str) -> Hold | None:
        """Removes a lease; None when there is none."""
        return self._holds.pop(request_id, None)

    def expired(self, now: float) -> list[str]:
        """Requests whose lease has run out."""
        found = []
        for request_id, hold in self._holds.items():
            if hold.expires_at > now:
                break
            found.append(request_id)
        return found
