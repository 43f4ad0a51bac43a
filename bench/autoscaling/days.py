"""Simulates one day of one shape under one policy, and returns its figures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from bench.autoscaling.baselines import KedaPolicy, KedaTuning, ServePolicy, ServeTuning
from bench.autoscaling.foresight import Foresight, ForesightTuning
from bench.autoscaling.traffic import ACCOUNTS, DAY_S, SHAPES, arrivals
from bench.simulation.cluster import Arrival, Cluster, Fleet, Policy
from bench.simulation.outcome import Outcome
from bench.simulation.policies import Rule
from bench.simulation.replica import Device
from serve_app.scaling.scaling_settings import ScalingSettings

# A large, slow model in round figures: even a day that needs many replicas has few requests to simulate.
DEVICE = Device(slots=16, max_waiting=48, kv_tokens=60_000, prefill_per_s=4_000.0, step_s=0.060, row_s=0.002)
FLEET = Fleet(device=DEVICE, least=1, most=10, start_s=90.0, price_per_hour=10.0, report_s=2.0)
TUNED_ON = 100  # seed of the days on which settings are chosen; reported days have other seeds
TUNED_HOURS = 5.0, 13.0  # from a quiet hour to a busy one
WINDOW_S = 600.0  # each point of the plot is the mean of this time

Tuning = ScalingSettings | ServeTuning | KedaTuning | ForesightTuning


@dataclass(frozen=True, slots=True)
class Job:
    """A day to simulate. A `tuning_day`, used to choose settings, consists only of `hours`."""

    shape: str
    tuning: Tuning
    seed: int
    tuning_day: bool = False
    hours: tuple[float, float] = TUNED_HOURS  # first and last hour of a tuning day


def policy_of(tuning: Tuning, requests: Iterable[Arrival], seconds: float) -> Policy:
    if isinstance(tuning, ServeTuning):
        return ServePolicy(tuning, FLEET.least, FLEET.most)
    if isinstance(tuning, ForesightTuning):
        return Foresight(tuning, FLEET, requests, seconds)
    return KedaPolicy(tuning) if isinstance(tuning, KedaTuning) else Rule(tuning)


def simulate(job: Job) -> dict[str, Any]:
    """Simulates a day and returns its figures, for JSON."""
    since_s, until_s = (job.hours[0] * 3600.0, job.hours[1] * 3600.0) if job.tuning_day else (0.0, DAY_S)
    requests = list(arrivals(SHAPES[job.shape], job.seed, until_s - since_s, since_s))
    cluster = Cluster(FLEET, policy_of(job.tuning, requests, until_s - since_s), ACCOUNTS, seed=job.seed)
    outcome = cluster.run(requests, until_s - since_s)
    settings = job.tuning.model_dump(mode="json") if isinstance(job.tuning, ScalingSettings) else asdict(job.tuning)
    return {
        "shape": job.shape,
        "seed": job.seed,
        "settings": settings,
        "requests": outcome.requests,
        "refused": outcome.refused_share,
        "given_up": outcome.given_up / max(1, outcome.requests),
        "queued_p95_s": outcome.queued_p95_s,
        "first_p95_s": outcome.first_p95_s,
        "cost": outcome.cost,
        "changes": outcome.changes,
        "replicas": windows(outcome),
    }


def windows(outcome: Outcome) -> list[float]:
    """Mean number of paid replicas in each window."""
    size = int(WINDOW_S / FLEET.look_s)
    return [
        sum(chunk) / len(chunk) for at in range(0, len(outcome.paid), size) if (chunk := outcome.paid[at : at + size])
    ]


def meets(figures: dict[str, Any]) -> bool:
    """Returns whether a day meets the targets of its shape."""
    shape = SHAPES[figures["shape"]]
    return bool(figures["refused"] <= shape.most_refused and figures["first_p95_s"] <= shape.first_token_s)
