"""Cut requests count by their text, silent ones as waiting, ratios within a round."""

from __future__ import annotations

import pytest

from bench.engine.figures import floor_share, load_figures, longest_pause, stream_rate
from bench.harness.replies import Reply
from bench.harness.results import Spread, percentile, ratio


def words(text: str) -> int:
    return len(text.split())


def reply(sent: float, times: list[float], *, asked: int = 10, tokens: int | None = None, **more: object) -> Reply:
    """One word of text at each time."""
    texts = tuple((at, f"w{number} ") for number, at in enumerate(times))
    ended = times[-1] if tokens is not None else None
    return Reply(sent, asked, texts, ended, completion_tokens=tokens, **more)  # type: ignore[arg-type]


def test_tokens_are_the_servers_own_count_or_those_of_the_text_that_came() -> None:
    finished = reply(0.0, [1.0, 2.0], tokens=10)
    cut = reply(0.0, [1.0, 2.0, 3.0])
    load = load_figures([finished, cut], 0.0, 5.0, words)
    assert load.tokens == 13
    assert load.tokens_per_s == pytest.approx(2.6)
    assert (load.finished, load.early) == (1, 0)


def test_time_per_token_leaves_the_first_out() -> None:
    load = load_figures([reply(0.0, [1.0 + 0.5 * n for n in range(10)], tokens=10)], 0.0, 6.0, words)
    assert load.token_s == pytest.approx((0.5,))
    assert load.ttft_s == (1.0,)


def test_a_request_without_a_token_has_waited_until_the_end() -> None:
    load = load_figures([reply(1.0, [])], 0.0, 5.0, words)
    assert load.ttft_s == (4.0,)
    assert load.unanswered == 1


def test_a_reply_shorter_than_asked_for_is_counted_and_reported() -> None:
    assert load_figures([reply(0.0, [1.0], tokens=7)], 0.0, 2.0, words).early == 1


def test_a_failure_is_reported_and_not_measured() -> None:
    load = load_figures([reply(0.0, [1.0], problem="HTTP 503"), reply(0.0, [2.0], tokens=10)], 0.0, 2.0, words)
    assert load.problems == ("HTTP 503",)
    assert load.ttft_s == (2.0,)


def test_a_request_sent_after_the_end_does_not_count() -> None:
    assert load_figures([reply(2.0, [])], 0.0, 2.0, words).ttft_s == ()


def test_percentiles_are_values_that_were_measured() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert percentile(values, 0.5) == 3.0
    assert percentile(values, 0.95) == 5.0
    assert percentile([7.0], 0.05) == 7.0
    assert percentile([], 0.5) is None


def test_a_spread_is_the_median_with_the_range() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([]) is None


def test_ratios_are_taken_within_a_round() -> None:
    # A machine that is half as fast in the second round does not change the ratio.
    rates = {"ours": (30.0, 15.0, 7.0), "theirs": (10.0, 5.0)}
    records = [
        {"server": server, "workload": "short", "clients": 1, "round": number, "rate": rate, "problems": []}
        for server, values in rates.items()
        for number, rate in enumerate(values)
    ]
    assert ratio({"records": records}, "ours", "theirs", "short", 1, "rate") == Spread(3.0, 3.0, 3.0)


def test_the_rate_between_two_moments_counts_what_arrived_between_them() -> None:
    stream = reply(0.0, [1.0, 2.0, 3.0, 4.0, 5.0])
    assert stream_rate([stream, stream], 2.0, 4.0, words) == pytest.approx(1.0)


def test_a_pause_is_seen_at_both_ends_of_the_interval() -> None:
    stream = reply(0.0, [1.0, 2.0, 7.0])
    assert longest_pause(stream, 1.5, 6.0) == 4.0
    assert longest_pause(stream, 2.5, 3.0) == 0.5


def test_a_server_that_reads_its_weights_at_the_speed_of_memory_is_at_the_floor() -> None:
    assert floor_share(100, 1000.0, 0.1) == pytest.approx(1.0)
    assert floor_share(100, 1000.0, 0.4) == pytest.approx(0.25)
