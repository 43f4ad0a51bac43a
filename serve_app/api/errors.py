"""Constructs the errors that clients can receive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil
from typing import Any, Final

from serve_app.contracts.limiting import MAX_RETRY_AFTER_S

ERROR_TYPES: Final[Mapping[int, str]] = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "insufficient_balance",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
}
"""`error.type` by status, for every status that a client can get."""

TOO_LARGE: Final = "The body is larger than"
"""Beginning of the message for a body that is too large. Some formats have a separate status for this error."""


class ApiError(Exception):
    """An error response with its body and headers.

    `message` says what to change; `param` names the wrong field or header. The code that detects a problem raises the
    error, and one place turns it into an HTTP response. The error can be pickled, to pass it between processes.
    """

    def __init__(
        self, status: int, message: str, code: str, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = ERROR_TYPES[status]
        self.code = code
        self.param = param
        self.headers = headers or {}
        self.request_id = ""  # `x-request-id` of the response, set before the error is encoded

    def body(self) -> dict[str, Any]:
        """Returns the JSON body. It has the same shape for every status and for an error inside a stream."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def __reduce__(self) -> tuple[Any, ...]:  # by default, exceptions are pickled with only the message
        return ApiError, (self.status, self.message, self.code, self.param, self.headers)


def invalid_format(message: str, param: str | None = None) -> ApiError:
    """Status 400. The message names the field, the value found and the value expected."""
    return ApiError(400, message, "invalid_format", param)


def body_too_large(max_bytes: int) -> ApiError:
    """Status 400: the body is larger than the limit."""
    return invalid_format(f"{TOO_LARGE} {max_bytes} bytes. Send a shorter conversation.")


def body_encoded(encoding: str) -> ApiError:
    """Status 400: the body is compressed."""
    name = _short(encoding, 40)
    message = f"The body's content-encoding is {name}, which is not supported: send the body without compression."
    return invalid_format(message, "content-encoding")


def body_timeout(seconds: float) -> ApiError:
    """Status 408: the body was not complete in time. The connection is closed, because the rest may still arrive."""
    message = f"The body was not complete after {seconds:g} s. "
    message += "Send it faster, or check that content-length is the body's length."
    return ApiError(408, message, "body_timeout", headers={"connection": "close"})


def authentication(message: str) -> ApiError:
    """Status 401: no usable API key."""
    return ApiError(401, message, "invalid_api_key", headers={"www-authenticate": "Bearer"})


def insufficient_balance(message: str, *, code: str = "insufficient_balance") -> ApiError:
    """Status 402. `code` is insufficient_balance (of the account) or budget_exceeded (of the key)."""
    return ApiError(402, message, code)


def forbidden(message: str, *, code: str) -> ApiError:
    """Status 403: the key is valid but may not be used in this way. `code` is address_not_allowed."""
    return ApiError(403, message, code)


def not_found(message: str) -> ApiError:
    """Status 404. A long message is truncated, because it may repeat the client's input."""
    return ApiError(404, _short(message, 300), "not_found")


def method_not_allowed(method: str, path: str, allowed: Iterable[str] = ()) -> ApiError:
    """Status 405, with an `allow` header if the allowed methods are known."""
    allow = ", ".join(sorted(allowed))
    message = f"{method} is not possible on {_short(path, 300)}." + (f" Use {allow}." if allow else "")
    return ApiError(405, message, "method_not_allowed", headers={"allow": allow} if allow else None)


def idempotency_in_progress(message: str, *, retry_after_s: float) -> ApiError:
    """Status 409: a request with the same idempotency key is open. SDKs retry automatically, as after a 429."""
    return ApiError(409, message, "idempotency_in_progress", "idempotency-key", _retry_headers(retry_after_s))


def invalid_parameters(message: str, param: str | None = None, *, code: str = "invalid_parameter") -> ApiError:
    """Status 422: the types are right, but a value is not. `param` names the field."""
    return ApiError(422, message, code, param)


def idempotency_key_reused() -> ApiError:
    """Status 422: the idempotency key was used with another body."""
    return invalid_parameters(
        "The idempotency-key was used for a request with another body in the last 24 hours. Use a new key for a new "
        "request, or send the same body again.",
        "idempotency-key",
        code="idempotency_key_reused",
    )


def model_not_found(model: str, served: Iterable[str]) -> ApiError:
    """Status 422: the model is not served."""
    message = f"The model '{_short(model, 60)}' does not exist. Available models: {', '.join(served)}."
    return invalid_parameters(message, "model", code="model_not_found")


def model_not_allowed(model: str, allowed: Iterable[str]) -> ApiError:
    """Status 422: the key may not use the model."""
    names = ", ".join(allowed) or "no model at all"
    message = f"This API key may not use the model '{_short(model, 60)}'. It may use {names}."
    return invalid_parameters(message, "model", code="model_not_found")


def context_length_exceeded(prompt_tokens: int, limit: int) -> ApiError:
    """Status 422: the prompt is longer than the context. Client libraries recognize it by words of the first sentence.

    `prompt_tokens` must be exact, because clients shorten their messages by the excess; 0: the prompt was not counted.
    """
    found = prompt_tokens or f"more than {limit}"
    message = (
        f"This model's maximum context length is {limit} tokens, and your messages are {found} tokens. "
        "Shorten the messages, to leave room for the reply."
    )
    return invalid_parameters(message, "messages", code="context_length_exceeded")


def rate_limit(message: str, *, code: str, retry_after_s: float, headers: dict[str, str] | None = None) -> ApiError:
    """Status 429. `code` is requests, tokens, concurrency or wrong_keys. `headers` are sent with the retry headers."""
    return ApiError(429, message, code, headers={**(headers or {}), **_retry_headers(retry_after_s)})


def too_many_bodies(message: str) -> ApiError:
    """Status 429: the sender has too many request bodies in transfer, or too many bytes of them."""
    return rate_limit(message, code="concurrency", retry_after_s=1)


def server_error(request_id: str | None = None) -> ApiError:
    """Status 500. The message does not describe the error; operators find it in the log by the request id."""
    message = "The server failed to process the request. Try again"
    message += f"; if it keeps failing, report the request id {request_id}." if request_id else "."
    return ApiError(500, message, "server_error")


def overloaded(message: str, *, retry_after_s: float) -> ApiError:
    """Status 503: no capacity now."""
    return ApiError(503, message, "overloaded_error", headers=_retry_headers(retry_after_s))


def replica_lost(*, stream: bool) -> ApiError:
    """Status 503: the replica of this request was lost, and no other replica has taken over the request."""
    message = "The replica of this request was lost, and nothing is billed: send it again."
    if stream:
        message += (
            " With stream_options.resume: true, the stream continues after such a loss. A reply that is not streamed"
            " runs again automatically. With an idempotency-key, a request is billed once, however often you send it."
        )
    else:
        message += " With an idempotency-key, a request is billed once, however often you send it."
    return overloaded(message, retry_after_s=2)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _retry_headers(seconds: float) -> dict[str, str]:
    """Returns both retry headers that SDKs read, rounded up, because a retry that is too early is rejected again."""
    bounded = min(MAX_RETRY_AFTER_S, max(0.0, seconds))
    return {"retry-after": str(max(1, ceil(bounded))), "retry-after-ms": str(max(1, ceil(bounded * 1000)))}
