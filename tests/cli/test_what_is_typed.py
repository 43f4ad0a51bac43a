"""Times, amounts and names as people type them, and the line that says how far a long command is."""

from __future__ import annotations

import io
from datetime import UTC, datetime

import pytest

from serve_app.cli.amounts import amount_of
from serve_app.cli.errors import CommandError
from serve_app.cli.expiry import expiry_of
from serve_app.cli.progress import Progress

NOW = datetime(2026, 11, 21, 18, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("30d", "2026-12-21T18:00:00Z"),
        ("12h", "2026-11-22T06:00:00Z"),
        ("4w", "2026-12-19T18:00:00Z"),
        ("90min", "2026-11-21T19:30:00Z"),
        ("2026-12-31", "2027-01-01T00:00:00Z"),
        ("2026-11-21", "2026-11-22T00:00:00Z"),
        ("2026-12-31T18:00:00Z", "2026-12-31T18:00:00Z"),
        ("2026-12-31T18:00:00+02:00", "2026-12-31T16:00:00Z"),
    ],
)
def test_an_expiry_is_a_duration_a_day_to_its_end_or_a_time(text: str, at: str) -> None:
    assert expiry_of("--expires", text, NOW) == at


@pytest.mark.parametrize(
    "text",
    ["", "30", "0d", "-1d", "1.5d", "6m", "1y", "999999w", "tomorrow", "2026-13-01", "2026-12-31T18:00:00",
     "2026-11-20", "2026-11-21T18:00:00Z", "٣d"],
)  # fmt: skip
def test_an_expiry_that_is_none_or_has_passed_is_a_usage_error(text: str) -> None:
    with pytest.raises(CommandError) as refused:
        expiry_of("--expires", text, NOW)
    assert refused.value.exit_code == 2
    assert "--expires" in refused.value.message


@pytest.mark.parametrize(
    ("text", "sent"), [("-5", "-5"), ("1e2", "100"), ("-0.000000001", "-0.000000001"), ("+2", "2")]
)
def test_a_correction_has_a_sign(text: str, sent: str) -> None:
    assert amount_of(text, signed=True) == sent


@pytest.mark.parametrize("text", ["0", "-0.0", "NaN", "-Infinity", "-0.0000000001", "five", ""])
def test_a_correction_of_nothing_is_none(text: str) -> None:
    with pytest.raises(CommandError):
        amount_of(text, signed=True)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def told(stream: io.StringIO, *, every_s: float, times: int, quiet: bool = False) -> str:
    clock = Clock()
    progress = Progress(stream, "rows", quiet=quiet, clock=clock)
    for _ in range(times):
        clock.now += every_s
        progress.add(1000)
    progress.close()
    return stream.getvalue()


def test_what_is_done_soon_says_nothing() -> None:
    assert told(Terminal(), every_s=0.1, times=10) == ""


def test_what_takes_long_says_how_far_it_is() -> None:
    assert told(Terminal(), every_s=1.0, times=4) == "\r2,000 rows …\r3,000 rows …\r4,000 rows …\r\x1b[K"


def test_a_log_gets_whole_lines_and_fewer() -> None:
    assert told(io.StringIO(), every_s=1.0, times=13) == "2,000 rows …\n12,000 rows …\n"


def test_quiet_is_quiet() -> None:
    assert told(Terminal(), every_s=1.0, times=20, quiet=True) == ""
