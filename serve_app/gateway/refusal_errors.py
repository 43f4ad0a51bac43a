"""Converts the limiter's refusals and the replicas' rejections into errors of the API."""

from __future__ import annotations

from serve_app.api import errors
from serve_app.api.errors import ApiError
from serve_app.contracts.generation import Rejected, Rejection
from serve_app.contracts.limiting import Refusal
from serve_app.gateway.web import rate_limit_headers


def refusal_error(refusal: Refusal) -> ApiError:
    code, message = refusal.code, refusal.message
    match refusal.status:
        case 401:
            return errors.authentication(message)
        case 402:
            return errors.insufficient_balance(message, code=code)
        case 403:
            return errors.forbidden(message, code=code)
        case 409:
            return errors.idempotency_in_progress(message, retry_after_s=refusal.retry_after_s or 1.0)
        case 422:
            return errors.invalid_parameters(message, "model" if code == "model_not_found" else None, code=code)
        case 429:
            limits = rate_limit_headers(refusal.requests, refusal.tokens)
            return errors.rate_limit(message, code=code, retry_after_s=refusal.retry_after_s or 1.0, headers=limits)
    return errors.overloaded(message, retry_after_s=refusal.retry_after_s or 5.0)


def rejection_error(rejected: Rejected) -> ApiError:
    """Returns the error of a request that its replica has rejected."""
    match rejected.reason:
        case Rejection.CONTEXT:
            return errors.context_length_exceeded(rejected.prompt_tokens, rejected.limit)
        case Rejection.CLOSED:
            return errors.overloaded("the model is restarting: try again", retry_after_s=2)
        case Rejection.QUEUE_FULL:
            return errors.overloaded("the model's queue is full: try again later", retry_after_s=5)
        case Rejection.ADAPTER:
            return errors.invalid_parameters(
                "the model is not available: its adapter is not loaded", param="model", code="model_not_found"
            )
        case Rejection.INVALID:
            return errors.invalid_parameters(rejected.message, param=rejected.param or None)
        case Rejection.CREDIT:
            return errors.insufficient_balance("the prompt costs more than the balance: add funds or shorten it")


def restarting() -> ApiError:
    return errors.overloaded("a part of the service is restarting: try again", retry_after_s=2)


def waited_too_long() -> ApiError:
    return errors.overloaded("no capacity became free in time: try again later", retry_after_s=10)


def not_recordable() -> ApiError:
    return errors.overloaded("usage can't be recorded right now: try again later", retry_after_s=30)
