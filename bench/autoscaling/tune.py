"""Chooses each policy's settings for each shape: the cheapest that meet the targets on days that are not reported."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from bench.autoscaling.baselines import KedaTuning, ServeTuning
from bench.autoscaling.days import TUNED_ON, Job, Tuning, meets
from bench.autoscaling.foresight import ForesightTuning
from serve_app.scaling.scaling_settings import ScalingSettings

Simulate = Callable[[Iterable[Job]], list[dict[str, Any]]]  # simulates several days, and returns their figures in order

# All of these use a mean over 30 s and a short delay, which is better on most days. Only `serve_neighbours` also tries
# a mean over 10 s without delay.
SERVE = [
    ServeTuning(target, 15.0, down_s, 30.0)
    for target in (4.0, 6.0, 8.0, 10.0, 12.0, 14.0)
    for down_s in (300.0, 600.0, 900.0)
]
KEDA = [KedaTuning(threshold, True, down_s) for threshold in (6.0, 8.0, 10.0, 12.0, 14.0) for down_s in (300.0, 900.0)]
RULE = [
    ScalingSettings(),
    ScalingSettings(spare=0.25, smooth_s=45.0),
    ScalingSettings(fill=0.9, smooth_s=20.0, down_after_s=600.0),
    ScalingSettings(fill=0.8, smooth_s=20.0, down_after_s=600.0),
]

FORESIGHT = [
    ForesightTuning(mean_s, fill) for mean_s, fill in ((30.0, 0.6), (30.0, 0.8), (60.0, 0.8), (60.0, 1.0), (120.0, 1.0))
]

# The settings that `tuned` chose.
CHOSEN: dict[str, dict[str, Tuning]] = {
    "conversation": {
        "rule": ScalingSettings(spare=0.25, smooth_s=45.0),
        "serve": ServeTuning(12.0, 15.0, 300.0, 30.0),
        "keda": KedaTuning(12.0, True, 300.0),
        "foresight": ForesightTuning(120.0, 1.0),
    },
    "code": {
        "rule": ScalingSettings(fill=0.9, smooth_s=20.0, down_after_s=600.0),
        "serve": ServeTuning(10.0, 0.0, 900.0, 10.0),
        "keda": KedaTuning(8.0, True, 900.0),
        "foresight": ForesightTuning(30.0, 0.8),
    },
    "bursts": {
        "rule": ScalingSettings(),
        "serve": ServeTuning(12.0, 15.0, 600.0, 30.0),
        "keda": KedaTuning(12.0, True, 300.0),
        "foresight": ForesightTuning(60.0, 1.0),
    },
}
BEFORE = ServeTuning(8.0)  # earlier settings of cluster/: a target of half the slots, and Serve's default delays


def serve_neighbours(best: ServeTuning) -> list[ServeTuning]:
    """Returns variations of `best` to try: fast upscaling with two delays of downscaling, and a factor of 2."""
    return [
        replace(best, upscale_delay_s=0.0, look_back_period_s=10.0),
        replace(best, upscale_delay_s=0.0, look_back_period_s=10.0, downscale_delay_s=900.0),
        replace(best, upscaling_factor=2.0),
    ]


def best(tried: list[tuple[Tuning, dict[str, Any]]]) -> Tuning:
    """Returns the cheapest settings that meet the targets. If none do, those that refuse the fewest requests."""
    good = [one for one in tried if meets(one[1])]
    if good:
        return min(good, key=lambda one: float(one[1]["cost"]))[0]
    return min(tried, key=lambda one: float(one[1]["refused"]))[0]


def tuned(shapes: Iterable[str], simulate: Simulate) -> tuple[dict[str, dict[str, Tuning]], list[dict[str, Any]]]:
    """Returns each policy's best settings for each shape, and every day that was tried."""
    shapes = list(shapes)
    tried: dict[tuple[str, str], list[tuple[Tuning, dict[str, Any]]]] = {}

    def attempt(wanted: list[tuple[str, str, Tuning]]) -> None:
        days = simulate(Job(shape, tuning, TUNED_ON, True) for shape, _, tuning in wanted)
        for (shape, policy, tuning), figures in zip(wanted, days, strict=True):
            tried.setdefault((shape, policy), []).append((tuning, figures | {"policy": policy}))

    grids: dict[str, list[Any]] = {"serve": SERVE, "keda": KEDA, "rule": RULE, "foresight": FORESIGHT}
    attempt([(shape, policy, tuning) for shape in shapes for policy, grid in grids.items() for tuning in grid])
    around: list[tuple[str, str, Tuning]] = []
    for shape in shapes:
        found = best(tried[shape, "serve"])
        assert isinstance(found, ServeTuning)
        around += [(shape, "serve", tuning) for tuning in serve_neighbours(found)]
    attempt(around)
    chosen = {shape: {policy: best(tried[shape, policy]) for policy in grids} for shape in shapes}
    return chosen, [figures for attempts in tried.values() for _, figures in attempts]
