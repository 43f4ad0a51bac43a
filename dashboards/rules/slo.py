"""Objectives promised to users, the share of requests that miss them, and alerts if misses use the error budget fast.

| slo | counts | missed by |
|---|---|---|
| availability | chat requests, without those that were answered with 4xx | 5xx, also one in the middle of a stream |
| first_token, output_token | served requests | those slower than their identifier's target |

4xx is the client's own fault or limit, and 499 means that the client hung up: neither is unavailability. When limits
fall because capacity is missing, ServeAppPressure fires. A request that fails before its identifier is known
(`model="none"`) may have been for any identifier, so it counts against all requests of the service.

Windows and factors are those of the SRE workbook, chapter 5, for a period of 30 days: 14.4 uses 2% of the budget in an
hour, 6 uses 5% in six hours, 1 uses 10% in three days. The short window ends an alert soon after its cause.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from dashboards.promql import SERVICE
from dashboards.rules.rule import Alert, Group, Recording, selector
from serve_app.contracts.metrics import LATENCY_TARGETS, NONE, REQUESTS

INTERVALS: Final = {
    "5m": "30s",
    "30m": "30s",
    "1h": "30s",
    "6h": "1m",
    "3d": "2m",
}  # by window, the interval at which its share is computed
MIN_MISSES: Final = 10  # in the long window, for an alert: with little traffic, a few misses are a large share


@dataclass(frozen=True, slots=True)
class Slo:
    """One promise. `target` is the share of requests that keep it."""

    name: str
    target: float
    alert: str
    missed: str  # completes "… of the requests"
    description: str

    @property
    def budget(self) -> float:
        return round(1 - self.target, 6)


@dataclass(frozen=True, slots=True)
class Burn:
    """A speed of using up the error budget. `factor` 1 uses the budget of 30 days in exactly 30 days."""

    factor: float
    long: str
    short: str
    severity: Literal["page", "warn"]


SLOS: Final = (
    Slo(
        "availability", 0.999, "ServeAppAvailabilityBudget", "failed",
        "Clients get 500 or 503, or a stream that ends with an error. SDKs try again by themselves, so users may only "
        "notice slow replies at first. 99.9% of the requests should be served.",
    ),
    Slo(
        "first_token", 0.99, "ServeAppFirstTokenBudget", "began later than their target",
        "Users look at an empty reply for longer than `first_token_target_s` of their identifier. 99% of the replies "
        "should begin in time.",
    ),
    Slo(
        "output_token", 0.99, "ServeAppOutputTokenBudget", "went on slower than their target",
        "Replies come slower than `output_token_target_s` per token. 99% of them should be faster.",
    ),
)  # fmt: skip
BURNS: Final = (Burn(14.4, "1h", "5m", "page"), Burn(6, "6h", "30m", "page"), Burn(1, "3d", "6h", "warn"))


def requests(window: str) -> str:
    """Returns the name of the series with the requests that count, by cluster, namespace, model and slo."""
    return f"serve_app:slo_requests:increase{window}"


def misses(window: str) -> str:
    return f"serve_app:slo_misses:increase{window}"


def miss_share(window: str) -> str:
    """Returns the name of the series with the share of misses, 0 to 1. It has no value without requests."""
    return f"serve_app:slo_misses_per_requests:ratio_increase{window}"


def recordings(window: str) -> Iterator[Recording]:
    def counted(where: str, by: str = f"{SERVICE}, model") -> str:
        return f"sum by ({by}) (increase({selector(REQUESTS, where)}[{window}]))"

    def replies(where: str) -> str:
        return f"sum by ({SERVICE}, model) (increase({selector(LATENCY_TARGETS, where)}[{window}]))"

    known = counted(f'model!="{NONE}", status!~"4.."')
    of_service = counted('status!~"4.."', SERVICE)
    availability = {"slo": "availability"}
    either = f'{known}\nor\nlabel_replace({of_service}, "model", "{NONE}", "", "")'
    yield Recording(requests(window), either, availability)
    yield Recording(misses(window), counted('status=~"5.."'), availability)
    for target in ("first_token", "output_token"):
        yield Recording(requests(window), replies(f'target="{target}"'), {"slo": target})
        yield Recording(misses(window), replies(f'target="{target}", met="no"'), {"slo": target})
    yield Recording(miss_share(window), f"{misses(window)} / ({requests(window)} > 0)")


def budget_alert(slo: Slo, burn: Burn) -> Alert:
    of_slo = f'{{slo="{slo.name}"}}'
    threshold = f"{burn.factor:g} * {slo.budget:g}"
    return Alert(
        slo.alert,
        burn.severity,
        f"{miss_share(burn.long)}{of_slo} > {threshold}\n"
        f"and {miss_share(burn.short)}{of_slo} > {threshold}\n"
        f"and {misses(burn.long)}{of_slo} >= {MIN_MISSES}",
        f"{{{{ $labels.model }}}}: {{{{ $value | humanizePercentage }}}} of the requests {slo.missed} in {burn.long}",
        slo.description,
        labels={"long": burn.long, "short": burn.short},
    )


GROUPS: Final = (
    *(Group(f"serve-app-slo-{window}", tuple(recordings(window)), every) for window, every in INTERVALS.items()),
    Group("serve-app-slo", tuple(budget_alert(slo, burn) for slo in SLOS for burn in BURNS)),
)
