"""A policy that knows future requests. It shows the minimum cost of a day; a real service cannot use it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from math import ceil

from bench.simulation.cluster import Arrival, Fleet
from bench.simulation.replica import Device
from serve_app.scaling.signals import Signals

STEP_S = 10.0
SLOWEST = 1.2  # longest start, as a multiple of `Fleet.start_s`


@dataclass(frozen=True, slots=True)
class ForesightTuning:
    """The load is averaged over `mean_s` seconds, and may use the share `fill` of each replica."""

    mean_s: float
    fill: float


class Foresight:
    """Starts replicas in time for the load.

    Stops a surplus replica immediately, unless it is needed again before a new one could start.
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
    """Seconds of a replica's time that a request takes if all slots are in use."""
    step_s = (device.step_s + device.row_s * device.slots) / device.slots
    return arrival.prompt / device.prefill_per_s + arrival.output * step_s
