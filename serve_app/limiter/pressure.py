"""Controls by a level how much work the limiter admits for a backend.

The level rises while requests wait less than a target, and falls while they wait longer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, inf, isfinite, log
from typing import Annotated, Any, ClassVar, Final

from annotated_types import Ge, Gt, Le

from serve_app.contracts.limiting import PressureReport
from serve_app.contracts.limits import Contract

_STEP_S: Final = 0.25  # minimum time between two moves of the level, however many replicas report
_RATE_S: Final = 5.0  # time constant of a replica's rate; the rate is used once the replica has had work for this long
_MAX_PRESSURE: Final = 2.0  # pressure counts up to this much above its target, in units of the target
_ACCELERATION_S: Final = 5.0  # without pressure, the level rises 2 times as fast after this time, 3 times after 10 s
_ONSET: Final = 0.3  # share of the capacity that an account of the default weight gets when pressure begins
_QUIET: Final = 0.1  # a lower pressure counts as none
_FORGETTING: Final = 0.01  # per second; see Controller on why shards agree
_MIN_SHARE: Final = 1e-5  # minimum share of the capacity for an account of the default weight
# Limits are lifted when an account of the default weight would get this many times the capacity: by then, an account of
# 1/100 of that weight may use all of it.
_FREE: Final = 100.0


Share = Annotated[float, Gt(0), Le(1)]


@dataclass(frozen=True, slots=True)
class Tuning:
    """The controllers' settings: `pressure` in the Limiter's `user_config`. Times are seconds, shares are 0 to 1."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "use_attribute_docstrings": True}
    gain: ClassVar[float] = 0.1  # gain of the slow reaction, per second
    damping: ClassVar[float] = 0.4  # gain of the immediate reaction

    target_s: Annotated[float, Gt(0), Le(60)] = 0.75
    """Target for the queueing delay, in seconds."""
    prefill_target_s: Annotated[float, Gt(0), Le(600)] = 3.0
    """Target for the work in queued prompts, in seconds."""
    kv_target: Share = 0.95
    """While requests wait and at least this share of the KV cache is in use, limits do not rise."""
    floor: Share = 0.001
    """Minimum share of its contract that every account keeps."""
    burst_s: Annotated[float, Gt(0), Le(60)] = 6.0
    """Seconds' worth of its share that an account may use in advance."""
    deadline_s: Annotated[float, Gt(0)] = 120.0
    """A request that would wait longer than a third of this many seconds gets 503. Set it to `queue_timeout_s`."""
    silent_s: Annotated[float, Ge(1)] = 3.0
    """Seconds without a report after which a replica is ignored."""


