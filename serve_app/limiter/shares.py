"""Limits what each account may use of a backend under pressure: a token rate by weight, metered over a few seconds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import ceil, inf
from typing import Final

from serve_app.contracts.fairness import count_fairly
from serve_app.contracts.limiting import PressureReport, Window
from serve_app.contracts.limits import Contract
from serve_app.limiter.pressure import Controller, Tuning
from serve_app.limiter.refused_demand import RefusedDemand

# Maximum expected wait, as a part of the deadline. The real wait may be longer: an account that was served more than
# others waits for them, and a replica may be lost meanwhile.
_MARGIN: Final = 1 / 3
_MEAN_WEIGHT: Final = 0.02  # weight of the newest request in the mean tokens of a request
_SLOT_S: Final = 0.5  # admitted work is expected to show in the reports after one to two slots
_ALWAYS_S: Final = 1.0  # in seconds of capacity: an account's work up to this amount counts in full
_MIN_RETRY_S: Final = 1.0
_FORGIVEN_S: Final = 600.0  # an account's meter is dropped after this time without a request
_SWEEP: Final = 1024  # number of meters at which the search for meters to drop starts


@dataclass(frozen=True, slots=True)
class OverShare:
    """The account has used its share of a backend under pressure: 429."""

    limit: int  # tokens per minute now
    used: int  # tokens by which the account is ahead of its rate
    wait_s: float


@dataclass(frozen=True, slots=True)
class NoCapacity:
    """The account is within its share, but the request is expected to wait too long: 503."""

    expected_s: float  # expected wait of the request
    wait_s: float


class Shares:
    """Limits each account to its share of a backend under pressure. Refuses requests that would wait too long.

    Each account has a meter per restricted backend: the tokens by which it is ahead of its rate. Requests of any size
    are admitted while the meter is below `burst_s` seconds of the rate. Above that, the account waits until the meter
    has drained to that value. So over any longer time it gets its rate, with small requests and with large ones.
    (Contracts use a window of a minute. With such a window, every account could send a minute's work when the pressure
    begins.)

    `shards` is the number of limiters that share the accounts. Each limiter assumes that each of the
    others admits as much as it does between two reports.
    """

    def __init__(self, tuning: Tuning, default: Contract, shards: int = 1) -> None:
        self.shards = shards
        self.backends: dict[str, Backend] = {}
        self._tuning = tuning
        self._default = default

    def reconfigure(self, tuning: Tuning, default: Contract) -> None:
        """Sets the tuning and the default contract. That contract scales the level while no capacity is known."""
        self._tuning = tuning
        self._default = default
        for backend in self.backends.values():
            backend.controller.tuning = tuning
            backend.controller.default = default

    def report(self, report: PressureReport, now: float) -> None:
        """Records a replica's report."""
        backend = self.backends.get(report.backend)
        if backend is None:
            backend = self.backends[report.backend] = Backend(Controller(self._tuning, self._default, now))
        backend.controller.report(report, now)

    def rate(self, name: str, contract: Contract, now: float) -> float:
        """Returns the tokens per second that an account may use on the backend.

        This is its contract's rate, or less under pressure, but at least `floor` times the contract's rate.
        """
        backend = self._restricted(name, now)
        return contract.tpm / 60.0 if backend is None else backend.rate(contract)

    def check_share(self, name: str, account_id: str, contract: Contract, now: float) -> OverShare | NoCapacity | None:
        """Returns the reason why a request must not be admitted now, or None. Charges nothing."""
        backend = self.backends.get(name)
        if backend is None:
            return None
        backend.catch_up(now)
        if backend.controller.restricts:
            rate = backend.rate(contract)
            meter = backend.meter(account_id)
            if meter is not None and rate < contract.tpm / 60.0:
                used = backend.drained(meter, contract, now)
                burst = self._tuning.burst_s * rate
                if used > burst:
                    wait_s = (used - burst) / rate if rate > 0 else inf
                    return OverShare(round(rate * 60.0), ceil(used), wait_s)
        expected_s = backend.expected_wait_s(account_id, now, self.shards)
        limit_s = _MARGIN * self._tuning.deadline_s
        if expected_s > limit_s:
            return NoCapacity(expected_s, max(_MIN_RETRY_S, expected_s - limit_s))
        return None

    def charge_share(
        self, name: str, account_id: str, contract: Contract, tokens: int, now: float
    ) -> ShareCharge | None:
        """Counts an admitted request. Returns its charge, or None if the backend is not restricted."""
        backend = self.backends.get(name)
        if backend is None:
            return None
        backend.add_work(account_id, tokens, now)
        meter = backend.meter(account_id)
        if not backend.controller.restricts:
            return None
        if meter is None:
            meter = backend.new_meter(account_id, now)
        backend.add(meter, tokens, contract, now)
        return ShareCharge(backend, meter, tokens)

    def count_refused(
        self, name: str, account_id: str, contract: Contract, size: tuple[int, int], tokens: int, now: float
    ) -> None:
        """Adds a request to the refused demand. `size` is its prompt and its output budget, in tokens."""
        self.backends[name].refused.add(account_id, size, tokens, contract.tpm / 60.0, now)

    def refused_per_s(self, name: str, now: float) -> float:
        """Returns the tokens per second refused in the last seconds because of the backend's load."""
        backend = self.backends.get(name)
        return backend.refused.rate(now) if backend is not None else 0.0

    def remove_work(self, name: str, account_id: str, tokens: int, since: float, now: float) -> None:
        """Subtracts from the pending work a request that was admitted at `since` and did not run."""
        if (backend := self.backends.get(name)) is not None:
            backend.remove_work(account_id, tokens, since, now)

    def window(self, name: str, account_id: str, contract: Contract, tokens: Window, now: float) -> Window:
        """Returns the token window for the headers: `tokens` (the contract's), or the share's if it has less room."""
        backend = self._restricted(name, now)
        if backend is None or (rate := backend.rate(contract)) >= contract.tpm / 60.0:
            return tokens
        meter = backend.meter(account_id)
        used = backend.drained(meter, contract, now) if meter is not None else 0.0
        room = max(0, int(self._tuning.burst_s * rate - used))
        share = Window(round(rate * 60.0), room, used / rate if rate > 0 else 60.0)
        return min(share, tokens, key=lambda window: (window.remaining, window.limit))

    def pressed(self, contract: Contract, now: float) -> tuple[tuple[str, int], ...]:
        """Returns the backends on which an account may use less than its contract now, with the tokens per minute."""
        rates = [(name, self.rate(name, contract, now)) for name in sorted(self.backends)]
        return tuple((name, round(rate * 60.0)) for name, rate in rates if rate < contract.tpm / 60.0)

    def levels(self, now: float) -> list[tuple[str, float, float]]:
        """Returns the name, pressure and share of each backend.

        Controller.pressure explains the pressure. The share, 0 to 1, is the part of the default contract that may be
        used.
        """
        full = self._default.tpm / 60.0
        # Computed first, because `rate` drops silent replicas, which must not count towards the pressure.
        left = {name: min(1.0, self.rate(name, self._default, now) / full) for name in self.backends}
        return [(name, self.backends[name].controller.pressure, share) for name, share in sorted(left.items())]

    def _restricted(self, name: str, now: float) -> Backend | None:
        """Returns the backend if its level restricts accounts, else None."""
        backend = self.backends.get(name)
        if backend is None:
            return None
        backend.catch_up(now)
        return backend if backend.controller.restricts else None


