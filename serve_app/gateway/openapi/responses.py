"""Errors, headers and parameters that operations share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from serve_app.api.errors import MAX_RETRY_AFTER_S
from serve_app.api.idempotency import MAX_KEY_LENGTH

Schema = dict[str, Any]

_DURATION: Final = r"^([0-9]+h)?([0-9]+m)?[0-9]+(\.[0-9]{1,3})?m?s$"

# Status: name, what it means, types and codes of its errors, and headers beside x-request-id.
_ERRORS: Final[Mapping[int, tuple[str, str, list[str], list[str], list[str]]]] = {
    400: (
        "InvalidFormat",
        "Invalid Format: not JSON, not an object, a required field missing, a wrong type, or too large. The message "
        "names the field, what was found and what was expected.",
        ["invalid_request_error"],
        ["invalid_format"],
        [],
    ),
    401: (
        "AuthenticationFails",
        "Authentication Fails: no key or a malformed one; unknown, revoked or expired; its account suspended.",
        ["authentication_error"],
        ["invalid_api_key"],
        ["www-authenticate"],
    ),
    402: (
        "InsufficientBalance",
        "Insufficient Balance: nothing left, not enough for this prompt and one token, or the key's budget is spent.",
        ["insufficient_balance"],
        ["insufficient_balance", "budget_exceeded"],
        [],
    ),
    404: ("NotFound", "There is no such thing.", ["invalid_request_error"], ["not_found"], []),
    405: (
        "MethodNotAllowed",
        "The path exists, the method does not. On any path.",
        ["invalid_request_error"],
        ["method_not_allowed"],
        ["allow"],
    ),
    408: ("BodyTimeout", "The body was not complete in time.", ["invalid_request_error"], ["body_timeout"], []),
    409: (
        "Conflict",
        "A request with the same `idempotency-key` still runs. Try again.",
        ["invalid_request_error"],
        ["idempotency_in_progress"],
        ["retry-after", "retry-after-ms"],
    ),
    422: (
        "InvalidParameters",
        "Invalid Parameters: the types are right, a value is not. `param` names the field or header. Also for rules "
        "that a schema can't express, which the descriptions tell.",
        ["invalid_request_error"],
        ["invalid_parameter", "model_not_found", "context_length_exceeded", "idempotency_key_reused"],
        [],
    ),
    429: (
        "RateLimitReached",
        "Rate Limit Reached: requests or tokens a minute, or requests at once, of the account or the key; or too many "
        "wrong keys from this address. Limits of the account come with `x-ratelimit-*` headers.",
        ["rate_limit_error"],
        ["requests", "tokens", "concurrency", "wrong_keys"],
        ["retry-after", "retry-after-ms"],
    ),
    500: ("ServerError", "Server Error: our fault. Try again.", ["server_error"], ["server_error"], []),
    503: (
        "ServerOverloaded",
        "Server Overloaded: no capacity now. Try again.",
        ["overloaded_error"],
        ["overloaded_error"],
        ["retry-after", "retry-after-ms"],
    ),
}

RATE_LIMITS: Final = tuple(
    f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)


def _rate_limit(what: str, of: str) -> Schema:
    told = {"limit": "The limit.", "remaining": "What is left.", "reset": "The time until all of it is back."}[what]
    number = {"type": "integer", "minimum": 0}
    return {
        "description": f"{of.capitalize()} a minute. {told}",
        "schema": {"type": "string", "pattern": _DURATION} if what == "reset" else number,
    }


HEADERS: Final[Mapping[str, Schema]] = {
    "x-request-id": {
        "description": "Names the request in the service's logs: what was sent under this name, or a new one.",
        "required": True,
        "schema": {"type": "string", "minLength": 1, "maxLength": 128},
    },
    "retry-after": {
        "description": "Whole seconds to wait.",
        "required": True,
        "schema": {"type": "integer", "minimum": 1, "maximum": int(MAX_RETRY_AFTER_S)},
    },
    "retry-after-ms": {
        "description": "The same in milliseconds.",
        "required": True,
        "schema": {"type": "integer", "minimum": 1, "maximum": int(MAX_RETRY_AFTER_S * 1000)},
    },
    "www-authenticate": {"required": True, "schema": {"type": "string", "const": "Bearer"}},
    "allow": {"description": "The methods that the path has.", "schema": {"type": "string"}},
    "server-timing": {
        "description": "W3C Server Timing: milliseconds until admission, and until the reply began.",
        "required": True,
        "schema": {"type": "string"},
    },
    "idempotency-replayed": {
        "description": "The reply of an earlier request with the same `idempotency-key`; nothing was billed.",
        "schema": {"type": "string", "const": "true"},
    },
    **{name: _rate_limit(*name.split("-")[2:]) for name in RATE_LIMITS},
}

PARAMETERS: Final[Mapping[str, Schema]] = {
    "RequestId": {
        "name": "x-request-id",
        "in": "header",
        "description": "Up to 128 printable ASCII characters, by which you find the request again. Anything else is "
        "replaced.",
        "schema": {"type": "string"},
    },
    "IdempotencyKey": {
        "name": "idempotency-key",
        "in": "header",
        "description": "Makes retries of a request that is not streamed safe for 24 hours: once it has finished, the "
        "same key and body get the same reply, which is billed once. Streams ignore it.",
        "schema": {"type": "string", "pattern": f"^[!-~]{{1,{MAX_KEY_LENGTH}}}$"},
    },
    "ChangeKey": {
        "name": "idempotency-key",
        "in": "header",
        "description": "A change that is sent again under the same key happens once.",
        "schema": {"type": "string", "pattern": "^[!-~]([ -~]{0,126}[!-~])?$"},
    },
    "Operator": {
        "name": "x-operator",
        "in": "header",
        "description": "Who you are, for the audit log.",
        "schema": {"type": "string", "pattern": "^([!-~]([ -~]{0,98}[!-~])?)?$"},
    },
}


def error_schemas() -> dict[str, Schema]:
    """`Error` is any of them; each status has one of its own, which names its types and codes."""
    any_error = _error_schema(
        sorted({kind for _, _, kinds, _, _ in _ERRORS.values() for kind in kinds}),
        sorted({code for _, _, _, codes, _ in _ERRORS.values() for code in codes}),
        "The body of every error, and the event that ends a stream which has failed.",
    )
    own = {
        f"{name}Error": _error_schema(kinds, codes, f"The body of a {status}.")
        for status, (name, _, kinds, codes, _) in _ERRORS.items()
    }
    return {"Error": any_error, **own}


def _error_schema(kinds: list[str], codes: list[str], description: str) -> Schema:
    fields: Schema = {
        "message": {"type": "string", "minLength": 1, "description": "What to change."},
        "type": {"type": "string", "enum": kinds},
        "param": {"type": ["string", "null"], "description": "The field or header at fault."},
        "code": {"type": "string", "enum": codes},
    }
    error = {"type": "object", "properties": fields, "required": list(fields)}
    return {"type": "object", "description": description, "properties": {"error": error}, "required": ["error"]}


def error_responses() -> dict[str, Schema]:
    """One response for each status, by name."""
    return {
        name: {
            "description": description,
            "headers": headers("x-request-id", *own, *(RATE_LIMITS if status == 429 else ())),
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}Error"}}},
        }
        for status, (name, description, _, _, own) in _ERRORS.items()
    }


def errors(*statuses: int) -> dict[str, Schema]:
    """References to the responses of these statuses."""
    return {str(status): {"$ref": f"#/components/responses/{_ERRORS[status][0]}"} for status in statuses}


def headers(*names: str) -> dict[str, Schema]:
    """References to these headers."""
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def parameters(*names: str) -> list[Schema]:
    """References to these parameters."""
    return [{"$ref": f"#/components/parameters/{name}"} for name in names]


def json_response(description: str, schema: str, more_headers: Iterable[str] = ()) -> Schema:
    """A response with a JSON body of this schema."""
    return {
        "description": description,
        "headers": headers("x-request-id", *more_headers),
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}},
    }
