"""Every error that a client can get: one constructor per row of the wire contract's table."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import Any, Final

MAX_RETRY_AFTER_S: Final = 60.0  # SDKs stop retrying above 120 s


class ApiError(Exception):
    """An answer other than success, with the body and the headers that go with it.

    `message` says what to change; `param` names the field at fault. Raised where the fault is understood and turned
    into HTTP in one place. Can be pickled, so it may cross processes.
    """

    status: int = 500

    def __init__(
        self,
        message: str,
        *,
        type: str,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.type = type
        self.code = code
        self.param = param
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The JSON body, the same shape for every status and for an error inside a stream."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.__class__, self.message, self.type, self.code, self.param, self.headers)


def _rebuild(
    cls: type[ApiError], message: str, type: str, code: str | None, param: str | None, headers: dict[str, str]
) -> ApiError:
    return cls(message, type=type, code=code, param=param, headers=headers)


class InvalidFormatError(ApiError):
    """400: the body is not what it must be, whatever its values."""

    status = 400


class AuthenticationError(ApiError):
    """401: no usable API key."""

    status = 401


class InsufficientBalanceError(ApiError):
    """402: the account cannot pay."""

    status = 402


class NotFoundError(ApiError):
    """404: no such resource."""

    status = 404


class MethodNotAllowedError(ApiError):
    """405: the resource exists, the method does not."""

    status = 405


class BodyTimeoutError(ApiError):
    """408: the request's body did not come in time."""

    status = 408


class ConflictError(ApiError):
    """409: the same request is being answered already."""

    status = 409


class InvalidParametersError(ApiError):
    """422: the types are right, a value is not."""

    status = 422


class RateLimitError(ApiError):
    """429: this account is over a limit of its own."""

    status = 429


class ServerError(ApiError):
    """500: our fault."""

    status = 500


class OverloadedError(ApiError):
    """503: no capacity now."""

    status = 503


def invalid_format(message: str, param: str | None = None) -> InvalidFormatError:
    """400. The message names the field, what was found and what was expected."""
    return InvalidFormatError(message, type="invalid_request_error", code="invalid_format", param=param)


def body_too_large(max_bytes: int) -> InvalidFormatError:
    """400: the body is over the size limit."""
    return invalid_format(f"The body is larger than {max_bytes} bytes. Send a shorter conversation.")


def body_encoded(encoding: str) -> InvalidFormatError:
    """400: the body is compressed."""
    name = encoding if len(encoding) <= 40 else encoding[:37] + "..."
    message = f"The body's content-encoding is {name}, and only plain bodies are read: send it without compression."
    return invalid_format(message, "content-encoding")


def body_timeout(seconds: float) -> BodyTimeoutError:
    """408: the body was not complete in time. The connection can't be used any more: the rest may still come."""
    return BodyTimeoutError(
        f"The body was not complete after {seconds:g} s. Send it faster, or check that content-length is its length.",
        type="invalid_request_error",
        code="body_timeout",
        headers={"connection": "close"},
    )


def authentication(message: str) -> AuthenticationError:
    """401."""
    headers = {"www-authenticate": "Bearer"}
    return AuthenticationError(message, type="authentication_error", code="invalid_api_key", headers=headers)


def insufficient_balance(message: str, *, code: str = "insufficient_balance") -> InsufficientBalanceError:
    """402. `code` is insufficient_balance (the account's) or budget_exceeded (the key's)."""
    return InsufficientBalanceError(message, type="insufficient_balance", code=code)


def not_found(message: str) -> NotFoundError:
    """404. What was asked for may be in the message, and of any length."""
    return NotFoundError(_short(message), type="invalid_request_error", code="not_found")


def method_not_allowed(method: str, path: str, allowed: Iterable[str] = ()) -> MethodNotAllowedError:
    """405, with an `allow` header when it is known what is allowed."""
    allow = ", ".join(sorted(allowed))
    message = f"{method} is not possible on {_short(path)}." + (f" Use {allow}." if allow else "")
    headers = {"allow": allow} if allow else None
    return MethodNotAllowedError(message, type="invalid_request_error", code="method_not_allowed", headers=headers)


def idempotency_in_progress(message: str, *, retry_after_s: float) -> ConflictError:
    """409: a request with the same idempotency key is open. SDKs try again by themselves, as after a 429."""
    return ConflictError(
        message,
        type="invalid_request_error",
        code="idempotency_in_progress",
        param="idempotency-key",
        headers=_retry_headers(retry_after_s),
    )


def invalid_parameters(
    message: str, param: str | None = None, *, code: str = "invalid_parameter"
) -> InvalidParametersError:
    """422. `param` names the field."""
    return InvalidParametersError(message, type="invalid_request_error", code=code, param=param)


def idempotency_key_reused() -> InvalidParametersError:
    """422: the idempotency key has been used for another request."""
    return invalid_parameters(
        "The idempotency-key was used for a request with another body in the last 24 hours. Use a new key for a new "
        "request, or send the same body again.",
        "idempotency-key",
        code="idempotency_key_reused",
    )


def model_not_found(model: str, served: Iterable[str]) -> InvalidParametersError:
    """422: no such identifier."""
    name = model if len(model) <= 60 else model[:57] + "..."
    message = f"The model '{name}' does not exist. Served are: {', '.join(served)}."
    return InvalidParametersError(message, type="invalid_request_error", code="model_not_found", param="model")


def context_length_exceeded(prompt_tokens: int, limit: int) -> InvalidParametersError:
    """422: the prompt is longer than the context. Client libraries look for the first sentence's words."""
    message = (
        f"This model's maximum context length is {limit} tokens, and your messages are {prompt_tokens} tokens. "
        "Shorten the messages, so that room for the reply is left."
    )
    return InvalidParametersError(
        message, type="invalid_request_error", code="context_length_exceeded", param="messages"
    )


def rate_limit(
    message: str, *, code: str, retry_after_s: float, headers: dict[str, str] | None = None
) -> RateLimitError:
    """429. `code` is requests, tokens, concurrency or wrong_keys; `headers` go beside the time to wait."""
    told = {**(headers or {}), **_retry_headers(retry_after_s)}
    return RateLimitError(message, type="rate_limit_error", code=code, headers=told)


def server_error(request_id: str | None = None) -> ServerError:
    """500. Nothing about the fault is told; the request id leads the operator to the log line."""
    message = "The server failed to process the request. Try again"
    message += f"; if it keeps failing, report the request id {request_id}." if request_id else "."
    return ServerError(message, type="server_error", code="server_error")


def overloaded(message: str, *, retry_after_s: float) -> OverloadedError:
    """503."""
    headers = _retry_headers(retry_after_s)
    return OverloadedError(message, type="overloaded_error", code="overloaded_error", headers=headers)


def _short(text: str) -> str:
    return text if len(text) <= 300 else text[:297] + "..."


def _retry_headers(seconds: float) -> dict[str, str]:
    """Both forms that SDKs read, never rounded down: returning too early only costs another refusal."""
    bounded = min(MAX_RETRY_AFTER_S, max(0.0, seconds))
    return {"retry-after": str(max(1, ceil(bounded))), "retry-after-ms": str(max(1, ceil(bounded * 1000)))}
