"""Builds refusals: what is exhausted, by how much, what the client can do, and how long to wait."""

from __future__ import annotations

from math import ceil, inf
from random import Random

from serve_app.contracts.addresses import Address
from serve_app.contracts.limiting import MAX_RETRY_AFTER_S, Refusal, Window
from serve_app.contracts.money import format_amount
from serve_app.contracts.units import utc_text
from serve_app.limiter.accounts import Key, LimitBucket, tightest
from serve_app.limiter.shares import NoCapacity, OverShare


def retry_after(wait_s: float, rng: Random) -> float:
    """Returns the wait with up to a tenth of jitter; 0 to 60 s.

    The jitter keeps clients that were refused together from returning together.
    """
    if wait_s >= MAX_RETRY_AFTER_S:
        return MAX_RETRY_AFTER_S * (1 - 0.1 * rng.random())
    return min(MAX_RETRY_AFTER_S, wait_s * (1 + 0.1 * rng.random()))


def revoked(request_id: str) -> Refusal:
    return Refusal(request_id, 401, "invalid_api_key", "This API key has been revoked. Use another key.")


def key_expired(request_id: str, expires_at: float) -> Refusal:
    message = f"This API key has expired, at {utc_text(expires_at)}. Use another key."
    return Refusal(request_id, 401, "invalid_api_key", message)


def suspended(request_id: str) -> Refusal:
    message = "The account of this API key is suspended. Ask the operator of this service to reactivate it."
    return Refusal(request_id, 401, "invalid_api_key", message)


def address_not_allowed(request_id: str, key: Key, seen: Address | None) -> Refusal:
    if seen is None:
        message = (
            "This API key may be used from certain addresses only, and the service cannot determine the address of "
            "this request. Use another key, or ask the operator of this service to set `trusted_proxies`."
        )
    else:
        message = (
            f"This API key may not be used from the address {seen}. Send the request from an address that the key "
            "allows, or add this address to the addresses of the key."
        )
    return Refusal(
        request_id,
        403,
        "address_not_allowed",
        message,
        account_id=key.account.account_id,
        key_id=key.key_id,
        from_anywhere=False,
    )


def model_not_allowed(request_id: str, model: str, allowed: tuple[str, ...]) -> Refusal:
    names = ", ".join(allowed) if allowed else "no model at all"
    message = f"This API key may not use the model {model!r}. It may use {names}."
    return Refusal(request_id, 422, "model_not_found", message)


def in_progress(request_id: str, rng: Random) -> Refusal:
    message = (
        "Another request with this idempotency key is in progress. Send this one again when it has ended to get its "
        "reply, or use a new idempotency key for a new request."
    )
    return Refusal(request_id, 409, "idempotency_in_progress", message, retry_after(1.0, rng))


def no_balance(request_id: str, key: Key, at: float) -> Refusal:
    """402: no balance is left, or all of it is held for requests in flight."""
    account = key.account
    balance = (account.balance or 0) - account.expired(at)
    if balance <= 0:
        message = f"The account has no balance left (it is {format_amount(balance)}). Add funds."
    else:
        message = (
            f"All of the balance of {format_amount(balance)} is held by {_requests(len(account.holds))} in flight. "
            "Wait for them to finish, or add funds."
        )
    return Refusal(request_id, 402, "insufficient_balance", message)


def no_budget(request_id: str, key: Key, at: float) -> Refusal:
    """402: the key has spent its budget, or the rest of it is held for requests in flight."""
    budget = _budget(key, at)
    if key.left(at) + key.held <= 0:
        message = f"This API key has spent its {budget}."
    else:
        in_flight = f"{_requests(key.open)} in flight"
        message = f"The rest of this key's {budget} is held by {in_flight}. Wait for them to finish."
    return Refusal(request_id, 402, "budget_exceeded", f"{message} {_renewal(key, at)}")


def too_expensive(
    request_id: str, key: Key, prompt_tokens: int, needed: int, available: int, at: float, *, of_budget: bool
) -> Refusal:
    """402: the counted prompt and one token of output cost more than the balance or the budget has available."""
    message = (
        f"The prompt of {prompt_tokens} tokens and 1 token of output cost {format_amount(needed)}, "
        f"and {format_amount(max(0, available))}"
    )
    if of_budget:
        message += (
            f" is available of this key's {_budget(key, at)}{_held_rest(key.open - 1)}. Shorten the prompt. "
            f"{_renewal(key, at)}"
        )
        return Refusal(request_id, 402, "budget_exceeded", message)
    balance, others = key.account.balance or 0, len(key.account.holds) - 1
    message += f" of the balance of {format_amount(balance)} is available{_held_rest(others)}."
    return Refusal(request_id, 402, "insufficient_balance", f"{message} Shorten the prompt, or add funds.")


