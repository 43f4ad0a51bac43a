"""What a key, its account and their limits let a request have: every check, before anything changes."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from serve_app.limits import refusals
from serve_app.limits.charges import output_budget, token_charge
from serve_app.limits.gcra import Bucket
from serve_app.limits.keys import Key
from serve_app.limits.messages import Admit, Recovering, Refusal


class Offer(NamedTuple):
    """What the request may have."""

    hold: int  # nano-units to set aside
    max_tokens: int  # of output
    charge: int  # tokens to charge the token buckets
    tentative: bool  # see Grant


def check(ask: Admit, key: Key, now: float, at: float, rng: Random) -> Offer | Refusal | Recovering:
    """Decides over a request of a key that may be used. Changes nothing.

    `now` is the limiter's clock, `at` the same moment in Unix time. The order is 422 (model), 409 (idempotency key),
    402 (balance, then budget), 429 (concurrency, requests, tokens; account and key each). Answers Recovering while it
    is not known what is left of the key's budget: see Key.
    """
    request_id, account, state = ask.request_id, key.account, key.state
    assert state is not None
    if state.models is not None and ask.model not in state.models:
        return refusals.model_not_allowed(request_id, ask.model, state.models)
    if ask.idempotency_key is not None and ask.idempotency_key in account.idempotent:
        return refusals.in_progress(request_id, rng)

    free = account.spendable(at)
    if free <= 0:
        return refusals.no_balance(request_id, key, at)
    if state.budget is not None:
        if unsure_s := key.unsure_s(at):
            return Recovering(request_id, unsure_s)
        free = min(free, key.left(at))
        if free <= 0:
            return refusals.no_budget(request_id, key, at)
    budget = output_budget(free, ask.prompt_tokens, ask.max_tokens, ask.prompt_price, ask.output_price)
    tentative = budget < 1
    if tentative:
        # An estimate is no reason to refuse: what seems too expensive gets all there is until it is counted.
        budget = ask.max_tokens
    hold = free if tentative else ask.prompt_tokens * ask.prompt_price + budget * ask.output_price

    running = len(account.holds)
    if running >= account.contract.concurrency:
        return refusals.too_many_at_once(request_id, key, account.contract.concurrency, running, now, rng)
    if state.concurrency is not None and key.open >= state.concurrency:
        return refusals.key_too_many_at_once(request_id, key, state.concurrency, now, rng)
    bucket = account.requests
    wait_s = bucket.wait_s(now, bucket.cost_s(1))
    if key.requests is not None:
        bucket, wait_s = _longer(bucket, wait_s, key.requests, now, 1)
    if wait_s:
        return refusals.too_many_requests(request_id, key, bucket, now, wait_s, rng)
    charge = token_charge(ask.prompt_tokens, budget, key)
    bucket = account.tokens
    wait_s = bucket.wait_s(now, bucket.cost_s(charge))
    if key.tokens is not None:
        bucket, wait_s = _longer(bucket, wait_s, key.tokens, now, charge)
    if wait_s:
        return refusals.too_many_tokens(request_id, key, bucket, charge, now, wait_s, rng)
    return Offer(hold, budget, charge, tentative)


def _longer(bucket: Bucket, wait_s: float, own: Bucket, now: float, units: int) -> tuple[Bucket, float]:
    """The bucket and its wait, or the key's own one where that makes `units` wait longer."""
    own_s = own.wait_s(now, own.cost_s(units))
    return (own, own_s) if own_s > wait_s else (bucket, wait_s)