class Controller:
    """The level of one backend: tokens per second for each unit of weight.

    The level is infinite until requests wait longer than the target, and again once it has risen far enough (_FREE).

    An account's share is its weight times the level. So the accounts that want more than they get divide the capacity
    by weight. They also get the capacity that other accounts do not use, because the level rises until requests wait.
    The controller need not know the accounts. (This is max-min fairness with the level as the one price for all
    accounts: see Kelly, Maulloo, Tan 1998.)

    The signal is `pressure`: the queueing delay, or the work in queued prompts if that is more, each in units of its
    target. It is at least 1 while requests wait and the KV cache is full (`kv_target`). The level reacts in two ways,
    like the PIE queue (RFC 8033). The slow reaction is a base that grows or shrinks by `gain` per second and unit of
    pressure. The immediate reaction is a factor of exp(`damping`) for each unit below the target, and of its inverse
    for each unit above. Without that factor, base and queue would oscillate forever, because each is the integral of
    the other. For a rise of the level, at most one unit of pressure below the target counts; for a fall, at most two
    units above it.

    The level depends only on reports and time. So limiter shards that get the same reports reach the same level without
    communication. If a shard started later or missed some reports, its difference shrinks by a factor of e every 100 s.
    The reason is that a base below the level at which one account of the default weight gets the whole capacity is also
    drawn up towards that level. (Additive increase has that effect, too, but its step would have to depend on the
    number of accounts.)

    All times come from one clock that never runs backwards.
    """

    def __init__(self, tuning: Tuning, default: Contract, now: float) -> None:
        self.tuning = tuning
        self.default = default  # gives the level its scale while no rate is known
        self.level = inf
        self.epoch = 0  # number of changes between a finite and an infinite level
        self.granted = 0.0  # the sum of level × seconds in this epoch: tokens that a unit of weight could have had
        self.restricts = False  # whether the level is finite
        self.moved_at = now  # time of the level's last update
        # From the last reports. Stored, because every admission reads them.
        self.replicas = 0  # replicas that report
        self.queue_age_s = 0.0  # time that the oldest request has waited: the lower median of the replicas
        self.waiting = 0  # requests on all replicas
        self.queued_prefill = 0  # tokens of prompts that wait or are being computed, on all replicas
        self.capacity = 0.0  # measured tokens per second of all replicas together; 0: not known yet
        self._base = inf
        self._quiet_s = 0.0
        self._replicas: dict[str, _Replica] = {}

    def report(self, report: PressureReport, now: float) -> None:
        """Records one replica's report."""
        if now - self.moved_at > self.tuning.silent_s:
            self.move(now)
        known = self._replicas.get(report.replica)
        if known is None:
            known = self._replicas[report.replica] = _Replica(report, now)
        else:
            known.update(report, now)
        self._sum_up()
        if now - self.moved_at >= _STEP_S:
            self.move(now)

    def granted_until(self, now: float) -> float:
        """Returns the value of `granted` at `now`."""
        return self.granted + self.level * max(0.0, now - self.moved_at) if self.restricts else self.granted

    @property
    def pressure(self) -> float:
        """The lower median of the replicas' pressures, at least 0.

        A replica's pressure is the larger of two ratios: its queueing delay to the target, and the work in its queued
        prompts to their target. It is at least 1 while requests wait and the KV cache is full. The median is used so
        that one slow replica does not throttle work that the others could serve.
        """
        return _lower_median(replica.pressure(self.tuning) for replica in self._replicas.values())

    @property
    def running(self) -> int:
        """Requests that are being computed, on all replicas."""
        return sum(replica.running for replica in self._replicas.values())

    @property
    def kv_used(self) -> float:
        """The mean share of the replicas' KV caches that is in use, 0 to 1."""
        return sum(replica.kv_used for replica in self._replicas.values()) / max(1, len(self._replicas))

    @property
    def rate(self) -> float:
        """Tokens per second of all replicas together, over the last seconds."""
        return sum(replica.rate for replica in self._replicas.values())

    def _sum_up(self) -> None:
        replicas = self._replicas.values()
        self.replicas = len(replicas)
        self.queue_age_s = _lower_median(replica.age_s for replica in replicas)
        self.waiting = sum(replica.waiting for replica in replicas)
        self.queued_prefill = sum(replica.queued_prefill for replica in replicas)
        known = [replica.capacity for replica in replicas if replica.capacity > 0]
        # A replica that was never busy is assumed to have the mean capacity of the others.
        self.capacity = sum(known) / len(known) * len(replicas) if known else 0.0

    def move(self, now: float) -> None:
        """Updates the level from the last reports, and drops replicas that no longer report."""
        dt = now - self.moved_at
        if dt <= 0:
            return
        tuning = self.tuning
        silent = [name for name, replica in self._replicas.items() if now - replica.reported_at > tuning.silent_s]
        for name in silent:
            del self._replicas[name]
        if silent:
            self._sum_up()
        pressure = self.pressure
        self.granted = self.granted_until(now)
        self.moved_at = now
        self._quiet_s = self._quiet_s + dt if pressure < _QUIET else 0.0
        scale = self._scale()
        if self._base == inf:
            if pressure <= 1.0:
                return
            self._base = _ONSET * scale
            self.epoch += 1
            self.granted = 0.0
        error = max(-_MAX_PRESSURE, min(1.0, 1.0 - pressure))  # above 0: the backend can take more work
        speed = tuning.gain * (1.0 + self._quiet_s / _ACCELERATION_S)
        share = log(self._base / scale)
        share += error * speed * dt
        share -= min(0.0, share) * (1.0 - exp(-_FORGETTING * dt))
        if share >= log(_FREE):
            self._base = self.level = inf
            self.restricts = False
            self.epoch += 1
            return
        self._base = scale * exp(max(log(_MIN_SHARE), share))
        self.level = self._base * exp(tuning.damping * error)
        self.restricts = True

    def _scale(self) -> float:
        """Returns the level at which an account of the default weight has the whole capacity.

        While the capacity is unknown, the rate of the default contract is used instead.
        """
        rate = self.capacity or max(1, self.default.tpm) / 60.0
        return rate / max(1, self.default.weight)


