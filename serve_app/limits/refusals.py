"""The words and the waiting times of a refusal: what is exhausted, how far, and what the client can do."""

from __future__ import annotations

from math import ceil, inf
from random import Random
from typing import Final

from serve_app.limits.gcra import Bucket
from serve_app.limits.holds import Account
from serve_app.limits.messages import Refusal, Window

MAX_RETRY_AFTER_S: Final = 60.0  # client libraries give up on waits that are much longer
_NANO: Final = 1_000_000_000


def window(bucket: Bucket, now: float) -> Window:
    """The bucket as the `x-ratelimit-*` headers show it."""
    return Window(bucket.limit, bucket.remaining(now), bucket.reset_s(now))


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


def suspended(request_id: str) -> Refusal:
    """401: the account is not active."""
    message = "The account of this API key is suspended. Ask the operator of this service to reactivate it."
    return Refusal(request_id, 401, "invalid_api_key", message)


def no_balance(request_id: str, account: Account) -> Refusal:
    """402: nothing is left, or all that is left is set aside for requests in flight."""
    balance = account.balance or 0
    if balance <= 0:
        message = f"The account has no balance left (it is {amount(balance)}). Add funds."
    else:
        message = (
            f"All of the balance of {amount(balance)} is held by {_requests(len(account.holds))} in flight. "
            "Wait for them to finish, or add funds."
        )
    return Refusal(request_id, 402, "insufficient_balance", message)


def too_expensive(request_id: str, account: Account, prompt_tokens: int, needed: int, available: int) -> Refusal:
    """402: the prompt as counted and one token of output cost more than is available."""
    message = (
        f"The prompt of {prompt_tokens} tokens and 1 token of output cost {amount(needed)}, "
        f"and {amount(max(0, available))} of the balance of {amount(account.balance or 0)} is available"
    )
    others = len(account.holds) - 1
    if others > 0:
        message += f" ({_requests(others)} in flight hold the rest)"
    return Refusal(request_id, 402, "insufficient_balance", message + ". Shorten the prompt, or add funds.")


def too_many_at_once(request_id: str, account: Account, now: float, rng: Random) -> Refusal:
    """429: as many requests are in flight as the account may have."""
    message = (
        f"Requests at once: the limit is {account.contract.concurrency} and {len(account.holds)} are in flight. "
        "Wait for one of them to finish."
    )
    return _limited(request_id, "concurrency", message, account, now, retry_after(1.0, rng))


def too_many_requests(request_id: str, account: Account, now: float, wait_s: float, rng: Random) -> Refusal:
    """429: requests per minute."""
    bucket = account.requests
    message = (
        f"Requests per minute: the limit is {bucket.limit} and {ceil(bucket.used(now))} are in use. {_wait(wait_s)}"
    )
    return _limited(request_id, "requests", message, account, now, retry_after(wait_s, rng))


def too_many_tokens(request_id: str, account: Account, charge: int, now: float, wait_s: float, rng: Random) -> Refusal:
    """429: tokens per minute."""
    bucket = account.tokens
    message = (
        f"Tokens per minute: the limit is {bucket.limit}, {ceil(bucket.used(now))} are in use and "
        f"this request counts for {charge} until it ends. {_wait(wait_s)}"
    )
    if charge > bucket.limit > 0:
        message += " It counts for more than the whole limit, so it runs only when nothing else is in use."
    return _limited(request_id, "tokens", message, account, now, retry_after(wait_s, rng))


def lost(request_id: str, rng: Random) -> Refusal:
    """503: the admission is not known here, because the limiter has restarted or the lease has run out."""
    message = "The admission of this request was lost while the service was restarting. Send the request again."
    return Refusal(request_id, 503, "overloaded", message, retry_after(1.0, rng))


def _limited(request_id: str, code: str, message: str, account: Account, now: float, retry_after_s: float) -> Refusal:
    windows = window(account.requests, now), window(account.tokens, now)
    return Refusal(request_id, 429, code, message, retry_after_s, *windows)


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


def _wait(wait_s: float) -> str:
    if wait_s == inf:
        return "Ask the operator of this service for a higher limit."
    return f"Try again in {max(0.001, wait_s):.3g} s." if wait_s < 1000 else f"Try again in {ceil(wait_s)} s."
