"""`serve-app top`: frames for people and programs, from whatever can be read, until Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.cli.live_screen import as_text
from serve_app.contracts.limiting import PressureReport

from .conftest import Run
from .fake_service import OPERATOR_KEY
from .live_service import ACCOUNT, LIVE, LiveService
from .local_http import Drop
from .real_service import RealService

URL = "http://127.0.0.1:8000"


class Time:
    """The time of the command: its sleeps pass at once, and `between` says what happens in each."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []
        self.between: list[Callable[[], None]] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        if not self.between:
            raise KeyboardInterrupt
        self.between.pop(0)()


@pytest.fixture(autouse=True)
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr("serve_app.cli.top.time", SimpleNamespace(sleep=time.sleep, monotonic=time.monotonic))
    return time


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveService]:
    with LiveService() as service:
        monkeypatch.setenv("SERVE_APP_URL", service.url)
        monkeypatch.setenv("SERVE_APP_OPERATOR_KEY", OPERATOR_KEY)
        yield service


def frames(out: str) -> list[Any]:
    return [json.loads(line) for line in out.splitlines()]


def rows(out: str, first: str) -> list[list[str]]:
    return [line.split() for line in out.splitlines() if line.startswith(first)]


# One frame


def test_without_a_terminal_there_is_one_frame_and_what_is_missing_is_named(
    service: LiveService, run: Run, time: Time
) -> None:
    shown = run("top")
    assert shown.code == 0
    assert time.slept == []
    assert "open 15   held 0.0123 USD   limiters 1/2" in shown.out
    assert "limiter shards that do not admit: 1" in shown.out
    assert "settlements in gateways' spools that wait for the ledger: 1,200" in shown.out
    assert rows(shown.out, "old") == [
        ["old", "running", "1/2", "12", "3", "400", "ms", "45%", "2,310", "1,840", "1.53", "53%"]
    ]
    assert rows(shown.out, "new") == [["new", "deploying", "0/0"]]
    assert rows(shown.out, ACCOUNT) == [[ACCOUNT, "My", "team", "9", "0.0101", "12.3k/1.0M", "53%"]]
    assert rows(shown.out, "svc-coder") == [["svc-coder", "old", "100%"]]
    assert service.requests[-1].query == {"top": "10"}


def test_json_has_what_the_service_says(service: LiveService, run: Run) -> None:
    [frame] = frames(run("top", "--once", "--json", "--accounts", "3").out)
    assert frame == LIVE | {"problem": None}
    assert service.requests[-1].query == {"top": "3"}


