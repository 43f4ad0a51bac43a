"""Figures of a run: times to the first token in a window, failures, flaps of the health checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bench.harness.results import percentile

SETTLED: Final = 3.0  # a first token is late after more than this multiple of the calm p99


@dataclass(frozen=True, slots=True)
class Sent:
    """One ordinary request. Times are seconds of one monotonic clock."""

    began_at: float  # before the connection was opened
    first_at: float | None  # of the first token; None without a token
    ended_at: float | None  # None when the client gave up
    status: int  # 0: no response
    is_whole: bool  # complete, with its usage
    is_new: bool = False  # the first use of a valid key


@dataclass(frozen=True, slots=True)
class Probe:
    """One request to /health or /ready."""

    path: str
    began_at: float
    ended_at: float
    status: int  # 0: no response in time


def window(requests: Iterable[Sent], since: float, until: float, given_up_s: float) -> dict[str, Any]:
    """Returns the figures of the requests that began in [since, until).

    `p50`, `p99` and `worst` are seconds to the first token, for requests whose key was used before. If the client gave
    up before the first token, the request counts as a wait of `given_up_s`. Leaving it out would improve the figures.
    """
    there = [one for one in requests if since <= one.began_at < until]
    known = [one for one in there if not one.is_new]
    waits = [
        given_up_s if one.first_at is None else one.first_at - one.began_at
        for one in known
        if one.first_at is not None or one.ended_at is None
    ]
    new = [one for one in there if one.is_new]
    return {
        "seconds": until - since,
        "sent": len(there),
        "samples": len(waits),
        "p50": percentile(waits, 0.5),
        "p99": percentile(waits, 0.99),
        "worst": max(waits, default=None),
        "failed": sum(not one.is_whole for one in there),
        "statuses": {str(status): count for status, count in sorted(Counter(one.status for one in there).items())},
        "new_keys": len(new),
        "new_keys_failed": sum(not one.is_whole for one in new),
    }


def health(probes: Iterable[Probe], since: float, until: float) -> dict[str, Any]:
    """Returns the figures of the probes that began in [since, until). A flap is a failed probe after a good one."""
    failed = flaps = sent = 0
    slowest: float | None = None
    good: dict[str, bool] = {}
    for one in sorted(probes, key=lambda probe: probe.began_at):
        if one.began_at >= until:
            break
        is_good = one.status == 200
        if one.began_at >= since:
            sent += 1
            failed += not is_good
            flaps += not is_good and good.get(one.path, True)
            slowest = max(slowest or 0.0, one.ended_at - one.began_at)
        good[one.path] = is_good
    return {"sent": sent, "failed": failed, "flaps": flaps, "slowest": slowest}


def factor(calm: dict[str, Any], other: dict[str, Any]) -> float | None:
    """Ratio of `other`'s 99th percentile to `calm`'s; None if either has no samples."""
    if calm["p99"] is None or other["p99"] is None:
        return None
    return float(other["p99"] / calm["p99"])


def is_settled(requests: Sequence[Sent], since: float, calm_p99: float | None) -> bool:
    """Returns whether requests began after `since`, and all of them got complete replies with a timely first token."""
    if calm_p99 is None:
        return True
    there = [one for one in requests if one.began_at >= since and not one.is_new]
    return bool(there) and all(
        one.is_whole and one.first_at is not None and one.first_at - one.began_at <= SETTLED * calm_p99 for one in there
    )


def recovered_s(requests: Iterable[Sent], since: float, until: float, calm_p99: float | None) -> float:
    """Seconds from `since`, the attack's end, to the last request before `until` that failed or waited too long."""
    late = [
        one.began_at
        for one in requests
        if since <= one.began_at < until
        and not one.is_new
        and not (
            one.is_whole
            and one.first_at is not None
            and (calm_p99 is None or one.first_at - one.began_at <= SETTLED * calm_p99)
        )
    ]
    return max(late) - since if late else 0.0


def judged(
    requests: Sequence[Sent], probes: Sequence[Probe], marks: dict[str, tuple[float, float]], given_up_s: float
) -> dict[str, Any]:
    """Returns an attack's figures. `marks` has each window's start and end; the window `control` is optional."""
    windows = {name: window(requests, *mark, given_up_s) for name, mark in marks.items()}
    calm = windows["calm"]
    return {
        "windows": windows,
        "health": {name: health(probes, *mark) for name, mark in marks.items()},
        "factor": factor(calm, windows["attack"]),
        "control_factor": factor(calm, windows["control"]) if "control" in windows else None,
        "recovered_s": recovered_s(requests, *marks["recovery"], calm["p99"]),
    }
