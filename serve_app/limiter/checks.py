"""Checks whether a key, its account and their limits allow a request. Changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from random import Random
from typing import Final, NamedTuple

from serve_app.contracts.limiting import Admit, Recovering, Refusal
from serve_app.limiter import refusals
from serve_app.limiter.accounts import Account, Key, LimitBucket

_FIRST_MEAN_OUTPUT: Final = 256.0  # tokens; expected output before the first reply
_MEAN_WEIGHT: Final = 0.2  # weight of the newest reply in the moving average: about the last ten replies count


class Offer(NamedTuple):
    """The resources that a request may use."""

    hold: int  # nano-units to set aside
    max_tokens: int  # maximum output tokens
    charge: int  # tokens to charge the token buckets
    tentative: bool  # see Grant


def check_limits(ask: Admit, key: Key, now: float, at: float, rng: Random) -> Offer | Refusal | Recovering:
    """Decides on a request whose key may be used. Changes nothing.

    `now` is on the limiter's clock, `at` is the same moment in Unix time. Returns Recovering while it is unknown what
    is left of the key's budget (see Key).
    """
    request_id, account, snapshot = ask.request_id, key.account, key.snapshot
    assert snapshot is not None
    if snapshot.models is not None and ask.model not in snapshot.models:
        return refusals.model_not_allowed(request_id, ask.model, snapshot.models)
    if ask.idempotency_key is not None and ask.idempotency_key in account.idempotent:
        return refusals.in_progress(request_id, rng)

    free = account.spendable(at)
    if free <= 0:
        return refusals.no_balance(request_id, key, at)
    if snapshot.budget is not None:
        if unsure_s := key.unsure_s(at):
            return Recovering(request_id, unsure_s)
        free = min(free, key.left(at))
        if free <= 0:
            return refusals.no_budget(request_id, key, at)
    budget = output_budget(free, ask.prompt_tokens, ask.max_tokens, ask.prompt_price, ask.output_price)
    tentative = budget < 1
    if tentative:
        # The prompt is only estimated here, which is no reason to refuse a request. A request that seems too expensive
        # holds all credit until its prompt is counted.
        budget = ask.max_tokens
    hold = free if tentative else ask.prompt_tokens * ask.prompt_price + budget * ask.output_price

    running, limit = len(account.holds), account.contract.concurrency
    if running >= limit:
        return refusals.too_many_at_once(request_id, key, limit, running, now, rng)
    own_limit = snapshot.limits.get("concurrency")
    if own_limit is not None and key.open >= own_limit:
        return refusals.too_many_at_once(request_id, key, own_limit, key.open, now, rng, of_key=True)
    if bucket := _longest_wait(key.requests, 1, now):
        return refusals.over_rate(request_id, key, bucket, 1, now, rng)
    charge = token_charge(ask.prompt_tokens, budget, key)
    if bucket := _longest_wait(key.tokens, charge, now):
        return refusals.over_rate(request_id, key, bucket, charge, now, rng)
    return Offer(hold, budget, charge, tentative)


def _longest_wait(buckets: Sequence[LimitBucket], units: int, now: float) -> LimitBucket | None:
    """Returns the bucket with the longest wait until the units fit; None when they fit into all buckets now."""
    longest, longest_s = None, 0.0
    for bucket in buckets:
        wait_s = bucket.wait_s(now, units)
        if wait_s > longest_s:
            longest, longest_s = bucket, wait_s
    return longest


def output_budget(available: int, prompt_tokens: int, asked: int, prompt_price: int, output_price: int) -> int:
    """Returns how many output tokens `available` nano-units pay for after the prompt, at most `asked`."""
    left = available - prompt_tokens * prompt_price
    if left < 0:
        return 0
    return asked if output_price == 0 else min(asked, left // output_price)


def token_charge(prompt_tokens: int, budget: int, key: Key) -> int:
    """Returns the tokens to charge before the output is known: the prompt, and the expected output within the budget.

    Charging the whole output budget would refuse requests that the limits could have allowed.
    """
    expected = ceil(_expected_output(key))
    return prompt_tokens + (budget if budget < expected else expected)


def learn_output(key: Key, completion_tokens: int) -> None:
    """Updates the mean outputs of the key and its account with one reply's tokens."""
    if key.own_tokens:
        mean = _expected_output(key)
        key.mean_output = mean + _MEAN_WEIGHT * (completion_tokens - mean)
    mean = _expected_output_of(key.account)
    key.account.mean_output = mean + _MEAN_WEIGHT * (completion_tokens - mean)


def _expected_output(key: Key) -> float:
    """Returns the recent mean output: the key's if it has a token limit, else its account's."""
    mean = key.mean_output if key.own_tokens else key.account.mean_output
    if mean is not None:
        return mean
    # The guess is low, so one request never fills a small limit.
    return min((_expected_output_of(key.account), *(bucket.limit / 2 for bucket in key.own_tokens)))


def _expected_output_of(account: Account) -> float:
    mean = account.mean_output
    return mean if mean is not None else min(_FIRST_MEAN_OUTPUT, *(bucket.limit / 2 for bucket in account.tokens))
