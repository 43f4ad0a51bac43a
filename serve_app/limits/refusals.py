"""The words and the waiting times of a refusal: what is exhausted, how far, and what the client can do."""

from __future__ import annotations

from datetime import UTC, datetime
from math import ceil, inf
from random import Random
from typing import Final

from serve_app.limits.gcra import Bucket
from serve_app.limits.keys import Key
from serve_app.limits.messages import Refusal, Window
from serve_app.limits.share import NoCapacity, OverShare

MAX_RETRY_AFTER_S: Final = 60.0  # client libraries give up on waits that are much longer
_NANO: Final = 1_000_000_000


def request_window(key: Key, now: float) -> Window:
    """Requests per minute as the `x-ratelimit-*` headers show them."""
    return _tighter(key.account.requests, key.requests, now)


def token_window(key: Key, now: float) -> Window:
    """Tokens per minute as the `x-ratelimit-*` headers show them."""
    return _tighter(key.account.tokens, key.tokens, now)


def _tighter(bucket: Bucket, own: Bucket | None, now: float) -> Window:
    """The one that refuses first: of two with equal room, the smaller."""
    window = Window(*bucket.state(now))
    if own is None:
        return window
    return min(window, Window(*own.state(now)), key=lambda one: (one.remaining, one.limit))


def amount(nano: int) -> str:
    """Nano-units as an exact decimal: 1500000000 is "1.5"."""
    whole, rest = divmod(abs(nano), _NANO)
    digits = f"{whole}.{rest:09d}".rstrip("0").rstrip(".")
    return f"-{digits}" if nano < 0 else digits


def retry_after(wait_s: float, rng: Random) -> float:
    """The wait with up to a tenth of jitter, so that clients refused together do not return together; 0 to 60 s."""
    if wait_s >= MAX_RETRY_AFTER_S:
        return MAX_RETRY_AFTER_S * (1 - 0.1 * rng.random())
    return min(MAX_RETRY_AFTER_S, wait_s * (1 + 0.1 * rng.random()))


def revoked(request_id: str) -> Refusal:
    """401: the key was revoked."""
    return Refusal(request_id, 401, "invalid_api_key", "This API key has been revoked. Use another key.")


def key_expired(request_id: str, expires_at: float) -> Refusal:
    """401: the key's time is over."""
    message = f"This API key has expired, at {_utc(expires_at)}. Use another key."
    return Refusal(request_id, 401, "invalid_api_key", message)


def suspended(request_id: str) -> Refusal:
    """401: the account is not active."""
    message = "The account of this API key is suspended. Ask the operator of this service to reactivate it."
    return Refusal(request_id, 401, "invalid_api_key", message)


def model_not_allowed(request_id: str, model: str, allowed: tuple[str, ...]) -> Refusal:
    """422: the key's allow-list does not name the model."""
    names = ", ".join(allowed) if allowed else "no model at all"
    message = f"This API key may not use the model {model!r}. It may use {names}."
    return Refusal(request_id, 422, "model_not_found", message)


def in_progress(request_id: str, rng: Random) -> Refusal:
    """409: a request of the account with the same idempotency key is open."""
    message = (
        "Another request with this idempotency key is in progress. Send this one again when it has ended to get its "
        "reply, or use a new idempotency key for a new request."
    )
    return Refusal(request_id, 409, "idempotency_in_progress", message, retry_after(1.0, rng))


def no_balance(request_id: str, key: Key, at: float) -> Refusal:
    """402: nothing is left, or all that is left is set aside for requests in flight."""
    account = key.account
    balance = (account.balance or 0) - account.expired(at)
    if balance <= 0:
        message = f"The account has no balance left (it is {amount(balance)}). Add funds."
    else:
        message = (
            f"All of the balance of {amount(balance)} is held by {_requests(len(account.holds))} in flight. "
            "Wait for them to finish, or add funds."
        )
    return Refusal(request_id, 402, "insufficient_balance", message)


def no_budget(request_id: str, key: Key, at: float) -> Refusal:
    """402: the key has spent its budget, or what is left of it is set aside for requests in flight."""
    whole = _budget(key, at)
    if key.left(at) + key.held <= 0:
        message = f"This API key has spent {whole}."
    else:
        message = f"All that is left of {whole} is held by {_requests(key.open)} in flight. Wait for them to finish."
    return Refusal(request_id, 402, "budget_exceeded", f"{message} {_renewal(key, at)}")


def too_expensive(request_id: str, key: Key, prompt_tokens: int, needed: int, available: int) -> Refusal:
    """402: the prompt as counted and one token of output cost more than is available of the balance."""
    account = key.account
    message = (
        f"{_cost(prompt_tokens, needed)}, "
        f"and {amount(max(0, available))} of the balance of {amount(account.balance or 0)} is available"
    )
    message += _rest(len(account.holds) - 1)
    return Refusal(request_id, 402, "insufficient_balance", message + ". Shorten the prompt, or add funds.")


