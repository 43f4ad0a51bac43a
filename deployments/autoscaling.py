"""The scaling rule as a Serve policy: `policy_function: deployments.autoscaling:ScalingPolicy` in config.yaml.

Serve pickles this module by value and calls the policy in its controller, about ten times a second. The
controller must be able to import this module's imports. Replicas record their load (`record_autoscaling_stats` in
deployments/model.py), and Serve passes the records to the policy.
"""

from __future__ import annotations

import logging
from typing import Any

from ray.serve.config import AutoscalingContext

from serve_app.scaling.rule import State, decide
from serve_app.scaling.scaling_settings import ScalingSettings
from serve_app.scaling.signals import ReplicaLoad, Signals


class ScalingPolicy:
    """The policy of one deployment. Serve creates it with `policy_kwargs` as keyword arguments.

    Serve can delay the changes that a policy returns. The rule has its own delays, so config.yaml must set Serve's two
    delays to 0 (deployments/strict_config.py checks this). With zero replicas, Serve starts the first one without
    calling the policy.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = ScalingSettings.model_validate(settings)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        known: State | None = context.policy_state.get("rule")
        decision = decide(self._settings, known, signals_of(context))
        if decision.reason and decision.wanted != context.target_num_replicas:
            logging.getLogger("ray.serve").info(
                "%s: %d replicas instead of %d, for a need of %.2f: %s",
                context.app_name,
                decision.wanted,
                context.target_num_replicas,
                decision.need,
                decision.reason,
            )
        return decision.wanted, {"rule": decision.state}


def signals_of(context: AutoscalingContext) -> Signals:
    """Converts Serve's data about a deployment to the rule's signals."""
    latest: dict[Any, dict[str, float]] = {replica: {} for replica in context.running_replicas}
    for name, by_replica in (context.raw_metrics or {}).items():
        for replica, series in by_replica.items():
            if series and replica in latest:
                latest[replica][name] = series[-1].value
    return Signals(
        now=float(context.current_time),
        replicas=tuple(ReplicaLoad.of_metrics(latest[replica]) for replica in context.running_replicas),
        target=context.target_num_replicas,
        held=round(context.total_queued_requests or 0.0),  # a mean over the look-back period
        least=context.capacity_adjusted_min_replicas,
        most=context.capacity_adjusted_max_replicas,
    )
