"""What each account may take of a backend under pressure: a token rate by its weight, metered over a few seconds."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf
from typing import Final

from serve_app.limits.messages import Contract, PressureReport, Window
from serve_app.limits.pressure import Controller, Tuning

# Of the deadline. When the oldest request has waited for so long, as much work again may be queued before it: who was
# served much waits for those who were served less. And a replica may be lost meanwhile.
_MARGIN: Final = 1 / 3
_MEAN_WEIGHT: Final = 0.02  # of the newest request in the mean of what one counts for
_SLOT_S: Final = 0.5  # what was let in is taken to show in the reports after one to two of these
_MIN_RETRY_S: Final = 1.0
_FORGIVEN_S: Final = 600.0  # an account that asks for nothing for so long starts anew
_SWEEP: Final = 1024  # meters, at which those are looked for


@dataclass(frozen=True, slots=True)
class OverShare:
    """The account has used what the backend's load leaves it. Its own doing: 429."""

    limit: int  # tokens per minute now
    used: int  # tokens by which it is ahead
    wait_s: float


@dataclass(frozen=True, slots=True)
class NoCapacity:
    """The backend has more to do than it can before the deadline. Nobody's doing: 503."""

    expected_s: float
    wait_s: float


@dataclass(frozen=True, slots=True)
class BackendLoad:
    """A backend as the controller sees it, for metrics and operators."""

    backend: str
    replicas: int
    level: float  # tokens per second for each unit of weight; infinity: nothing is restricted
    multiplier: float  # floor to 1, on the default contract
    pressure: float  # queueing delay in units of its target
    expected_wait_s: float
    capacity: float  # tokens per second; 0: not known yet


class Shares:
    """Meters accounts against the level of each backend. Costs nothing where no backend is under pressure.

    Each account has a meter per restricted backend: tokens that it is ahead of its rate. It is let in while the meter
    is below `burst_s` seconds of the rate, whatever its request counts for, and then waits until the meter has
    drained: over any longer time it gets its rate, with small requests and with large ones. (A window of a minute, as
    contracts have it, would let every account bring a minute's work in the moment the pressure begins.)

    `shards` is how many limiters divide the accounts; each counts what it lets in between two reports for so many.
    """

    def __init__(self, tuning: Tuning, default: Contract, shards: int = 1) -> None:
        self.shards = shards
        self._tuning = tuning
        self._default = default
        self._backends: dict[str, _Backend] = {}

    @property
    def tuning(self) -> Tuning:
        """The settings; may be set at any time."""
        return self._tuning

    @tuning.setter
    def tuning(self, tuning: Tuning) -> None:
        self._tuning = tuning
        for backend in self._backends.values():
            backend.controller.tuning = tuning

    def set_default(self, default: Contract) -> None:
        """Follows the default contract, by which the level is scaled while a backend's capacity is unknown."""
        self._default = default
        for backend in self._backends.values():
            backend.controller.default = default

    def report(self, report: PressureReport, now: float) -> None:
        """Takes in what a replica says about itself."""
        backend = self._backends.get(report.backend)
        if backend is None:
            controller = Controller(self._tuning, self._default, now)
            backend = self._backends[report.backend] = _Backend(controller)
        backend.controller.report(report, now)

    def rate(self, backend: str, contract: Contract, now: float) -> float:
        """Tokens per second that the account may take of the backend: its contract, or less while there is pressure.

        Never below `floor` times the contract.
        """
        found = self._current(backend, now)
        most = contract.tpm / 60.0
        return most if found is None else found.rate(contract)

    def check(self, backend: str, account_id: str, contract: Contract, now: float) -> OverShare | NoCapacity | None:
        """Why a request must not be let in now; None when it may. Changes nothing that counts."""
        found = self._backends.get(backend)
        if found is None:
            return None
        found.controller.catch_up(now)
        if found.controller.restricts:
            rate = found.rate(contract)
            meter = found.meter(account_id)
            if meter is not None and rate < contract.tpm / 60.0:
                used = found.drained(meter, contract, now)
                burst = self._tuning.burst_s * rate
                if used > burst:
                    wait_s = (used - burst) / rate if rate > 0 else inf
                    return OverShare(round(rate * 60.0), ceil(used), wait_s)
        expected_s = found.expected_wait_s(now, self.shards)
        limit_s = _MARGIN * self._tuning.deadline_s
        if expected_s > limit_s:
            return NoCapacity(expected_s, max(_MIN_RETRY_S, expected_s - limit_s))
        return None

    def charge(self, backend: str, account_id: str, contract: Contract, tokens: int, now: float) -> ShareCharge | None:
        """Counts a request that is let in. None where nothing is restricted."""
        found = self._backends.get(backend)
        if found is None:
            return None
        found.let_in(tokens, now)
        meter = found.meter(account_id)
        if not found.controller.restricts:
            return None
        if meter is None:
            meter = found.new_meter(account_id, now)
        found.add(meter, tokens, contract, now)
        return ShareCharge(found, meter, tokens)

    def give_back(self, backend: str, tokens: int, since: float, now: float) -> None:
        """Takes a request that was let in at `since` and then refused out of the work that is still to come."""
        if (found := self._backends.get(backend)) is not None:
            found.take_back(tokens, since, now)

    def window(self, backend: str, account_id: str, contract: Contract, tokens: Window, now: float) -> Window:
        """The token window for the headers: `tokens`, which is by contract, or the share's where that refuses first."""
        found = self._current(backend, now)
        if found is None:
            return tokens
        rate = found.rate(contract)
        if rate >= contract.tpm / 60.0:
            return tokens
        meter = found.meter(account_id)
        used = found.drained(meter, contract, now) if meter is not None else 0.0
        room = max(0, int(self._tuning.burst_s * rate - used))
        own = Window(round(rate * 60.0), room, used / rate if rate > 0 else 60.0)
        return min(own, tokens, key=lambda one: (one.remaining, one.limit))

    def loads(self, now: float) -> tuple[BackendLoad, ...]:
        """All backends that have reported, by name."""
        found = []
        for name, backend in sorted(self._backends.items()):
            controller = backend.controller
            controller.catch_up(now)
            most = self._default.tpm / 60.0
            found.append(
                BackendLoad(
                    backend=name,
                    replicas=controller.replicas,
                    level=controller.level,
                    multiplier=backend.rate(self._default) / most if most else 1.0,
                    pressure=controller.pressure,
                    expected_wait_s=backend.expected_wait_s(now, self.shards),
                    capacity=controller.capacity,
                )
            )
        return tuple(found)

    def _current(self, backend: str, now: float) -> _Backend | None:
        """The backend if its level restricts anybody."""
        found = self._backends.get(backend)
        if found is None:
            return None
        found.controller.catch_up(now)
        return found if found.controller.restricts else None


