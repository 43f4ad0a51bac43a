"""The rule's input: the load of each replica, and the demand that waits or was refused outside the replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import exp
from typing import Final

from serve_app.contracts.limiting import PressureReport

QUEUED: Final = "queued_prefill_tokens"
MIN_QUEUED: Final = 1024  # tokens; fewer count as 0
RATE_S: Final = 5.0  # time constant of the measured rate


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """The load of one replica at its last report. The field names are those of the metrics that Serve gets."""

    slots: float  # maximum number of sequences that the replica computes together
    running: float = 0.0
    waiting: float = 0.0
    queue_age_s: float = 0.0
    kv_used: float = 0.0  # 0 to 1
    queued_prefill_tokens: float = 0.0
    tokens_per_s: float = 0.0  # tokens of started prompts and of output, averaged over the last seconds
    refused_tokens_per_s: float = 0.0  # for the whole backend: each replica reports the same value

    def metrics(self) -> dict[str, float]:
        """Returns the load in the form that Serve expects from `record_autoscaling_stats`."""
        return asdict(self)

    def routing_stats(self) -> dict[str, int]:
        """Returns the prompt tokens that wait in the engine, in the form of `record_routing_stats`.

        Serve sends each change to every gateway. The number is therefore rounded down to a power of two.
        """
        queued = int(self.queued_prefill_tokens)
        return {QUEUED: 1 << (queued.bit_length() - 1) if queued >= MIN_QUEUED else 0}

    @classmethod
    def of_metrics(cls, values: Mapping[str, float]) -> ReplicaLoad | None:
        """Returns the load from the last values of these metrics.

        Returns None if a value is missing, because the replica has not reported yet.
        """
        names = [field.name for field in fields(cls)]
        return cls(**{name: values[name] for name in names}) if all(name in values for name in names) else None


@dataclass(frozen=True, slots=True)
class Signals:
    """The state of a backend at the time `now`, in Unix seconds."""

    now: float
    replicas: tuple[ReplicaLoad | None, ...]  # replicas that take requests; None: not reported yet
    target: int  # desired number of replicas, including starting ones
    held: float = 0.0  # requests that wait outside the replicas, for any of them
    least: int = 1
    most: int = 1


class LoadMeter:
    """Measures one replica's token rate, and builds its load from reports."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._rate = 0.0
        self._tokens: int | None = None
        self._at = 0.0

    def take(self, report: PressureReport, refused_tokens_per_s: float, now: float) -> ReplicaLoad:
        """Returns the load for this report. `now` must not decrease."""
        passed = now - self._at
        if self._tokens is not None and passed > 0 and report.tokens_done >= self._tokens:
            seen = (report.tokens_done - self._tokens) / passed
            self._rate += (1.0 - exp(-passed / RATE_S)) * (seen - self._rate)
        self._tokens, self._at = report.tokens_done, now
        return ReplicaLoad(
            slots=self._slots,
            running=report.running,
            waiting=report.waiting,
            queue_age_s=report.queue_age_s,
            kv_used=report.kv_used,
            queued_prefill_tokens=report.queued_prefill_tokens,
            tokens_per_s=self._rate,
            refused_tokens_per_s=refused_tokens_per_s,
        )
