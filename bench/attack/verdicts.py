"""Promises of the service under attack."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from bench.attack.hostile import ATTACKS
from bench.harness.promises import Promise, Verdict
from bench.harness.results import Results, Spread

MAX_FACTOR: Final = 1.5  # maximum ratio of the p99 of the time to the first token to the calm p99


def factor_of(name: str) -> Callable[[Results], Spread | None]:
    """Returns a function that finds an attack's factor. It returns None if the attack was not measured."""

    def measure(results: Results) -> Spread | None:
        found = results["records"].get(name, {}).get("factor")
        return None if found is None else Spread.of([found])

    return measure


def total(count: Callable[[Results], Iterable[float]]) -> Callable[[Results], Spread | None]:
    """Returns a function that adds up the numbers from `count`. It returns None if there are no numbers."""

    def measure(results: Results) -> Spread | None:
        counts = list(count(results))
        return Spread.of([sum(counts)]) if counts else None

    return measure


def of_customer(results: Results) -> Spread | None:
    """The worst factor of the customer's cases; None if one was not measured."""
    factors = [row["factor"] for row in results.get("customer", ())]
    return None if not factors or None in factors else Spread.of([max(factors)])


PROMISES: Final = (
    *(
        Promise(f"{attack.title}: p99 to the first token / calm p99", MAX_FACTOR, factor_of(name), at_most=True)
        for name, attack in ATTACKS.items()
    ),
    Promise(
        "a customer's p99 after its own hang-ups and refused requests / calm p99",
        MAX_FACTOR,
        of_customer,
        at_most=True,
    ),
    Promise(
        "ordinary requests that failed under attack",
        0,
        total(lambda results: [one["windows"]["attack"]["failed"] for one in results["records"].values()]),
        at_most=True,
    ),
    Promise(
        "flaps of /health and /ready under attack",
        0,
        total(lambda results: [one["health"]["attack"]["flaps"] for one in results["records"].values()]),
        at_most=True,
    ),
    Promise(
        "smuggling cases with problems",
        0,
        total(lambda results: [bool(row["problems"]) for row in results["smuggling"]]),
        at_most=True,
    ),
)


def verdicts(results: Results) -> list[Verdict]:
    """All promises, in the order of the table."""
    return [Verdict(promise, promise.measure(results)) for promise in PROMISES]