@pytest.mark.parametrize(
    "options",
    [
        ["--every", "0"],
        ["--accounts", "101"],
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_read(service: LiveService, run: Run, options: list[str]) -> None:
    assert run("top", *options).code == 2
    assert service.requests == []


# One frame after the other


def test_with_every_frames_follow_each_other_until_it_is_interrupted(
    service: LiveService, run: Run, time: Time
) -> None:
    run("top")
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    def more() -> None:
        service.live = deepcopy(LIVE) | {"open_requests": 16}

    time.between = [more]
    shown = run("top", "--every", "5", "--json")
    assert shown.code == 0
    assert [frame["open_requests"] for frame in frames(shown.out)] == [15, 16]
    assert time.slept == [5, 5]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_a_service_that_is_away_for_a_while_is_a_problem_of_the_frame_that_shows_what_there_was(
    service: LiveService, run: Run, time: Time
) -> None:
    time.between = [lambda: service.next.extend([Drop(), Drop(), Drop()]), lambda: None]
    first, second, third = frames(run("top", "--every", "2", "--json").out)
    assert (first["problem"], third["problem"]) == (None, None)
    assert "closed the connection" in second["problem"]
    assert second | {"problem": None} == first


def test_a_problem_is_shown_to_people_with_the_time_of_the_figures() -> None:
    frame = LIVE | {"problem": "no service at http://x"}
    assert "figures of 06:00:01 UTC: no service at http://x" in as_text(frame, URL, 80)


def test_a_service_that_never_answered_is_an_error(service: LiveService, run: Run) -> None:
    service.stop()
    failed = run("top", "--every", "2")
    assert failed.code == 1
    assert "no service at" in failed.error_line
    assert failed.out == ""


# On a terminal


def extreme() -> Any:
    """The longest numbers and names."""
    long = "a-very-long-name-of-a-backend:with-an-adapter"
    load = {
        "replicas": 120, "running": 98765, "waiting": 98765, "queue_age_s": 123.4, "kv_used": 1.0,
        "queued_prefill_tokens": 123456789, "tokens_per_s": 1234567.8, "pressure": 123.45, "effective_share": 0.001,
    }  # fmt: skip
    account = LIVE["accounts"][0] | {"name": "My team with a long name", "held": "12.123456789"}
    return LIVE | {
        "models": [
            {"id": "svc-coder", "backends": [{"name": long, "weight": 1, "share": 1.0}]},
            LIVE["models"][0],
        ],
        "backends": [{"name": long, "status": "DEPLOY_FAILED", "replicas": 128, "load": load}],
        "accounts": [account | {"open_requests": 98765, "tokens_used": 10**9, "tokens_limit": 10**9}],
    }


@pytest.mark.parametrize("width", [80, 100, 132])
def test_every_number_and_every_account_is_whole_however_narrow_the_terminal_is(width: int) -> None:
    out = as_text(extreme() | {"problem": None}, URL, width)
    assert all(len(line) <= width for line in out.splitlines())
    [coder] = rows(out, "svc-coder")
    assert coder[-1] == "100%"
    [backend] = [line.split() for line in out.splitlines() if "deploy_failed" in line]
    assert backend[2:] == ["120/128", "98.8k", "98.8k", "123.4", "s", "100%", "123M", "1.2M", "123.45", "0%"]
    [account] = rows(out, ACCOUNT)
    assert account[-4:] == ["98.8k", "12.123456789", "1.0G/1.0G", "53%"]


def test_names_are_shown_and_not_obeyed() -> None:
    live = deepcopy(LIVE)
    live["accounts"][0]["name"] = "[red]\x1b[2J:smile:"
    out = as_text(live | {"problem": "[bold]\x07"}, URL, 132)
    assert "[red]?[2J:smile:" in out
    assert "[bold]?" in out
    assert "\x1b" not in out


def on_terminal(service: LiveService, *options: str, end: signal.Signals) -> tuple[int, str]:
    """Runs the command on a terminal of its own; when two frames were drawn it gets the signal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "serve_app.cli", "top", *options]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "40"}
    # A session of its own: its output must not stop the tests' terminal.
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    os.close(theirs)
    out, is_ended = b"", False
    while select.select([ours], [], [], 300)[0]:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the last writer is gone
            break
        if not piece:
            break
        out += piece
        if not is_ended and out.count(ACCOUNT.encode()) >= 2:
            is_ended = True
            process.send_signal(end)
    else:
        process.kill()
    os.close(ours)
    return process.wait(), out.decode()


@pytest.mark.parametrize("end", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_ends_it_quietly_and_the_terminal_is_as_it_was(service: LiveService, end: signal.Signals) -> None:
    code, out = on_terminal(service, "--every", "0.5", end=end)
    assert code == 0
    assert "Traceback" not in out
    for opened, closed in (("\x1b[?1049h", "\x1b[?1049l"), ("\x1b[?25l", "\x1b[?25h")):
        assert out.index(opened) < out.rindex(closed)
    assert re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out[out.rindex("\x1b[?1049l") :]).strip() == ""


# The service itself


def test_the_service_itself_answers_what_is_shown(real: RealService, run: Run) -> None:
    report = PressureReport("fake", "r", queue_age_s=0.0, kv_used=0.5, queued_prefill_tokens=7, waiting=0, running=3)
    real.loop.call_soon_threadsafe(real.world.limiter.service.admission.report, report)
    [frame] = frames(run("top", "--json").out)
    assert frame.keys() - {"problem"} == LIVE.keys()
    assert frame["backends"][0].keys() == LIVE["backends"][0].keys()
    assert frame["backends"][0]["load"].keys() == LIVE["backends"][0]["load"].keys()
    assert frame["limiters"] == [{"shard": 0, "admits": True, "open_requests": 0, "held": "0.00"}]
    assert rows(run("top").out, "fake") == [
        ["fake", "running", "1", "3", "0", "0", "ms", "50%", "7", "0.0", "0.00", "100%"]
    ]
