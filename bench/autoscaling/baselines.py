"""Policies to compare this service's scaling rule with: Ray Serve's policy (its code) and KEDA's on queue depth."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from ray.serve import autoscaling_policy
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from serve_app.scaling.signals import Signals


@dataclass(frozen=True, slots=True)
class ServeTuning:
    """Settings of Serve's `autoscaling_config`. The default values are Serve's."""

    target_ongoing_requests: float
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    look_back_period_s: float = 30.0
    upscaling_factor: float = 1.0


class ServePolicy:
    """`replica_queue_length_autoscaling_policy` with its delays and factors, using the functions of Ray 2.60.

    Ray's wrapper reads the wall clock, so `wanted` calls the wrapper's steps itself, with the simulated time.
    """

    def __init__(self, tuning: ServeTuning, least: int, most: int) -> None:
        self._config = AutoscalingConfig(
            min_replicas=least,
            max_replicas=most,
            target_ongoing_requests=tuning.target_ongoing_requests,
            upscale_delay_s=tuning.upscale_delay_s,
            downscale_delay_s=tuning.downscale_delay_s,
            look_back_period_s=max(10.001, tuning.look_back_period_s),
            upscaling_factor=tuning.upscaling_factor,
        )
        self._look_back_s = tuning.look_back_period_s
        self._ongoing: deque[tuple[float, float]] = deque()
        self._sum = 0.0
        self._state: dict[str, Any] = {}

    def wanted(self, signals: Signals) -> int:
        context = self._context(signals)
        cold = autoscaling_policy._get_cold_start_scale_up_replicas(context)
        if cold is not None:
            return int(cold)
        desired, _ = autoscaling_policy._core_replica_queue_length_policy(context)
        scaled = autoscaling_policy._apply_scaling_factors(desired, context.current_num_replicas, self._config)
        decided, self._state = autoscaling_policy._apply_delay_logic(
            max(0, scaled), context.target_num_replicas, self._config, self._state, _now=signals.now
        )
        return int(decided)

    def _context(self, signals: Signals) -> AutoscalingContext:
        ongoing = signals.held + sum(load.running + load.waiting for load in signals.replicas if load is not None)
        self._ongoing.append((signals.now, ongoing))
        self._sum += ongoing
        while self._ongoing[0][0] <= signals.now - self._look_back_s:
            self._sum -= self._ongoing.popleft()[1]
        nothing: dict[str, Any] = dict.fromkeys(
            ("deployment_id", "deployment_name", "app_name", "aggregated_metrics", "raw_metrics", "current_time"),
        )
        return AutoscalingContext(
            **nothing,
            current_num_replicas=len(signals.replicas),
            target_num_replicas=signals.target,
            running_replicas=[],
            total_num_requests=self._sum / len(self._ongoing),
            total_queued_requests=signals.held,
            capacity_adjusted_min_replicas=signals.least,
            capacity_adjusted_max_replicas=signals.most,
            policy_state=self._state,
            last_scale_up_time=None,
            last_scale_down_time=None,
            config=self._config,
        )


@dataclass(frozen=True, slots=True)
class KedaTuning:
    """A Prometheus trigger on the queue's depth, with the HPA's settings that KEDA passes on."""

    threshold: float
    counts_running: bool  # whether running requests count, like messages in progress for KEDA's queue triggers
    stabilization_s: float = 300.0  # delay before scaling down; this is the default of KEDA and the HPA
    sync_s: float = 15.0  # between two decisions of the HPA


@dataclass(slots=True)
class KedaPolicy:
    """The HPA's rule for an external metric with AverageValue: total depth / threshold, rounded up.

    A change of at most 10% is ignored. One sync can double the replicas or add four, whichever is more. Scaling down
    stops at the highest number wanted within the stabilization window (Kubernetes' documentation, "Algorithm details"
    and "Default behavior").
    """

    tuning: KedaTuning
    _wishes: deque[tuple[float, int]] = field(default_factory=deque)
    _next: float = 0.0

    def wanted(self, signals: Signals) -> int:
        if signals.now < self._next:
            return signals.target
        self._next = signals.now + self.tuning.sync_s
        loads = [load for load in signals.replicas if load is not None]
        depth = signals.held + sum(load.waiting + self.tuning.counts_running * load.running for load in loads)
        target = max(1, signals.target)
        wish = signals.target if abs(depth / self.tuning.threshold / target - 1.0) <= 0.1 else 0
        wish = wish or max(signals.least, min(signals.most, ceil(depth / self.tuning.threshold)))
        self._wishes.append((signals.now, wish))
        while self._wishes[0][0] < signals.now - self.tuning.stabilization_s:
            self._wishes.popleft()
        if wish > signals.target:
            return min(wish, max(2 * target, signals.target + 4))
        return min(signals.target, max(one for _, one in self._wishes))
