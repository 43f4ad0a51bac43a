"""Headers in and out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.api.errors import ApiError
from serve_app.contracts.limiting import Window
from serve_app.gateway.authentication import bearer
from serve_app.gateway.web import duration, rate_limit_headers, request_id_of, server_timing


def id_of(sent: str | None) -> str:
    return request_id_of({"headers": [] if sent is None else [(b"x-request-id", sent.encode("latin-1"))]})


@pytest.mark.parametrize("kept", ["a", "req-1", "0f/", "a b", "x" * 128, "{}:;,"])
def test_a_printable_request_id_is_kept(kept: str) -> None:
    assert id_of(kept) == kept


@pytest.mark.parametrize("bad", [None, "", " ", "x" * 129, "a\nb", "a\r", "é", "a\x00", " a", "a "])
def test_any_other_request_id_is_replaced(bad: str | None) -> None:
    made = id_of(bad)
    assert made.startswith("req_")
    assert made != id_of(bad)


@pytest.mark.parametrize("header", ["Bearer sk-1", "bearer sk-1", "BEARER   sk-1 ", "  Bearer sk-1"])
def test_the_key_is_found(header: str) -> None:
    assert bearer(header) == "sk-1"


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "  ",
        "sk-secret",
        "Basic sk-secret",
        "Bearer",
        "Bearer ",
        "Bearer sk-secret x",
        "Bearer sk-secreté",
        "Bearer sk-secret\tx",
        "Bearer sk-secret" + "x" * 512,
    ],
)
def test_any_other_header_is_401_says_how_it_must_look_and_repeats_nothing(header: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        bearer(header)
    assert (caught.value.status, caught.value.headers["www-authenticate"]) == (401, "Bearer")
    assert '"Authorization: Bearer <your API key>"' in caught.value.message
    assert "secret" not in caught.value.message


@settings(max_examples=30)
@given(st.text())
def test_no_header_raises_anything_but_401(header: str) -> None:
    try:
        assert bearer(header)
    except ApiError as error:
        status = error.status
        if status != 401:
            raise


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (-1, "0s"),
        (0.0001, "1ms"),
        (0.02, "20ms"),
        (0.9995, "1s"),
        (1, "1s"),
        (1.5, "1.5s"),
        (7.6601, "7.661s"),
        (59.9999, "1m0s"),
        (60, "1m0s"),
        (90.5, "1m30.5s"),
        (360, "6m0s"),
        (3600, "1h0m0s"),
    ],
)
def test_durations_read_as_client_libraries_read_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_rate_limit_headers() -> None:
    assert rate_limit_headers(requests=Window(60, 59, 1.0), tokens=Window(60000, -3, 360.0)) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "60000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "6m0s",
    }


def test_server_timing_is_in_milliseconds() -> None:
    assert server_timing(admit=0.0021, total=1.5) == "admit;dur=2.1, total;dur=1500.0"
