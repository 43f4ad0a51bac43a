"""Turns the limiter's refusals into errors on the wire, in one place."""

from __future__ import annotations

from serve_app.api import ApiError, errors
from serve_app.limits.messages import Refusal


def as_api_error(refusal: Refusal) -> ApiError:
    """The error that a client sees for `refusal`."""
    if refusal.status == 401:
        return errors.authentication(refusal.message)
    if refusal.status == 402:
        return errors.insufficient_balance(refusal.message)
    if refusal.status == 429:
        return errors.rate_limit(refusal.message, code=refusal.code, retry_after_s=refusal.retry_after_s or 1.0)
    return errors.overloaded(refusal.message, retry_after_s=refusal.retry_after_s or 5.0)
