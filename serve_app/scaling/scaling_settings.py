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

    model_config = ConfigDict(extra="forbid", frozen=True)

    fill: Annotated[float, Field(gt=0, le=1)] = 1.0  # share of a replica that may be in use when nothing waits
    # Room for random demand: this factor times the square root of the running sequences.
    spare: Annotated[float, Field(ge=0, le=10)] = 0.5
    queue_age_s: Annotated[float, Field(gt=0, le=600)] = 1.0  # a queue of this age adds one replica
    prefill_s: Annotated[float, Field(gt=0, le=600)] = 3.0  # a replica with this much prompt work is full
    # Smoothing time of the load. Old queues and refusals take effect at once.
    smooth_s: Annotated[float, Field(gt=0, le=600)] = 30.0
    down_after_s: Seconds = 150.0  # replicas stay for the highest need within this time
    zero_after_s: Seconds = 600.0  # idle time before the last replica stops, if the minimum is 0
    schedule: tuple[Hours, ...] = ()  # the first entry that contains the current time sets the bounds