class ShareCharge:
    """The charge of a request on its account's meter, kept for corrections."""

    __slots__ = ("_backend", "_meter", "_tokens")

    def __init__(self, backend: Backend, meter: _Meter, tokens: int) -> None:
        self._backend = backend
        self._meter = meter
        self._tokens = tokens

    def recharge(self, now: float, tokens: int, contract: Contract) -> None:
        """Changes the charge to `tokens`. Has no effect if the pressure has ended meanwhile."""
        self._backend.add(self._meter, tokens - self._tokens, contract, now)
        self._tokens = tokens


@dataclass(slots=True)
class _Meter:
    """Tokens by which an account is ahead of its rate."""

    used: float = 0.0
    at: float = 0.0  # time at which `used` was updated
    granted: float = 0.0  # the controller's `granted` at that time


class Backend:
    """A controller, the meters of its current epoch, and the work admitted since the last reports."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.refused = RefusedDemand()
        self._epoch = 0
        self._meters: dict[str, _Meter] = {}
        self._sweep_at = _SWEEP
        self._mean: float | None = None  # mean tokens charged per request
        self._slot = -inf
        # Tokens admitted, by account, in the previous slot and in the current one.
        self._recent: tuple[Counter[str], Counter[str]] = Counter(), Counter()

    def catch_up(self, now: float) -> None:
        """Updates the level if no replica reports. Without reports there is no pressure, so the level rises."""
        if now - self.controller.moved_at > self.controller.tuning.silent_s:
            self.controller.move(now)

    def meter(self, account_id: str) -> _Meter | None:
        if self._epoch != self.controller.epoch:
            self._epoch = self.controller.epoch
            self._meters.clear()
            self._sweep_at = _SWEEP
        return self._meters.get(account_id)

    def new_meter(self, account_id: str, now: float) -> _Meter:
        if len(self._meters) >= self._sweep_at:
            self._meters = {name: meter for name, meter in self._meters.items() if now - meter.at < _FORGIVEN_S}
            self._sweep_at = max(_SWEEP, 2 * len(self._meters))
        meter = self._meters[account_id] = _Meter()
        return meter

    def add(self, meter: _Meter, tokens: int, contract: Contract, now: float) -> None:
        meter.used = max(0.0, self.drained(meter, contract, now) + tokens)
        meter.at = now
        meter.granted = self.controller.granted_until(now)

    def drained(self, meter: _Meter, contract: Contract, now: float) -> float:
        """Returns the meter's tokens at `now`. The meter drains at the level of each moment, not at the last level."""
        by_contract = contract.tpm / 60.0 * max(0.0, now - meter.at)
        by_level = contract.weight * max(0.0, self.controller.granted_until(now) - meter.granted)
        return max(0.0, meter.used - min(by_contract, max(by_level, self.controller.tuning.floor * by_contract)))

    def rate(self, contract: Contract) -> float:
        """Returns the tokens per second that the level leaves an account of this contract."""
        by_contract = contract.tpm / 60.0
        level = self.controller.level
        if level == inf:
            return by_contract
        return min(by_contract, max(contract.weight * level, self.controller.tuning.floor * by_contract))

    def add_work(self, account_id: str, tokens: int, now: float) -> None:
        """Adds an admitted request to the pending work."""
        self._turn_slot(now)
        self._recent[1][account_id] += tokens
        mean = tokens if self._mean is None else self._mean
        self._mean = mean + _MEAN_WEIGHT * (tokens - mean)

    def remove_work(self, account_id: str, tokens: int, since: float, now: float) -> None:
        """Subtracts from the pending work a request that was admitted at `since`."""
        self._turn_slot(now)
        if self._mean is not None:
            self._mean = max(0.0, self._mean - _MEAN_WEIGHT * tokens) / (1.0 - _MEAN_WEIGHT)
        if since >= self._slot:
            slot = self._recent[1]
        elif since >= self._slot - _SLOT_S:
            slot = self._recent[0]
        else:
            return
        slot[account_id] = max(0, slot[account_id] - tokens)

    def expected_wait_s(self, account_id: str, now: float, shards: int) -> float:
        """Returns the seconds until a request of the account would start if it were admitted now.

        This is the longer of two times: the oldest request's wait, and the time for the work before the new request.
        That work is the queue in the last reports and, of the work admitted since, the account's own and the part of
        other accounts' work that a fair queue serves first. Without a known capacity, only the oldest request's wait
        counts.
        """
        controller = self.controller
        age_s = controller.queue_age_s
        capacity = controller.capacity
        if capacity <= 0:
            return age_s
        self._turn_slot(now)
        queued = max(controller.waiting * (self._mean or 0.0), controller.queued_prefill)
        recent = self._recent[0] + self._recent[1]
        own = recent.pop(account_id, 0)
        others = count_fairly(recent.values(), capacity * _ALWAYS_S)
        return max(age_s, (queued + (own + others) * shards) / capacity)

    def _turn_slot(self, now: float) -> None:
        passed = (now - self._slot) / _SLOT_S
        if passed >= 2:
            self._recent = Counter(), Counter()
            self._slot = now
        elif passed >= 1:
            self._recent = self._recent[1], Counter()
            self._slot += _SLOT_S
