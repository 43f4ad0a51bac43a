"""How much work a backend lets in: one number that rises while nothing waits and falls while something does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, inf, isfinite, log
from typing import Final

from serve_app.limits.messages import Contract, PressureReport

_STEP_S: Final = 0.25  # the level moves at most so often, however many replicas report
_RATE_S: Final = 5.0  # time constant of a replica's measured rate; for so long it must have had work
_MOST: Final = 2.0  # pressure above the target that still makes a difference, in targets
_ACCELERATION_S: Final = 5.0  # after so long without any pressure the level rises twice as fast, after twice, thrice
_ONSET: Final = 0.3  # of the capacity for an account of the default weight, when pressure begins
_QUIET: Final = 0.1  # pressure below which nothing counts as waiting
_FORGETTING: Final = 0.01  # per second; see Controller on why shards agree
_LEAST: Final = 1e-5  # of the capacity, for an account of the default weight
_FREE: Final = 100.0  # of the capacity; then one of a hundredth of the default weight has all of it


@dataclass(frozen=True, slots=True)
class Tuning:
    """What the controllers aim at. Times are seconds, shares are 0 to 1."""

    target_s: float = 0.75  # queueing delay to keep
    prefill_target_s: float = 3.0  # work in queued prompts to keep
    kv_target: float = 0.95  # KV use from which the level does not rise while requests wait
    floor: float = 0.001  # of its contract, which every account keeps
    burst_s: float = 6.0  # an account may be ahead of its share by so much
    deadline_s: float = 120.0  # nobody is let in who would wait for more than a third of it
    silent_s: float = 3.0  # a replica that has not reported for so long is forgotten
    gain: float = 0.1  # per second, of the slow answer to pressure
    damping: float = 0.4  # of the quick answer


class Controller:
    """The level of one backend: tokens per second for each unit of weight. Infinity while nothing waits.

    An account's share is its weight times the level, so capacity is divided by weight among those who want more than
    they get, and what others leave is lent out, without anybody knowing who they are: the level rises until the
    queue says that it is enough (max-min fairness by one price for all; Kelly, Maulloo, Tan 1998).

    The signal is queueing delay in units of its target, 1 being right: `pressure`. The level answers in two ways, like
    the PIE queue (RFC 8033): slowly, by a base that grows or shrinks by `gain` per second and unit of pressure, and
    at once, by a factor of exp(`damping`) per unit, which is forgotten as the queue is; without it, base and queue,
    each the sum over time of the other, would swing for ever. Increase is bounded by one unit, decrease by two.

    Nothing but reports and time goes in, so shards of the limiter that get the same reports come to the same level
    without talking. One that started later, or missed some, comes closer by a factor e in 100 s: the base is also
    drawn towards the level at which one account of the default weight gets all. (Additive increase has that effect,
    too, but its step would have to know the number of accounts.)

    All times come from one clock that never runs backwards.
    """

    def __init__(self, tuning: Tuning, default: Contract, now: float) -> None:
        self.tuning = tuning
        self.default = default  # gives the level its scale while no rate is known
        self.level = inf
        self.epoch = 0  # counts the times that the level became finite or infinite
        self.granted = 0.0  # the sum of level × seconds in this epoch: what a unit of weight could have had
        self._base = inf
        self._quiet_s = 0.0
        self._moved_at = now
        self._replicas: dict[str, _Replica] = {}

    @property
    def restricts(self) -> bool:
        """Whether the level is finite."""
        return self.level < inf

    def report(self, report: PressureReport, now: float) -> None:
        """Takes in what one replica says."""
        self.catch_up(now)
        known = self._replicas.get(report.replica)
        if known is None:
            known = self._replicas[report.replica] = _Replica(report, now)
        else:
            known.update(report, now)
        if now - self._moved_at >= _STEP_S:
            self._move(now)

    def catch_up(self, now: float) -> None:
        """Brings the level up to `now` when the replicas are silent. Silence is no pressure: the level rises."""
        if now - self._moved_at > self.tuning.silent_s:
            self._move(now)

    def granted_until(self, now: float) -> float:
        """`granted`, up to this moment."""
        return self.granted + self.level * max(0.0, now - self._moved_at) if self.restricts else self.granted

    @property
    def replicas(self) -> int:
        """Replicas that report."""
        return len(self._replicas)

    @property
    def pressure(self) -> float:
        """The queueing delay over its target, at least 0, as the better half of the replicas has it.

        The lower median: one slow replica must not throttle what the others could serve, and a request that finds one
        without a queue need not wait.
        """
        return _lower_median(replica.pressure(self.tuning) for replica in self._replicas.values())

    @property
    def queue_age_s(self) -> float:
        """How long the oldest request waits, as the better half of the replicas has it."""
        return _lower_median(replica.age_s for replica in self._replicas.values())

    @property
    def waiting(self) -> int:
        """Requests that wait, on all replicas."""
        return sum(replica.waiting for replica in self._replicas.values())

    @property
    def queued_prefill(self) -> int:
        """Tokens of prompts that wait or are being computed, on all replicas."""
        return sum(replica.queued_prefill for replica in self._replicas.values())

    @property
    def capacity(self) -> float:
        """Tokens per second that the replicas together were seen to do; 0 when not known yet.

        A replica that was never busy is taken for one like the others.
        """
        known = [replica.capacity for replica in self._replicas.values() if replica.capacity > 0]
        return sum(known) / len(known) * len(self._replicas) if known else 0.0

    def _move(self, now: float) -> None:
        dt = now - self._moved_at
        if dt <= 0:
            return
        tuning = self.tuning
        silent = [name for name, one in self._replicas.items() if now - one.heard_at > tuning.silent_s]
        for name in silent:
            del self._replicas[name]
        pressure = self.pressure
        self.granted = self.granted_until(now)
        self._moved_at = now
        self._quiet_s = self._quiet_s + dt if pressure < _QUIET else 0.0
        scale = self._scale()
        if self._base == inf:
            if pressure <= 1.0:
                return
            self._base = _ONSET * scale
            self.epoch += 1
            self.granted = 0.0
        error = max(-_MOST, min(1.0, 1.0 - pressure))  # above 0 there is room
        speed = tuning.gain * (1.0 + self._quiet_s / _ACCELERATION_S)
        share = log(self._base / scale)
        share += error * speed * dt
        share -= min(0.0, share) * (1.0 - exp(-_FORGETTING * dt))
        if share >= log(_FREE):
            self._base = self.level = inf
            self.epoch += 1
            return
        self._base = scale * exp(max(log(_LEAST), share))
        self.level = self._base * exp(tuning.damping * error)

    def _scale(self) -> float:
        """The level at which an account of the default weight has the whole capacity, or all of its contract."""
        rate = self.capacity or max(1, self.default.tpm) / 60.0
        return rate / max(1, self.default.weight)


class _Replica:
    """What one replica last said, and how fast it was seen to work."""

    __slots__ = (
        "_at_work",
        "_rate",
        "_seen",
        "_tokens_done",
        "_was_busy",
        "_worked_s",
        "age_s",
        "heard_at",
        "kv_used",
        "queued_prefill",
        "waiting",
    )

    def __init__(self, report: PressureReport, now: float) -> None:
        self._rate = 0.0
        self._seen = 0.0  # the highest rate, lower where work waited
        self._was_busy = False
        self._at_work = 0.0  # the rate while there was work, over the last such seconds
        self._worked_s = 0.0
        self._take(report, now)

    @property
    def capacity(self) -> float:
        """Tokens per second that it can do; 0 while it was never seen at work for long enough.

        What one stream alone is served at tells nothing of what a replica can do: by it, a single long prompt would
        seem to keep everybody waiting for minutes.
        """
        return max(self._seen, self._at_work) if self._worked_s >= _RATE_S else 0.0

    def update(self, report: PressureReport, now: float) -> None:
        dt = now - self.heard_at
        if dt > 0:
            done = report.tokens_done - self._tokens_done
            if done >= 0:  # else it has started anew under its old name
                self._measure(done / dt, dt, waited=self.waiting > 0 and report.waiting > 0)
                if self._was_busy and _has_work(report):
                    self._worked_s += dt
                    self._at_work += max(dt / self._worked_s, 1.0 - exp(-dt / _RATE_S)) * (done / dt - self._at_work)
        self._take(report, now)

    def pressure(self, tuning: Tuning) -> float:
        pressure = self.age_s / tuning.target_s
        if self.capacity > 0:
            pressure = max(pressure, self.queued_prefill / self.capacity / tuning.prefill_target_s)
        if self.kv_used >= tuning.kv_target and self.waiting:
            pressure = max(pressure, 1.0)
        return pressure

    def _measure(self, rate: float, dt: float, waited: bool) -> None:
        newest = 1.0 - exp(-dt / _RATE_S)
        self._rate += newest * (rate - self._rate)
        if self._rate > self._seen:
            self._seen = self._rate
        elif waited:
            # Only with work waiting is a low rate a sign of low capacity.
            self._seen += newest * (self._rate - self._seen)

    def _take(self, report: PressureReport, now: float) -> None:
        self.heard_at = now
        self.waiting = max(0, report.waiting)
        self.age_s = _sane(report.queue_age_s) if self.waiting else 0.0
        self.kv_used = _sane(report.kv_used)
        self.queued_prefill = max(0, report.queued_prefill_tokens)
        self._tokens_done = report.tokens_done
        self._was_busy = _has_work(report)


def _has_work(report: PressureReport) -> bool:
    """Whether more is there than what is being generated: requests that wait, or prompts to compute."""
    return report.waiting > 0 or report.queued_prefill_tokens > 0


def _lower_median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2] if ordered else 0.0


def _sane(value: float) -> float:
    return max(0.0, value) if isfinite(value) else 0.0
