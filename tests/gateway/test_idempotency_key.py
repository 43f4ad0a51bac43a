"""Tests of which idempotency keys are valid, and which bodies are the same request."""

from __future__ import annotations

import json

import pytest

from serve_app.api.chat_door import ChatDoor
from serve_app.api.errors import ApiError
from serve_app.gateway.idempotency import MAX_KEY_LENGTH, request_fingerprint, valid_idempotency_key

PATH = ChatDoor.path
BODY = {"model": "svc-chat", "messages": [{"role": "user", "content": "Grüße"}], "temperature": 0.5, "user": "u"}


@pytest.mark.parametrize("key", ["a", "7d6e1c0e-61c5-4f0c-9b0b-1f6f2c1f5a10", '"quoted"', "x" * MAX_KEY_LENGTH])
def test_a_key_of_visible_ascii_is_kept_unchanged(key: str) -> None:
    assert valid_idempotency_key(key) == key


@pytest.mark.parametrize("key", ["", " ", "a b", "x" * (MAX_KEY_LENGTH + 1), "schlüssel", "a\tb", "a\x7f"])
def test_any_other_key_is_422_and_the_header_is_named(key: str) -> None:
    with pytest.raises(ApiError) as caught:
        valid_idempotency_key(key)
    assert (caught.value.status, caught.value.param) == (422, "idempotency-key")
    assert "255" in caught.value.message


def test_the_order_of_members_white_space_and_escapes_do_not_make_another_request() -> None:
    one = json.dumps(BODY).encode()
    assert request_fingerprint(PATH, one) == request_fingerprint(
        PATH, json.dumps(BODY, indent=2, ensure_ascii=False).encode()
    )
    assert request_fingerprint(PATH, one) == request_fingerprint(
        PATH, json.dumps(dict(reversed(BODY.items()))).encode()
    )


@pytest.mark.parametrize(
    "change",
    [{"model": "svc-coder"}, {"temperature": 0.6}, {"user": "v"}, {"seed": 1}, {"messages": []}, {"user": None}],
)
def test_any_other_difference_in_the_body_makes_another_request(change: dict[str, object]) -> None:
    assert request_fingerprint(PATH, json.dumps({**BODY, **change}).encode()) != request_fingerprint(
        PATH, json.dumps(BODY).encode()
    )


def test_a_fingerprint_outlives_an_upgrade_of_the_service() -> None:
    # Stored for a day, and compared by the version that runs then.
    assert request_fingerprint(PATH, b'{"model": "svc-chat", "messages": [{"role": "user", "content": "Hi"}]}') == (
        "1fed44ace5de41ffbcf7f6275907c4bc02ebeaffd7004dff42f0b0167cdf2440"
    )


def test_the_same_body_at_another_door_is_another_request() -> None:
    body = json.dumps(BODY).encode()
    assert len({request_fingerprint(path, body) for path in (PATH, "/completions", "/responses")}) == 3
