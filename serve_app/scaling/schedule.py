"""Minimum and maximum replicas by time of day and day of the week."""

from __future__ import annotations

from datetime import datetime, time
from typing import Annotated, Final, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
DAYS: Final[tuple[Day, ...]] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


class Hours(BaseModel):
    """Hours on some days. `until` before `since` means the next morning; equal values mean the whole day."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    days: tuple[Day, ...] = DAYS
    """Days on which the hours begin."""
    since: time = time(0)
    """Local time at which the hours begin."""
    until: time = time(0)
    """Local time at which the hours end. Before `since`: on the next day; equal to `since`: after 24 hours."""
    timezone: str = "UTC"
    """IANA time zone, such as Europe/Berlin."""
    min_replicas: Annotated[int | None, Field(ge=0)] = None
    """Minimum number of replicas in these hours. Default: Serve's `min_replicas`."""
    max_replicas: Annotated[int | None, Field(ge=1)] = None
    """Maximum number of replicas in these hours. Default: Serve's `max_replicas`."""

    @field_validator("timezone")
    @classmethod
    def _known(cls, value: str) -> str:
        try:
            ZoneInfo(value)
        except (ZoneInfoNotFoundError, ValueError):
            raise ValueError(f"there is no time zone {value!r}; write one like Europe/Berlin") from None
        return value

    @field_validator("since", "until")
    @classmethod
    def _local(cls, value: time) -> time:
        if value.tzinfo is not None:
            raise ValueError("must have no UTC offset: the entry's timezone applies")
        return value

    @model_validator(mode="after")
    def _bounds_fit(self) -> Hours:
        if self.min_replicas is not None and self.max_replicas is not None and self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas ({self.min_replicas}) is above max_replicas ({self.max_replicas})")
        return self

    def contains(self, at: float) -> bool:
        """Returns whether a time, in Unix seconds, is within these hours."""
        local = datetime.fromtimestamp(at, ZoneInfo(self.timezone))
        today, yesterday = DAYS[local.weekday()], DAYS[local.weekday() - 1]
        now = local.time()
        if self.since < self.until:
            return today in self.days and self.since <= now < self.until
        return (today in self.days and now >= self.since) or (yesterday in self.days and now < self.until)


def bounds(schedule: tuple[Hours, ...], least: int, most: int, at: float) -> tuple[int, int]:
    """Returns the minimum and maximum replicas at a time in Unix seconds. `least` and `most` apply to all hours."""
    hours = next((hours for hours in schedule if hours.contains(at)), None)
    if hours is None:
        return least, most
    upper = most if hours.max_replicas is None else min(most, hours.max_replicas)
    lower = least if hours.min_replicas is None else max(least, hours.min_replicas)
    return min(lower, upper), upper
