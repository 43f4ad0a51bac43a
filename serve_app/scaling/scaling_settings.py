"""The scaling rule's settings: `policy_kwargs` of a backend's autoscaling policy in config.yaml."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from serve_app.scaling.schedule import Hours

Seconds = Annotated[float, Field(ge=0, le=86_400)]


class ScalingSettings(BaseModel):
    """Settings of the scaling rule. Times are in seconds.

    Serve's `min_replicas` and `max_replicas` are the minimum and maximum for all hours.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    fill: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the replicas' capacity that may be in use when nothing waits. Lower it if bursts are shorter than the
    time to start a replica."""
    spare: Annotated[float, Field(ge=0, le=10)] = 0.5
    """Spare capacity for random demand: this factor times the square root of the number of running sequences."""
    queue_age_s: Annotated[float, Field(gt=0, le=600)] = 1.0
    """Queue age in seconds (the lower median of the replicas) that adds one replica."""
    prefill_s: Annotated[float, Field(gt=0, le=600)] = 3.0
    """Seconds of queued prompt work with which a replica counts as full."""
    smooth_s: Annotated[float, Field(gt=0, le=600)] = 30.0
    """Smoothing time of the load, in seconds. Long waits and refused requests take effect immediately."""
    down_after_s: Seconds = 150.0
    """Seconds for which the backend keeps enough replicas for its highest need. Raise it if bursts return, or if a
    replica takes minutes to start."""
    zero_after_s: Seconds = 600.0
    """Idle seconds before the last replica stops; only with `min_replicas` 0."""
    schedule: tuple[Hours, ...] = ()
    """Limits by time of day. The first entry that matches the current time applies, within Serve's `min_replicas` and
    `max_replicas`."""
