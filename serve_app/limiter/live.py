"""Builds the live view of the limiter from its current state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import nsmallest

from serve_app.contracts.limiting import BackendLoad, BusyAccount, LiveGateway, Renew
from serve_app.limiter.accounts import Account, tightest
from serve_app.limiter.holds import Hold
from serve_app.limiter.shares import Shares


class Gateways:
    """The gateways that send heartbeats. A gateway is dropped once it has sent none for `lease_s` seconds."""

    def __init__(self, clock: Callable[[], float], lease_s: float) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._last: dict[str, tuple[float, LiveGateway]] = {}  # by holder, the longest silent first

    def heard(self, beat: Renew) -> None:
        now = self._clock()
        self._last.pop(beat.holder, None)
        self._last[beat.holder] = now, LiveGateway(beat.holder, beat.open_requests, beat.spool)
        while (first := next(iter(self._last.items())))[1][0] <= now - self._lease_s:
            del self._last[first[0]]

    def alive(self) -> tuple[LiveGateway, ...]:
        """Returns the gateways with a heartbeat in the last `lease_s` seconds, in the order of their names."""
        since = self._clock() - self._lease_s
        return tuple(sorted((one for at, one in self._last.values() if at > since), key=lambda one: one.holder))


def backend_loads(shares: Shares, now: float) -> tuple[BackendLoad, ...]:
    """Returns the load of each backend that has ever reported. A backend that no longer reports has 0 replicas."""
    for backend in shares.backends.values():
        backend.catch_up(now)
    loads = []
    for name, pressure, share in shares.levels(now):
        controller = shares.backends[name].controller
        loads.append(
            BackendLoad(
                name,
                controller.replicas,
                controller.running,
                controller.waiting,
                controller.queue_age_s,
                controller.kv_used,
                controller.queued_prefill,
                controller.rate,
                pressure,
                share,
            )
        )
    return tuple(loads)


def busiest(holds: Iterable[Hold], shares: Shares, top: int, now: float) -> tuple[BusyAccount, ...]:
    """Returns the accounts with the most open requests. If equal, the larger held amount comes first."""
    # Goes through the holds instead of all accounts, because most accounts are idle.
    backends: dict[Account, set[str]] = {}
    for hold in holds:
        backends.setdefault(hold.key.account, set()).add(hold.terms.backend)
    order = nsmallest(top, backends, key=lambda account: (-len(account.holds), -account.held, account.account_id))
    return tuple(_busy(account, backends[account], shares, now) for account in order)


def _busy(account: Account, backends: Iterable[str], shares: Shares, now: float) -> BusyAccount:
    contract = account.contract
    lowest_rate = min(shares.rate(name, contract, now) for name in backends)
    return BusyAccount(
        account.account_id,
        account.snapshot.name if account.snapshot is not None else "",
        len(account.holds),
        account.held,
        tightest(account.tokens, now),
        min(1.0, lowest_rate / (contract.tpm / 60.0)),
    )
