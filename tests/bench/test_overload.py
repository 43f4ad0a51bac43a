"""The overload's figures count what was complete in time, by account, and a broken promise shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.harness.replies import RawReply
from bench.harness.servers import deployment
from bench.overload.__main__ import Overloaded
from bench.overload.agreement import SLOTS, Fitted, closed_loop, fitted
from bench.overload.figures import Sent, goodput, markdown, promises, shares, summary
from bench.overload.traffic import REPLY_TOKENS, sent
from bench.simulation.replica import Device
from deployments import strict_config
from serve_app.settings import LimiterSettings, parse

WEIGHTS = {"a": 100, "b": 300}


def run(more: list[Sent] | None = None, a: int = 25, b: int = 75) -> dict[str, Any]:
    """A minute in which `a` and `b` replies of ten tokens are served, a refusal beside each."""
    sent = [
        Sent(name, 10.0, 12.0, 200, 10, first_at=11.0) for name, count in (("a", a), ("b", b)) for _ in range(count)
    ]
    sent += [Sent(name, 10.0, 10.1, 429, retry_after=True) for name in ("a", "b") for _ in range(50)]
    return summary([*sent, *(more or [])], WEIGHTS, 1000 / 60, 0.0, 60.0)


def kept(found: dict[str, Any]) -> list[bool]:
    return [holds for _, _, holds in promises(found)]


def test_goodput_is_of_replies_that_ended_complete_in_time() -> None:
    sent = [Sent("a", 0, 5, 200, 30), Sent("a", 0, 10, 200, 30), Sent("b", 4, 6, 200, 0), Sent("b", 4, 6, 503)]
    assert goodput(sent, 0, 10) == 3.0
    assert shares(sent, 0, 20) == {"a": 1.0, "b": 0.0}
    assert shares([], 0, 10) == {}


def test_without_a_first_token_its_promise_is_broken() -> None:
    found = summary([Sent("a", 10.0, 10.1, 429, retry_after=True)], WEIGHTS, 1.0, 0.0, 60.0)
    assert found["ttft_s"]["p99"] is None
    assert kept(found)[2] is False
    assert "p99 none" in markdown({"times": 3.0, "capacity": 1.0, "overload": found})


def test_a_run_that_keeps_all_promises_reports_no_failure() -> None:
    found = run()
    assert found["statuses"] == {"200": 100, "429": 100}
    assert found["goodput_of_capacity"] == pytest.approx(1.0)
    assert [one["off"] for one in found["accounts"]] == pytest.approx([0.0, 0.0])
    assert all(kept(found))
    assert "**no**" not in markdown({"times": 3.0, "capacity": 1000 / 60, "overload": found})


@pytest.mark.parametrize(
    ("which", "found"),
    [
        (0, run(a=22, b=66)),
        (1, run(a=30, b=70)),
        (2, run([Sent("a", 10.0, 40.0, 200, 0, first_at=30.0)] * 3)),
        (3, run([Sent("a", 10.0, 10.1, 503)])),
        (3, run([Sent("a", 10.0, 10.1, 500, retry_after=True)])),
        (4, run([Sent("a", 10.0, 15.0, 200, is_broken=True)])),
    ],
    ids=["goodput", "shares", "first token", "no retry-after", "other status", "broken"],
)
def test_a_promise_that_is_broken_shows(which: int, found: dict[str, Any]) -> None:
    assert [index for index, holds in enumerate(kept(found)) if not holds] == [which]
    assert "**no**" in markdown({"times": 3.0, "capacity": 1000 / 60, "overload": found})


def exchanged(*pieces: bytes, problem: str | None = None) -> Sent:
    return sent("a", RawReply(1.0, 32, [(2.0 + at, piece) for at, piece in enumerate(pieces)], 9.0, problem))


def test_what_came_over_the_socket_is_read() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    first = b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n'
    last = b'data: {"choices": [], "usage": {"completion_tokens": 32}}\n\ndata: [DONE]\n\n'
    assert exchanged(head, first, last) == Sent("a", 1.0, 9.0, 200, 32, first_at=3.0)
    assert exchanged(head, first) == Sent("a", 1.0, 9.0, 200, 0, first_at=3.0, is_broken=True)
    refused = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 3\r\ncontent-length: 2\r\n\r\n{}"
    assert exchanged(refused) == Sent("a", 1.0, 9.0, 429, retry_after=True)
    assert exchanged(problem="refused") == Sent("a", 1.0, 9.0, 0, is_broken=True)


def test_the_service_runs_under_the_shipped_pressure_settings(tmp_path: Path) -> None:
    config = Overloaded(tmp_path).config()
    assert strict_config.find_problems(config) == []
    limiter = deployment(config, "Limiter")
    assert parse(LimiterSettings, limiter["user_config"], "Limiter.user_config").pressure.target_s == 3.0


def test_a_replica_is_fitted_to_what_it_was_seen_to_do() -> None:
    device = Device(SLOTS, 64, 10**6, prefill_per_s=2000.0, step_s=0.012, row_s=0.001, prefill_share=0.75)
    known = Fitted(device, prompt=90, elsewhere_s=0.012)

    def alone(prompt: int) -> list[Sent]:
        first = known.elsewhere_s + prompt / 2000.0
        ends = first + (REPLY_TOKENS - 1) * (device.step_s + device.row_s)
        return [Sent("a", 0.0, ends, 200, REPLY_TOKENS, first, prompt_tokens=prompt)]

    found = fitted(alone(90), alone(230), closed_loop(known))
    assert found.elsewhere_s == pytest.approx(0.012)
    assert found.device.prefill_per_s == pytest.approx(2000.0)
    assert (found.device.step_s, found.device.row_s) == (pytest.approx(0.012, rel=0.02), pytest.approx(0.001, rel=0.2))
    assert closed_loop(found) == pytest.approx(closed_loop(known), rel=0.01)
