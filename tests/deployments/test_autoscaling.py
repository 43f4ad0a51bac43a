"""The scaling policy as Serve runs it: pickled, with what replicas recorded, in Serve's own wrapper."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from ray.serve._private.autoscaling_state import _resolve_policy_callable
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from deployments.autoscaling import ScalingPolicy, signals_of
from deployments.strict_config import POLICY
from serve_app.scaling.signals import ReplicaLoad

DEPLOYMENT = DeploymentID("Model", "smollm2")
BUSY = ReplicaLoad(slots=16, running=16, waiting=5, queue_age_s=4.0, kv_used=0.5, tokens_per_s=900)
IDLE = ReplicaLoad(slots=16)


def config(**policy_kwargs: Any) -> AutoscalingConfig:
    return AutoscalingConfig(
        min_replicas=0,
        max_replicas=4,
        upscale_delay_s=0,
        downscale_delay_s=0,
        policy={"policy_function": POLICY, "policy_kwargs": policy_kwargs},
    )


def context(
    loads: list[ReplicaLoad | None], now: float, target: int | None = None, state: Any = None, **more: Any
) -> AutoscalingContext:
    """Returns the context that Serve's controller gives a policy. Each metric has an older value, too."""
    replicas = [ReplicaID(f"r{number}", DEPLOYMENT) for number in range(len(loads))]
    raw: dict[str, dict[ReplicaID, list[TimeStampedValue]]] = {}
    for replica, load in zip(replicas, loads, strict=True):
        for name, value in load.metrics().items() if load is not None else ():
            raw.setdefault(name, {})[replica] = [TimeStampedValue(now - 5, 1.0), TimeStampedValue(now - 1, value)]
    values: dict[str, Any] = {
        "deployment_id": DEPLOYMENT,
        "deployment_name": "Model",
        "app_name": "smollm2",
        "current_num_replicas": len(loads),
        "target_num_replicas": len(loads) if target is None else target,
        "running_replicas": replicas,
        "total_num_requests": sum(load.running for load in loads if load),
        "total_queued_requests": lambda: 0.2,
        "aggregated_metrics": None,
        "raw_metrics": lambda: raw,
        "capacity_adjusted_min_replicas": 0,
        "capacity_adjusted_max_replicas": 4,
        "policy_state": state or {},
        "last_scale_up_time": None,
        "last_scale_down_time": None,
        "current_time": now,
        "config": config(),
    }
    return AutoscalingContext(**values | more)


def test_the_rule_sees_the_last_value_of_each_replica_and_what_waits_in_handles() -> None:
    seen = signals_of(context([BUSY, None], 1000.0, total_queued_requests=2.6))
    assert seen.replicas == (BUSY, None)
    assert (seen.now, seen.target, seen.held, seen.least, seen.most) == (1000.0, 2, 3, 0, 4)
    assert signals_of(context([], 1000.0)).replicas == ()


def test_serve_can_pickle_the_policy_and_its_own_wrapper_changes_nothing_of_what_the_rule_says() -> None:
    policy = _apply_autoscaling_config(_resolve_policy_callable(config(down_after_s=60).policy))
    wanted, state = policy(context([BUSY], 1000.0))
    assert wanted == 2
    held, state = policy(context([IDLE, IDLE], 1002.0, state=state))
    assert held == 2
    for second in range(1003, 1150, 4):
        wanted, state = policy(context([IDLE] * wanted, float(second), state=state))
    assert wanted == 1
    for second in range(1150, 1800, 4):
        wanted, state = policy(context([IDLE] * wanted, float(second), state=state))
    assert wanted == 0


def test_from_zero_a_waiting_request_starts_a_replica_and_the_rule_keeps_it() -> None:
    policy = _apply_autoscaling_config(_resolve_policy_callable(config().policy))
    assert policy(context([], 1000.0))[0] == 0
    wanted, state = policy(context([], 1001.0, total_num_requests=1.0, total_queued_requests=1.0))
    assert wanted == 1
    assert policy(context([], 1002.0, target=1, state=state, total_num_requests=1.0))[0] == 1
    assert policy(context([None], 1003.0, state=state))[0] == 1


def test_a_change_is_logged_once_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    policy = ScalingPolicy()
    with caplog.at_level(logging.INFO, "ray.serve"):
        wanted, state = policy(context([BUSY], 1000.0))
        policy(context([BUSY], 1002.0, target=wanted, state=state))
    assert {record.getMessage() for record in caplog.records} == {
        "smollm2: 2 replicas instead of 1, for a need of 2.00: requests wait too long"
    }


def test_a_wrong_setting_is_refused_before_serve_runs_it() -> None:
    with pytest.raises(ValueError, match="fil"):
        ScalingPolicy(fil=1)
