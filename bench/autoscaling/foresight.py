"""A policy that knows the requests to come: how cheap a day could be. No running service can have it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from math import ceil

from bench.simulation.cluster import Arrival, Fleet
from bench.simulation.replica import Device
from serve_app.scaling.signals import Signals

STEP_S = 10.0
SLOWEST = 1.2  # a start takes up to so many times `Fleet.start_s`


@dataclass(frozen=True, slots=True)
class ForesightTuning:
    """The load is meant over `mean_s` seconds, and `fill` of each replica is used by it."""

    mean_s: float
    fill: float


class Foresight:
    """Has at each moment the replicas for the load of that moment: starts them in time, and ends them at once.

    A replica that is needed again before another one could have started stays.
    """

    def __init__(self, tuning: ForesightTuning, fleet: Fleet, arrivals: Iterable[Arrival], seconds: float) -> None:
        ahead = ceil(fleet.start_s * SLOWEST / STEP_S)
        work = [0.0] * (int(seconds / STEP_S) + ahead + 2)
        for arrival in arrivals:
            work[int(arrival.at / STEP_S)] += full_s(fleet.device, arrival)
        sums = [0.0, *accumulate(work)]
        steps = max(1, round(tuning.mean_s / STEP_S))
        loads = [(sums[at] - sums[max(0, at - steps)]) / (steps * STEP_S) for at in range(1, len(sums))]
        self._needs = [ceil(load / tuning.fill - 1e-6) for load in loads]
        self._ahead = ahead

    def wanted(self, signals: Signals) -> int:
        now = int(signals.now / STEP_S)
        kept = max(self._needs[now : now + self._ahead + 1])
        return max(self._needs[now + self._ahead], min(signals.target, kept))


def full_s(device: Device, arrival: Arrival) -> float:
    """Seconds for which a request keeps a replica that is full of such requests."""
    step_s = (device.step_s + device.row_s * device.slots) / device.slots
    return arrival.prompt / device.prefill_per_s + arrival.output * step_s
