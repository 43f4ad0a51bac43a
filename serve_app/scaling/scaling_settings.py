"""What an operator sets of the rule: `policy_kwargs` of a backend's autoscaling policy in config.yaml."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from serve_app.scaling.schedule import Hours

Seconds = Annotated[float, Field(ge=0, le=86_400)]


class ScalingSettings(BaseModel):
    """Times are seconds. The least and the most replicas of all hours are Serve's `min_replicas` and `max_replicas`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    fill: Annotated[float, Field(gt=0, le=1)] = 1.0  # of a replica, that may be in use when nothing waits
    # Room for what comes at random: so many times the square root of the sequences that run.
    spare: Annotated[float, Field(ge=0, le=10)] = 0.5
    queue_age_s: Annotated[float, Field(gt=0, le=600)] = 1.0  # a queue this old asks for one replica more
    prefill_s: Annotated[float, Field(gt=0, le=600)] = 3.0  # a replica with so much work in prompts is full
    # Over which the load is smoothed. Old queues and refusals are acted on at once.
    smooth_s: Annotated[float, Field(gt=0, le=600)] = 30.0
    down_after_s: Seconds = 150.0  # replicas stay for the highest need of this time
    zero_after_s: Seconds = 600.0  # without any request, before the last replica goes, where the minimum is 0
    schedule: tuple[Hours, ...] = ()  # the first entry that contains a moment bounds the replicas then
