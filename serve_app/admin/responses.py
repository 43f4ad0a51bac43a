"""Errors, headers and parameters that the operations of the OpenAPI document share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from serve_app.admin.values import Schema
from serve_app.api.chat_openapi import REF
from serve_app.api.errors import ERROR_TYPES
from serve_app.contracts.limiting import MAX_RETRY_AFTER_S
from serve_app.gateway.idempotency import MAX_KEY_LENGTH


class _Error(NamedTuple):
    name: str
    codes: list[str]
    description: str


_ERRORS: Final[Mapping[int, _Error]] = {
    400: _Error(
        "InvalidFormat",
        ["invalid_format"],
        "Invalid Format: not JSON, not an object, a missing required field, a wrong type, or too large. The message "
        "names the field, the value and the expected type.",
    ),
    401: _Error(
        "AuthenticationFails",
        ["invalid_api_key"],
        "Authentication Fails: the key is missing, malformed, unknown, revoked or expired, or its account is "
        "suspended.",
    ),
    402: _Error(
        "InsufficientBalance",
        ["insufficient_balance", "budget_exceeded"],
        "Insufficient Balance: the balance does not cover the prompt and one token, or the key's budget is spent.",
    ),
    403: _Error(
        "AddressNotAllowed",
        ["address_not_allowed"],
        "Address Not Allowed: the key is restricted to other addresses. The message names the address of this request.",
    ),
    404: _Error(
        "NotFound", ["not_found", "previous_response_not_found"], "Not Found: the resource or path does not exist."
    ),
    405: _Error(
        "MethodNotAllowed", ["method_not_allowed"], "Method Not Allowed: the path does not support this method."
    ),
    408: _Error("BodyTimeout", ["body_timeout"], "Body Timeout: the body did not arrive in time."),
    409: _Error(
        "Conflict",
        ["idempotency_in_progress"],
        "Conflict: a request with the same `idempotency-key` is still running. Try again.",
    ),
    422: _Error(
        "InvalidParameters",
        ["invalid_parameter", "model_not_found", "context_length_exceeded", "idempotency_key_reused"],
        "Invalid Parameters: a value is out of range or violates a rule of the description. `param` names the field or "
        "header.",
    ),
    429: _Error(
        "RateLimitReached",
        ["requests", "tokens", "concurrency", "wrong_keys"],
        "Rate Limit Reached: requests or tokens per minute, or concurrent requests, of the account or the key; or too "
        "many wrong keys from this address. `x-ratelimit-*` headers have the limits of the account.",
    ),
    500: _Error("ServerError", ["server_error"], "Server Error: the service failed. Try again."),
    503: _Error("ServerOverloaded", ["overloaded_error"], "Server Overloaded: no capacity at the moment. Try again."),
}

RATE_LIMITS: Final = tuple(
    f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)
_RETRY: Final = ("retry-after", "retry-after-ms")
#: Headers of errors, in addition to x-request-id.
_ERROR_HEADERS: Final[Mapping[int, tuple[str, ...]]] = {
    401: ("www-authenticate",),
    405: ("allow",),
    409: _RETRY,
    429: (*_RETRY, *RATE_LIMITS),
    503: _RETRY,
}


def _rate_limit(what: str, of: str) -> Schema:
    meaning = {"limit": "Limit.", "remaining": "Remaining.", "reset": "Time until the limit is fully restored."}[what]
    duration = r"^([0-9]+h)?([0-9]+m)?[0-9]+(\.[0-9]{1,3})?m?s$"
    schema = {"type": "string", "pattern": duration} if what == "reset" else {"type": "integer", "minimum": 0}
    return {"description": f"{of.capitalize()} per minute. {meaning}", "schema": schema}


HEADERS: Final[Mapping[str, Schema]] = {
    "x-request-id": {
        "description": "Identifies the request in the service's logs: the id that the client sent, or a new one.",
        "required": True,
        "schema": {"type": "string", "minLength": 1, "maxLength": 128},
    },
    "request-id": {
        "description": "Same as `x-request-id`.",
        "required": True,
        "schema": {"type": "string", "minLength": 1, "maxLength": 128},
    },
    "retry-after": {
        "description": "Whole seconds to wait.",
        "required": True,
        "schema": {"type": "integer", "minimum": 1, "maximum": int(MAX_RETRY_AFTER_S)},
    },
    "retry-after-ms": {
        "description": "Milliseconds to wait.",
        "required": True,
        "schema": {"type": "integer", "minimum": 1, "maximum": int(MAX_RETRY_AFTER_S * 1000)},
    },
    "www-authenticate": {"required": True, "schema": {"type": "string", "const": "Bearer"}},
    "allow": {"description": "The methods that the path supports.", "schema": {"type": "string"}},
    "x-trace-id": {
        "description": "The request's trace id: from its `traceparent`, or a new one.",
        "required": True,
        "schema": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
    },
    "server-timing": {
        "description": "W3C Server Timing, in milliseconds: admit, queue, prefill, decode, settle (as far as they have "
        "ended when the reply begins), and total. Absent from the first reply to a background response.",
        "schema": {"type": "string"},
    },
    "idempotency-replayed": {
        "description": "Present if this is the reply of an earlier request with the same `idempotency-key`. It is "
        "not billed again.",
        "schema": {"type": "string", "const": "true"},
    },
    **{name: _rate_limit(*name.split("-")[2:]) for name in RATE_LIMITS},
}


def _header_parameter(name: str, description: str, pattern: str | None = None) -> Schema:
    schema = {"type": "string"} if pattern is None else {"type": "string", "pattern": pattern}
    return {"name": name, "in": "header", "description": description, "schema": schema}


PARAMETERS: Final[Mapping[str, Schema]] = {
    "RequestId": _header_parameter(
        "x-request-id",
        "Up to 128 printable ASCII characters that identify the request in logs. Other values are replaced.",
    ),
    "IdempotencyKey": _header_parameter(
        "idempotency-key",
        "Makes retries of a request that is not streamed safe for 24 hours: once it has finished, the "
        "same key and body get the same reply, which is billed once. Streams ignore it.",
        f"^[!-~]{{1,{MAX_KEY_LENGTH}}}$",
    ),
    "ChangeKey": _header_parameter(
        "idempotency-key",
        "A change that is repeated with the same key is applied once.",
        "^[!-~]([ -~]{0,126}[!-~])?$",
    ),
    "Operator": _header_parameter("x-operator", "Your name in the audit log.", "^([!-~]([ -~]{0,98}[!-~])?)?$"),
}


def error_schemas() -> dict[str, Schema]:
    """Returns `Error`, which covers all errors, and a schema for each status with its types and codes."""
    any_error = _error_schema(
        sorted(set(ERROR_TYPES.values())),
        sorted({code for error in _ERRORS.values() for code in error.codes}),
        "The body of every error, and the event that ends a stream which has failed.",
    )
    own = {
        f"{error.name}Error": _error_schema([ERROR_TYPES[status]], error.codes, f"The body of a {status}.")
        for status, error in _ERRORS.items()
    }
    return {"Error": any_error, **own}


def _error_schema(types: list[str], codes: list[str], description: str) -> Schema:
    fields: Schema = {
        "message": {"type": "string", "minLength": 1, "description": "What to change."},
        "type": {"type": "string", "enum": types},
        "param": {"type": ["string", "null"], "description": "The field or header that caused the error."},
        "code": {"type": "string", "enum": codes},
    }
    error = {"type": "object", "properties": fields, "required": list(fields)}
    return {"type": "object", "description": description, "properties": {"error": error}, "required": ["error"]}


def error_responses() -> dict[str, Schema]:
    """Returns one response for each status, by name."""
    return {
        error.name: json_response(_told(status, error), f"{error.name}Error", _ERROR_HEADERS.get(status, ()))
        for status, error in _ERRORS.items()
    }


def _told(status: int, error: _Error) -> str:
    """Returns an error's description with its codes, and where to read how long to wait."""
    text = f"{error.description} `code`: {', '.join(f'`{code}`' for code in error.codes)}."
    return f"{text} Wait for the seconds in `retry-after`." if "retry-after" in _ERROR_HEADERS.get(status, ()) else text


def errors(*statuses: int) -> dict[str, Schema]:
    """Returns references to the responses of these statuses."""
    return {str(status): {"$ref": f"#/components/responses/{_ERRORS[status].name}"} for status in statuses}


def parameters(*names: str) -> list[Schema]:
    """Returns references to these parameters."""
    return [{"$ref": f"#/components/parameters/{name}"} for name in names]


def json_response(description: str, schema: str, more_headers: Iterable[str] = ()) -> Schema:
    """Returns a response with a JSON body of this schema, and with x-request-id in addition to `more_headers`."""
    headers = {name: {"$ref": f"#/components/headers/{name}"} for name in ("x-request-id", *more_headers)}
    content: dict[str, Any] = {"application/json": {"schema": {"$ref": REF + schema}}}
    return {"description": description, "headers": headers, "content": content}
