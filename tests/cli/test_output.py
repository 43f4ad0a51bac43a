"""What people see on a terminal of 80 columns, and what programs read."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import yaml

from serve_app.cli.output import CommandError, Form, Output
from serve_app.cli.progress import Progress

from .conftest import Run
from .fake_service import FakeService
from .terminal import Terminal, terminal

ACCOUNT = "acct_0123456789abcdef01234567"
KEY = "key_0123456789abcdef01234567"
NAMES = ("Research", "Growth and data platform team of the northern region", "研究开发部")
COLUMNS = ("id", "name", "status", "key", "memo", "created")


def rows(states: tuple[str, ...] = ("active", "suspended", "active")) -> list[tuple[object, ...]]:
    at = "2026-11-30T08:00:00Z"
    return [(f"{ACCOUNT}{n}", name, states[n], f"{KEY}{n}", "a note", at) for n, name in enumerate(NAMES)]


def shown(
    monkeypatch: pytest.MonkeyPatch,
    *,
    columns: int = 80,
    form: Form | None = None,
    wide: tuple[str, ...] = ("created",),
) -> Terminal:
    with terminal(monkeypatch, columns) as found:
        data = {"data": [dict(zip(COLUMNS, row, strict=True)) for row in rows()]}
        Output(form).table(data, COLUMNS, rows(), ids=("key",), wide=wide, empty="", footer="The end.")
    return found


@pytest.mark.parametrize("columns", [40, 60, 79, 80, 81, 100, 120, 200])
@pytest.mark.parametrize("form", [None, "wide"])
def test_an_identifier_is_never_split_or_cut_and_lines_fit(
    monkeypatch: pytest.MonkeyPatch, columns: int, form: Form | None
) -> None:
    lines = shown(monkeypatch, columns=columns, form=form).lines
    for number in range(3):
        assert sum(f"{ACCOUNT}{number}" in line for line in lines) == 1
    assert sum(KEY in line for line in lines) in (0, 3)
    assert max(map(len, lines)) <= columns


def test_columns_that_do_not_fit_are_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(monkeypatch).lines
    assert lines[0].split() == ["id", "name", "status"]
    assert "Not shown at this width: key, memo. Use -o wide." in lines
    wider = shown(monkeypatch, columns=120).lines
    assert wider[0].split() == ["id", "name", "status", "key", "memo"]
    assert not any("Not shown" in line for line in wider)


def test_a_long_text_wraps_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(monkeypatch).lines
    first = next(index for index, line in enumerate(lines) if "Growth" in line)
    words = " ".join(part for line in lines[first : first + 3] for part in line.split() if part in NAMES[1].split())
    assert words == NAMES[1]


def test_wide_shows_every_column_and_breaks_a_row_that_does_not_fit_into_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(monkeypatch, form="wide").lines
    assert lines[:6] == [
        f"id        {ACCOUNT}0",
        "name      Research",
        "status    active",
        f"key       {KEY}0",
        "memo      a note",
        "created   2026-11-30T08:00:00Z",
    ]
    assert shown(monkeypatch, form="wide", columns=200).lines[0].split() == list(COLUMNS)


def test_states_have_a_colour_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    raw = shown(monkeypatch).raw
    assert "\x1b[32mactive" in raw
    assert "\x1b[31msuspended" in raw
    assert f"\x1b[32m{ACCOUNT}" not in raw


def test_no_color_and_pipes_have_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    raw = shown(monkeypatch).raw
    assert "\x1b[32m" not in raw
    assert "\x1b[31m" not in raw
    monkeypatch.delenv("NO_COLOR")
    Output().table({}, COLUMNS, rows(), empty="")
    assert "\x1b" not in capsys.readouterr().out


def test_a_value_of_a_record_keeps_its_identifiers_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as found:
        Output().record({}, [("reason", f"the account {ACCOUNT} has no key {KEY}"), ("status", "failed")])
    assert found.lines[0] == f"reason   the account {ACCOUNT} has no key"
    assert found.lines[1] == f"         {KEY}"
    assert max(map(len, found.lines)) <= 80
    assert "\x1b[31mfailed" in found.raw


def test_an_error_wraps_between_words_on_a_terminal_and_is_one_line_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    message = f"there is no key {KEY} of the account {ACCOUNT}: list them with `serve-app keys list`"
    with terminal(monkeypatch) as found:
        Output().failure(CommandError(message, code="x"))
    assert " ".join(found.lines) == f"error: {message}"
    assert max(map(len, found.lines)) <= 80
    Output().failure(CommandError(message, code="x"))
    assert capsys.readouterr().err == f"error: {message}\n"


@pytest.fixture
def account(service: FakeService, run: Run) -> str:
    return str(run("accounts", "create", "研究", "--json").json["id"])


@pytest.mark.parametrize("listing", [["accounts", "list"], ["models"], ["usage"], ["accounts", "show", "acct_1"]])
def test_yaml_json_and_its_older_name_are_the_same_document(
    service: FakeService, run: Run, account: str, listing: list[str]
) -> None:
    document = run(*listing, "-o", "json").json
    assert run(*listing, "--json").json == document
    assert run("-o", "json", *listing).json == document
    assert yaml.safe_load(run(*listing, "-o", "yaml").out) == document


def test_names_are_the_identifiers_line_by_line(service: FakeService, run: Run, account: str) -> None:
    run("accounts", "create", "Sales")
    run("keys", "create", account)
    assert run("accounts", "list", "-o", "name").out == "acct_1\nacct_2\n"
    assert run("accounts", "show", account, "-o", "name").out == "acct_1\n"
    assert run("keys", "list", account, "-o", "name").out == "key_1\n"
    service.accounts.clear()
    assert run("accounts", "list", "-o", "name").out == ""


def test_wide_has_columns_that_the_default_leaves_out(service: FakeService, run: Run, account: str) -> None:
    assert run("accounts", "list").out.splitlines()[0].split() == ["id", "name", "status", "balance", "currency"]
    assert "held" in run("accounts", "list", "-o", "wide").out.splitlines()[0].split()


def test_an_unknown_form_is_refused_before_anything_is_sent(service: FakeService, run: Run) -> None:
    refused = run("accounts", "list", "-o", "xml")
    assert (refused.code, refused.error_line) == (2, "error: -o xml: must be one of wide, json, yaml, name")
    assert "cannot be combined" in run("accounts", "list", "-o", "yaml", "--json").error_line
    assert service.requests == []


def test_a_failure_is_json_for_json_only(service: FakeService, run: Run) -> None:
    assert run("accounts", "show", "acct_9", "-o", "json").error["code"] == "account_not_found"
    assert run("accounts", "show", "acct_9", "-o", "yaml").error_line == "error: there is no account acct_9"
    assert json.loads(run("accounts", "nothing", "-o", "json").err)["error"]["code"] == "usage"


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def progress_of(stream: io.StringIO, *, every_s: float, times: int, **options: Any) -> str:
    clock = Clock()
    progress = Progress(stream, clock=clock, **options)
    for number in range(1, times + 1):
        clock.now += every_s
        progress.say(f"{number},000 rows")
    progress.end()
    progress.say("after the end")
    return stream.getvalue()


def test_a_short_command_prints_no_progress() -> None:
    assert progress_of(Screen(), every_s=0.1, times=10) == ""


def test_a_long_command_says_what_it_does_in_one_line_that_goes() -> None:
    line, erased = "\r\x1b[K{0},000 rows … {0} s", "\r\x1b[K"
    assert progress_of(Screen(), every_s=1.0, times=3) == line.format(2) + line.format(3) + erased


def test_a_log_gets_complete_lines_and_fewer() -> None:
    assert progress_of(io.StringIO(), every_s=1.0, times=13) == "2,000 rows … 2 s\n12,000 rows … 12 s\n"


def test_quiet_prints_no_progress() -> None:
    assert progress_of(Screen(), every_s=1.0, times=20, quiet=True) == ""


def test_a_line_that_stays_is_not_written_over() -> None:
    screen, clock = Screen(), Clock()
    progress = Progress(screen, clock=clock)
    clock.now = 3.0
    progress.say("reading")
    progress.step("25% checked")
    assert screen.getvalue() == "\r\x1b[Kreading … 3 s\r\x1b[K25% checked …\n"