def over_budget(request_id: str, key: Key, prompt_tokens: int, needed: int, available: int, at: float) -> Refusal:
    """402: the prompt as counted and one token of output cost more than is available of the key's budget."""
    message = f"{_cost(prompt_tokens, needed)}, and {amount(max(0, available))} is available of {_budget(key, at)}"
    message += _rest(key.open - 1)
    return Refusal(request_id, 402, "budget_exceeded", f"{message}. Shorten the prompt. {_renewal(key, at)}")


def too_many_at_once(request_id: str, key: Key, limit: int, running: int, now: float, rng: Random) -> Refusal:
    """429: as many requests are in flight as the account may have."""
    message = f"Requests at once: the limit is {limit} and {running} are in flight. Wait for one of them to finish."
    return _limited(request_id, "concurrency", message, key, now, retry_after(1.0, rng))


def key_too_many_at_once(request_id: str, key: Key, limit: int, now: float, rng: Random) -> Refusal:
    """429: as many requests are in flight as the key may have."""
    message = (
        f"Requests at once: the limit of this API key is {limit} and {key.open} are in flight. "
        "Wait for one of them to finish."
    )
    return _limited(request_id, "concurrency", message, key, now, retry_after(1.0, rng))


def too_many_requests(request_id: str, key: Key, bucket: Bucket, now: float, wait_s: float, rng: Random) -> Refusal:
    """429: requests per minute; `bucket` is the key's or its account's, whichever is longer to wait for."""
    message = (
        f"Requests per minute: {_limit(key, bucket)} is {bucket.limit} and {ceil(bucket.used(now))} are in use. "
        f"{_wait(wait_s)}"
    )
    return _limited(request_id, "requests", message, key, now, retry_after(wait_s, rng))


def too_many_tokens(
    request_id: str, key: Key, bucket: Bucket, charge: int, now: float, wait_s: float, rng: Random
) -> Refusal:
    """429: tokens per minute; `bucket` is the key's or its account's, whichever is longer to wait for."""
    message = (
        f"Tokens per minute: {_limit(key, bucket)} is {bucket.limit}, {ceil(bucket.used(now))} are in use and "
        f"this request counts for {charge} until it ends. {_wait(wait_s)}"
    )
    if charge > bucket.limit > 0:
        message += " It counts for more than the whole limit, so it runs only when nothing else is in use."
    return _limited(request_id, "tokens", message, key, now, retry_after(wait_s, rng))


def under_pressure(
    request_id: str, key: Key, verdict: OverShare | NoCapacity, tokens: Window, now: float, rng: Random
) -> Refusal:
    """429: the account is over what the model's load leaves it. 503: it is not, but there is no capacity."""
    wait_s = retry_after(verdict.wait_s, rng)
    if isinstance(verdict, NoCapacity):
        message = (
            f"The model is overloaded: a request would have to wait for about {verdict.expected_s:.0f} s. "
            f"{_wait(verdict.wait_s)}"
        )
        return Refusal(request_id, 503, "overloaded", message, wait_s)
    message = (
        f"Tokens per minute: the model's load lowers the limit for now, from {key.account.contract.tpm} to "
        f"{verdict.limit}, and {verdict.used} are in use. {_wait(verdict.wait_s)}"
    )
    return Refusal(request_id, 429, "tokens", message, wait_s, request_window(key, now), tokens)


def lost(request_id: str, rng: Random) -> Refusal:
    """503: the admission is not known here, because the limiter has restarted or the lease has run out."""
    message = "The admission of this request was lost while the service was restarting. Send the request again."
    return Refusal(request_id, 503, "overloaded", message, retry_after(1.0, rng))


def _limited(request_id: str, code: str, message: str, key: Key, now: float, retry_after_s: float) -> Refusal:
    windows = request_window(key, now), token_window(key, now)
    return Refusal(request_id, 429, code, message, retry_after_s, *windows)


def _limit(key: Key, bucket: Bucket) -> str:
    return "the limit" if bucket in (key.account.requests, key.account.tokens) else "the limit of this API key"


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


def _cost(prompt_tokens: int, needed: int) -> str:
    return f"The prompt of {prompt_tokens} tokens and 1 token of output cost {amount(needed)}"


def _rest(others: int) -> str:
    return f" ({_requests(others)} in flight hold the rest)" if others > 0 else ""


def _budget(key: Key, at: float) -> str:
    assert key.state is not None
    budget = amount(key.state.budget or 0)
    return f"its budget of {budget} for the {key.state.budget_period} {key.period(at).name}"


def _renewal(key: Key, at: float) -> str:
    return f"The budget renews at {_utc(key.period(at).ends)}; the operator of this service can raise it."


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _wait(wait_s: float) -> str:
    if wait_s == inf:
        return "Ask the operator of this service for a higher limit."
    return f"Try again in {max(0.001, wait_s):.3g} s." if wait_s < 1000 else f"Try again in {ceil(wait_s)} s."