class _Replica:
    """One replica's last report, and its measured speed."""

    def __init__(self, report: PressureReport, now: float) -> None:
        self.rate = 0.0  # tokens per second, over the last seconds
        self._highest_rate = 0.0  # falls only while work waits
        self._was_busy = False
        self._rate_with_work = 0.0  # the rate over the last seconds with work
        self._worked_s = 0.0
        self._keep(report, now)

    @property
    def capacity(self) -> float:
        """Tokens per second that the replica can process; 0 until it has been busy for long enough.

        The rate of a single stream does not count, because a replica can do far more. Measured by that rate, one long
        prompt would seem to delay all others for minutes.
        """
        return max(self._highest_rate, self._rate_with_work) if self._worked_s >= _RATE_S else 0.0

    def update(self, report: PressureReport, now: float) -> None:
        dt = now - self.reported_at
        if dt > 0:
            done = report.tokens_done - self._tokens_done
            if done >= 0:  # otherwise the replica has restarted under its old name
                self._measure(done / dt, dt, waited=self.waiting > 0 and report.waiting > 0)
                if self._was_busy and _has_work(report):
                    self._worked_s += dt
                    newest = max(dt / self._worked_s, 1.0 - exp(-dt / _RATE_S))
                    self._rate_with_work += newest * (done / dt - self._rate_with_work)
        self._keep(report, now)

    def pressure(self, tuning: Tuning) -> float:
        pressure = self.age_s / tuning.target_s
        if self.capacity > 0:
            pressure = max(pressure, self.queued_prefill / self.capacity / tuning.prefill_target_s)
        if self.kv_used >= tuning.kv_target and self.waiting:
            pressure = max(pressure, 1.0)
        return pressure

    def _measure(self, rate: float, dt: float, waited: bool) -> None:
        newest = 1.0 - exp(-dt / _RATE_S)
        self.rate += newest * (rate - self.rate)
        if self.rate > self._highest_rate:
            self._highest_rate = self.rate
        elif waited:
            # A low rate shows low capacity only while work waits.
            self._highest_rate += newest * (self.rate - self._highest_rate)

    def _keep(self, report: PressureReport, now: float) -> None:
        self.reported_at = now
        self.running = max(0, report.running)
        self.waiting = max(0, report.waiting)
        self.age_s = _finite(report.queue_age_s) if self.waiting else 0.0
        self.kv_used = _finite(report.kv_used)
        self.queued_prefill = max(0, report.queued_prefill_tokens)
        self._tokens_done = report.tokens_done
        self._was_busy = _has_work(report)


def _has_work(report: PressureReport) -> bool:
    """Returns whether requests wait or prompts are being computed. Running generation alone does not count."""
    return report.waiting > 0 or report.queued_prefill_tokens > 0


def _lower_median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2] if ordered else 0.0


def _finite(value: float) -> float:
    return max(0.0, value) if isfinite(value) else 0.0
