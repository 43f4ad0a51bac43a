"""The figures of a run's requests: goodput, shares, times to the first token, and targets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from bench.harness.results import percentile

MIN_GOODPUT: Final = 0.9  # minimum goodput, as a share of the capacity without overload
MAX_DEVIATION: Final = 0.1  # maximum relative deviation from an account's share by weight
MAX_TTFT_S: Final = 12.0  # p99 of admitted requests: four times the queueing delay that config.yaml aims at


@dataclass(frozen=True, slots=True)
class Sent:
    """One request. Times are seconds of one monotonic clock. `first_at` is None if there was no token."""

    account: str
    sent_at: float
    ended_at: float
    status: int  # 0: the connection broke before a status
    tokens: int = 0  # output tokens, as billed; 0 if the reply is incomplete
    first_at: float | None = None
    retry_after: bool = False  # the reply has a retry-after header
    is_broken: bool = False  # the reply ended without its usage
    prompt_tokens: int = 0  # as billed


def goodput(requests: Sequence[Sent], since: float, until: float) -> float:
    """Output tokens per second, of complete replies that ended between `since` and `until`."""
    return sum(one.tokens for one in requests if since <= one.ended_at < until) / (until - since)


def shares(requests: Sequence[Sent], since: float, until: float) -> dict[str, float]:
    """Each account's share of the goodput."""
    tokens: Counter[str] = Counter()
    for one in requests:
        if since <= one.ended_at < until:
            tokens[one.account] += one.tokens
    total = sum(tokens.values())
    return {account: count / total for account, count in tokens.items()} if total else {}


def summary(
    requests: Sequence[Sent], weights: dict[str, int], capacity: float, since: float, until: float
) -> dict[str, Any]:
    """Returns the results of the overload, for JSON. `capacity` is the goodput of a full, not overloaded service."""
    counted = [one for one in requests if since <= one.sent_at < until]
    waits = [one.first_at - one.sent_at for one in counted if one.first_at is not None]
    reached = goodput(requests, since, until)
    found = shares(requests, since, until)
    all_weights = sum(weights.values())
    return {
        "seconds": until - since,
        "sent": len(counted),
        "statuses": {str(status): count for status, count in sorted(Counter(one.status for one in counted).items())},
        "refusals_without_retry_after": sum(one.status in (429, 503) and not one.retry_after for one in counted),
        "broken": sum(one.is_broken for one in counted),
        "goodput": reached,
        "goodput_of_capacity": reached / capacity if capacity else 0.0,
        "ttft_s": {name: percentile(waits, part) for name, part in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))},
        "accounts": [
            {
                "account": account,
                "weight": weight,
                "by_weight": weight / all_weights,
                "share": found.get(account, 0.0),
                "off": found.get(account, 0.0) * all_weights / weight - 1,
                "sent": sum(one.account == account for one in counted),
                "served": sum(one.account == account and one.status == 200 for one in counted),
            }
            for account, weight in weights.items()
        ],
    }


def promises(found: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """Each promise, the figure of the run, and whether it holds."""
    worst = max(found["accounts"], key=lambda one: abs(one["off"]))
    others = sorted(set(found["statuses"]) - {"200", "429", "503"})
    wait = found["ttft_s"]["p99"]
    without_time = found["refusals_without_retry_after"]
    return [
        (
            f"goodput at least {MIN_GOODPUT:.0%} of the capacity without overload",
            f"{found['goodput_of_capacity']:.0%}",
            found["goodput_of_capacity"] >= MIN_GOODPUT,
        ),
        (
            f"each account's share within {MAX_DEVIATION:.0%} of its share by weight",
            f"{worst['account']} is off by {worst['off']:+.0%}",
            abs(worst["off"]) <= MAX_DEVIATION,
        ),
        (
            f"p99 of the time to the first token within {MAX_TTFT_S:g} s",
            _seconds(wait, 1),
            wait is not None and wait <= MAX_TTFT_S,
        ),
        (
            "every refusal is 429 or 503 and has a retry-after header",
            f"others: {', '.join(others) or 'none'}; without retry-after: {without_time}",
            not others and not without_time,
        ),
        ("no reply breaks after its start", f"{found['broken']} broke", not found["broken"]),
    ]


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    found = results["overload"]
    waits = found["ttft_s"]
    lines = [
        f"{results['times']:g} times the capacity of the service, for {found['seconds']:g} s: "
        f"{results['capacity']:.0f} tokens/s without overload, {found['goodput']:.0f} under it. "
        f"{found['sent']} requests: "
        + ", ".join(f"{count} x {status}" for status, count in found["statuses"].items())
        + f". First token of admitted ones: p50 {_seconds(waits['p50'], 2)}, p99 {_seconds(waits['p99'], 2)}.",
        "",
        "| account | weight | share by weight | share | deviation | served of sent |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one['account']} | {one['weight']} | {one['by_weight']:.1%} | {one['share']:.1%} | {one['off']:+.1%} "
        f"| {one['served']} of {one['sent']} |"
        for one in found["accounts"]
    ]
    lines += ["", "| target | measured | met |", "|---|---|---|"]
    lines += [f"| {what} | {how} | {'yes' if kept else '**no**'} |" for what, how, kept in promises(found)]
    return "\n".join(lines)


def _seconds(value: float | None, places: int) -> str:
    return "none" if value is None else f"{value:.{places}f} s"
