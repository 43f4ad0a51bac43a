"""The status table of the wire contract, row by row."""

from __future__ import annotations

import json
import pickle

import pytest

from serve_app.api import errors
from serve_app.api.codec import encode_json
from serve_app.api.errors import ApiError

ROWS = [
    (errors.invalid_format("m", "stop"), 400, "invalid_request_error", "invalid_format", "stop"),
    (errors.body_too_large(100), 400, "invalid_request_error", "invalid_format", None),
    (errors.authentication("m"), 401, "authentication_error", "invalid_api_key", None),
    (errors.insufficient_balance("m"), 402, "insufficient_balance", "insufficient_balance", None),
    (errors.insufficient_balance("m", code="budget_exceeded"), 402, "insufficient_balance", "budget_exceeded", None),
    (errors.forbidden("m", code="address_not_allowed"), 403, "permission_error", "address_not_allowed", None),
    (errors.not_found("m"), 404, "invalid_request_error", "not_found", None),
    (errors.method_not_allowed("PUT", "/models"), 405, "invalid_request_error", "method_not_allowed", None),
    (
        errors.idempotency_in_progress("m", retry_after_s=1),
        409,
        "invalid_request_error",
        "idempotency_in_progress",
        "idempotency-key",
    ),
    (errors.idempotency_key_reused(), 422, "invalid_request_error", "idempotency_key_reused", "idempotency-key"),
    (errors.invalid_parameters("m", "n"), 422, "invalid_request_error", "invalid_parameter", "n"),
    (errors.model_not_found("x", ["a"]), 422, "invalid_request_error", "model_not_found", "model"),
    (errors.context_length_exceeded(40000, 32768), 422, "invalid_request_error", "context_length_exceeded", "messages"),
    (errors.rate_limit("m", code="requests", retry_after_s=1), 429, "rate_limit_error", "requests", None),
    (errors.rate_limit("m", code="tokens", retry_after_s=1), 429, "rate_limit_error", "tokens", None),
    (errors.rate_limit("m", code="concurrency", retry_after_s=1), 429, "rate_limit_error", "concurrency", None),
    (errors.server_error(), 500, "server_error", "server_error", None),
    (errors.overloaded("m", retry_after_s=1), 503, "overloaded_error", "overloaded_error", None),
]


@pytest.mark.parametrize(("error", "status", "kind", "code", "param"), ROWS, ids=[f"{r[1]} {r[3]}" for r in ROWS])
def test_each_row_has_its_status_type_code_and_body(
    error: ApiError, status: int, kind: str, code: str, param: str | None
) -> None:
    assert error.status == status
    assert error.body() == {"error": {"message": error.message, "type": kind, "param": param, "code": code}}
    assert json.loads(encode_json(error.body())) == error.body()
    assert str(error) == error.message != ""


@pytest.mark.parametrize("row", ROWS, ids=[f"{row[1]} {row[3]}" for row in ROWS])
def test_an_error_survives_the_way_between_processes(row: tuple[ApiError, int, str, str, str | None]) -> None:
    error = row[0]
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.status, copy.body(), copy.headers) == (
        type(error),
        error.status,
        error.body(),
        error.headers,
    )


def test_401_names_the_scheme() -> None:
    assert errors.authentication("m").headers == {"www-authenticate": "Bearer"}


def test_the_message_for_a_prompt_that_is_too_long_has_the_words_that_clients_look_for() -> None:
    message = errors.context_length_exceeded(40000, 32768).message
    assert "This model's maximum context length is 32768 tokens" in message
    assert "40000 tokens" in message
    assert "messages are more than 32768 tokens" in errors.context_length_exceeded(0, 32768).message
    assert "Shorten" in message


@pytest.mark.parametrize(
    ("seconds", "whole", "ms"),
    [
        (0.0, "1", "1"),
        (0.0201, "1", "21"),
        (1.0, "1", "1000"),
        (1.01, "2", "1010"),
        (59.5, "60", "59500"),
        (60, "60", "60000"),
        (3600, "60", "60000"),
        (float("inf"), "60", "60000"),
        (-1, "1", "1"),
    ],
)
def test_retry_after_is_rounded_up_and_at_most_a_minute(seconds: float, whole: str, ms: str) -> None:
    expected = {"retry-after": whole, "retry-after-ms": ms}
    assert errors.rate_limit("m", code="requests", retry_after_s=seconds).headers == expected
    assert errors.overloaded("m", retry_after_s=seconds).headers == expected


def test_a_server_error_has_the_request_id_and_no_internals() -> None:
    assert "req_1" in errors.server_error("req_1").message
    assert errors.server_error().message == "The server failed to process the request. Try again."


def test_405_says_what_is_possible() -> None:
    error = errors.method_not_allowed("PUT", "/chat/completions", ["POST", "OPTIONS"])
    assert error.headers == {"allow": "OPTIONS, POST"}
    assert "PUT" in error.message
    assert "OPTIONS, POST" in error.message


def test_a_very_long_model_name_is_not_repeated_in_full() -> None:
    assert len(errors.model_not_found("x" * 10_000, ["svc-chat"]).message) < 200
