"""Every help text reads well at 80 columns."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command

from serve_app.cli.__main__ import app

from .conftest import Run


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, one in getattr(command, "commands", {}).items():
        yield from commands(one, (*path, name))


def test_no_word_of_any_help_is_cut_or_broken_at_80_columns(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for path, command in commands(get_command(app)):
        out = run(*path, "--help").out
        assert max(map(len, out.splitlines())) <= 80, path
        text = " ".join(out.replace("│", " ").split())
        for option in (one for one in command.params if not getattr(one, "hidden", False)):
            for word in (option.help or "").split():
                assert word in text, (path, option.name, word)
            for name in option.opts if option.param_type_name == "option" else ():
                assert name in text, (path, name)


def test_each_option_and_argument_is_explained() -> None:
    for path, command in commands(get_command(app)):
        missing = [option.name for option in command.params if not option.help and not getattr(option, "hidden", False)]
        assert not missing, path


def test_examples_fit_their_line() -> None:
    for path, command in commands(get_command(app)):
        long = [line for line in (command.epilog or "").splitlines() if len(line) > 77]
        assert not long, path


def test_the_options_of_every_command_are_apart(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    own, shared = re.split("Options of every command", run("accounts", "list", "--help").out)
    assert "--limit" in own
    assert "--url" in shared
    assert "--operator-key-file" not in own
