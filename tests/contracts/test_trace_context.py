"""A request's trace: the client's where it sends a valid one, else its own, whose id is that of the request."""

from __future__ import annotations

import pytest

from serve_app.contracts.trace_context import TraceContext

DIGITS = "01a206e0ce00ac280ae496ff3e1e8305"
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_a_clients_trace_goes_on() -> None:
    trace = TraceContext.of(f"00-{TRACE}-{SPAN}-01", DIGITS)
    assert (trace.trace_id, trace.parent_id, trace.is_sampled) == (TRACE, SPAN, True)
    assert trace.span_id == DIGITS[16:]
    assert not TraceContext.of(f"00-{TRACE}-{SPAN}-00", DIGITS).is_sampled


def test_a_later_version_may_have_more_fields() -> None:
    assert TraceContext.of(f"01-{TRACE}-{SPAN}-01-more", DIGITS).trace_id == TRACE


@pytest.mark.parametrize(
    "header",
    [
        None, "", "nonsense", f"00-{TRACE}-{SPAN}", f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE.upper()}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01\n",
        f"00-{TRACE}-{SPAN}-01-more",
    ],
)  # fmt: skip
def test_without_a_valid_one_the_requests_own_id_is_the_trace(header: str | None) -> None:
    trace = TraceContext.of(header, DIGITS)
    assert (trace.trace_id, trace.span_id, trace.parent_id) == (DIGITS, DIGITS[16:], "")
    assert not trace.is_sampled


def test_a_share_of_all_requests_is_chosen_by_their_own_digits() -> None:
    ids = [f"{'a' * 18}{number * 2**40:014x}" for number in range(2**16)]
    chosen = [TraceContext.of(f"00-{'b' * 18}{'0' * 14}-{SPAN}-00", one).is_among(0.25) for one in ids]
    assert sum(chosen) == len(ids) // 4
    assert not any(TraceContext.of(None, one).is_among(0) for one in ids[:100])
    assert all(TraceContext.of(None, one).is_among(1) for one in ids)