class ShareCharge:
    """What a request was counted for on its account's meter, so that it can be corrected."""

    __slots__ = ("_backend", "_meter", "_tokens")

    def __init__(self, backend: _Backend, meter: _Meter, tokens: int) -> None:
        self._backend = backend
        self._meter = meter
        self._tokens = tokens

    def correct(self, now: float, tokens: int, contract: Contract) -> None:
        """Makes it a charge of `tokens`. Where the pressure has ended meanwhile, the meter counts for nothing."""
        self._backend.add(self._meter, tokens - self._tokens, contract, now)
        self._tokens = tokens


class _Meter:
    """Tokens by which an account is ahead, at a time and at the level's sum then."""

    __slots__ = ("at", "granted", "used")

    def __init__(self) -> None:
        self.used = 0.0
        self.at = 0.0
        self.granted = 0.0


class _Backend:
    """A controller, the meters of its current epoch, and what was let in since the replicas reported."""

    __slots__ = ("_mean", "_meters", "_recent", "_slot", "_sweep_at", "controller", "epoch")

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.epoch = 0
        self._meters: dict[str, _Meter] = {}
        self._sweep_at = _SWEEP
        self._mean: float | None = None  # tokens that a request counts for
        self._slot = -inf
        self._recent = (0, 0)  # tokens let in, in the slot before and in this one

    def meter(self, account_id: str) -> _Meter | None:
        if self.epoch != self.controller.epoch:
            self.epoch = self.controller.epoch
            self._meters.clear()
            self._sweep_at = _SWEEP
        return self._meters.get(account_id)

    def new_meter(self, account_id: str, now: float) -> _Meter:
        if len(self._meters) >= self._sweep_at:
            self._meters = {name: one for name, one in self._meters.items() if now - one.at < _FORGIVEN_S}
            self._sweep_at = max(_SWEEP, 2 * len(self._meters))
        meter = self._meters[account_id] = _Meter()
        return meter

    def add(self, meter: _Meter, tokens: int, contract: Contract, now: float) -> None:
        meter.used = max(0.0, self.drained(meter, contract, now) + tokens)
        meter.at = now
        meter.granted = self.controller.granted_until(now)

    def drained(self, meter: _Meter, contract: Contract, now: float) -> float:
        """What is left on the meter. By the levels since it was read last, not by the one of this moment."""
        most = contract.tpm / 60.0 * max(0.0, now - meter.at)
        share = contract.weight * max(0.0, self.controller.granted_until(now) - meter.granted)
        return max(0.0, meter.used - min(most, max(share, self.controller.tuning.floor * most)))

    def rate(self, contract: Contract) -> float:
        """Tokens per second that the level leaves an account of this contract."""
        most = contract.tpm / 60.0
        level = self.controller.level
        return most if level == inf else min(most, max(contract.weight * level, self.controller.tuning.floor * most))

    def let_in(self, tokens: int, now: float) -> None:
        self._turn(now)
        self._recent = self._recent[0], self._recent[1] + tokens
        mean = tokens if self._mean is None else self._mean
        self._mean = mean + _MEAN_WEIGHT * (tokens - mean)

    def take_back(self, tokens: int, since: float, now: float) -> None:
        self._turn(now)
        before, newest = self._recent
        if self._mean is not None:
            self._mean = max(0.0, self._mean - _MEAN_WEIGHT * tokens) / (1.0 - _MEAN_WEIGHT)
        if since >= self._slot:
            self._recent = before, max(0, newest - tokens)
        elif since >= self._slot - _SLOT_S:
            self._recent = max(0, before - tokens), newest

    def expected_wait_s(self, now: float, shards: int) -> float:
        """Seconds until a request let in now would start: as the oldest waits, or as long as the work before it takes.

        Without a known capacity only the former.
        """
        controller = self.controller
        age_s = controller.queue_age_s
        capacity = controller.capacity
        if capacity <= 0:
            return age_s
        self._turn(now)
        queued = max(controller.waiting * (self._mean or 0.0), controller.queued_prefill)
        return max(age_s, (queued + sum(self._recent) * shards) / capacity)

    def _turn(self, now: float) -> None:
        passed = (now - self._slot) / _SLOT_S
        if passed >= 2:
            self._recent = (0, 0)
            self._slot = now
        elif passed >= 1:
            self._recent = (self._recent[1], 0)
            self._slot += _SLOT_S