def too_many_at_once(
    request_id: str, key: Key, limit: int, running: int, now: float, rng: Random, *, of_key: bool = False
) -> Refusal:
    message = f"Concurrent requests: the limit{_of(of_key)} is {limit} and {running} are in flight."
    message += " Wait for one of them to finish."
    return _limited(request_id, "concurrency", message, key, now, retry_after(1.0, rng))


def over_rate(request_id: str, key: Key, bucket: LimitBucket, units: int, now: float, rng: Random) -> Refusal:
    """429: the request's units do not fit into the bucket now."""
    rate, wait_s, used = bucket.rate, bucket.wait_s(now, units), ceil(bucket.used(now))
    message = f"{rate.unit.capitalize()} per {rate.per}: the limit{_of(bucket.of_key)} is {bucket.limit}"
    if rate.unit == "requests":
        message += f" and {used} are used. {_wait(wait_s)}"
    else:
        message += f", {used} are used and this request counts for {units} until it ends. {_wait(wait_s)}"
        if units > bucket.limit > 0:
            message += " It counts for more than the whole limit, so it runs only when nothing else is in use."
    return _limited(request_id, rate.unit, message, key, now, retry_after(wait_s, rng))


def under_pressure(
    request_id: str, key: Key, verdict: OverShare | NoCapacity, tokens: Window, now: float, rng: Random
) -> Refusal:
    """429: the account exceeds its share of the loaded model. 503: it does not, but there is no capacity."""
    wait_s = retry_after(verdict.wait_s, rng)
    if isinstance(verdict, NoCapacity):
        message = (
            f"The model is overloaded: a request would have to wait for about {verdict.expected_s:.0f} s. "
            f"{_wait(verdict.wait_s)}"
        )
        return Refusal(request_id, 503, "overloaded", message, wait_s)
    message = (
        f"Tokens per minute: the model's load lowers the limit for now, from {key.account.contract.tpm} to "
        f"{verdict.limit}, and {verdict.used} are used. {_wait(verdict.wait_s)}"
    )
    return Refusal(request_id, 429, "tokens", message, wait_s, tightest(key.requests, now), tokens)


def lost(request_id: str, rng: Random) -> Refusal:
    """503: the hold is not known here, because the limiter has restarted or the hold's lease has expired."""
    message = "The admission of this request was lost while the service was restarting. Send the request again."
    return Refusal(request_id, 503, "overloaded", message, retry_after(1.0, rng))


def unconfirmed(request_id: str, rng: Random) -> Refusal:
    """503: it is unknown whether the key was revoked or the account suspended recently."""
    message = "The service cannot check API keys right now, because its ledger does not answer. Send the request again."
    # SDKs retry twice after this time, which together outlasts a short outage.
    return Refusal(request_id, 503, "overloaded", message, retry_after(5.0, rng))


def _limited(request_id: str, code: str, message: str, key: Key, now: float, retry_after_s: float) -> Refusal:
    windows = tightest(key.requests, now), tightest(key.tokens, now)
    return Refusal(request_id, 429, code, message, retry_after_s, *windows)


def _of(of_key: bool) -> str:
    return " of this API key" if of_key else ""


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


def _held_rest(others: int) -> str:
    return f" ({_requests(others)} in flight hold the rest)" if others > 0 else ""


def _budget(key: Key, at: float) -> str:
    assert key.snapshot is not None
    budget = format_amount(key.snapshot.budget or 0)
    return f"budget of {budget} for the {key.snapshot.budget_period} {key.period(at).name}"


def _renewal(key: Key, at: float) -> str:
    return f"The budget renews at {utc_text(key.period(at).ends)}; the operator of this service can raise it."


def _wait(wait_s: float) -> str:
    if wait_s == inf:
        return "Ask the operator of this service for a higher limit."
    return f"Try again in {max(0.001, wait_s):.3g} s." if wait_s < 1000 else f"Try again in {ceil(wait_s)} s."
