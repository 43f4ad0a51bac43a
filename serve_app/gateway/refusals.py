"""Turns the limiter's refusals and the replicas' rejections into errors on the wire, in one place."""

from __future__ import annotations

from serve_app.api import ApiError, errors, headers
from serve_app.backend.messages import Rejected, Rejection
from serve_app.limits.messages import Refusal, Window


def as_api_error(refusal: Refusal) -> ApiError:
    """The error that a client sees for `refusal`."""
    code, message = refusal.code, refusal.message
    match refusal.status:
        case 401:
            return errors.authentication(message)
        case 402:
            return errors.insufficient_balance(message, code=code)
        case 409:
            return errors.idempotency_in_progress(message, retry_after_s=refusal.retry_after_s or 1.0)
        case 422:
            return errors.invalid_parameters(message, "model" if code == "model_not_found" else None, code=code)
        case 429:
            told = rate_limit_headers(refusal.requests, refusal.tokens)
            return errors.rate_limit(message, code=code, retry_after_s=refusal.retry_after_s or 1.0, headers=told)
    return errors.overloaded(message, retry_after_s=refusal.retry_after_s or 5.0)


def rejection_error(rejected: Rejected) -> ApiError:
    """The error that a client sees for `rejected`, of which a larger hold has not helped."""
    match rejected.reason:
        case Rejection.CONTEXT:
            return errors.context_length_exceeded(rejected.prompt_tokens, rejected.limit)
        case Rejection.CLOSED:
            return errors.overloaded("the model is restarting: try again", retry_after_s=2)
        case Rejection.QUEUE_FULL:
            return errors.overloaded("the model's queue is full: try again later", retry_after_s=5)
        case Rejection.INVALID:
            return errors.invalid_parameters(rejected.message, param=rejected.param)
        case Rejection.CREDIT:
            return errors.insufficient_balance("the prompt costs more than the balance: add funds or shorten it")


def rate_limit_headers(requests: Window | None, tokens: Window | None) -> dict[str, str]:
    """The `x-ratelimit-*` headers of what the limiter has told; none where it has told nothing."""
    if requests is None or tokens is None:
        return {}
    return headers.rate_limit_headers(
        requests=(requests.limit, requests.remaining, requests.reset_s),
        tokens=(tokens.limit, tokens.remaining, tokens.reset_s),
    )
