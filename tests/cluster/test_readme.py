"""What the guides tell to run is there: files, and the commands of serve-app with their options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

from serve_app.cli.__main__ import app

from .checks import CLUSTER, REPOSITORY

GUIDES = [CLUSTER / "README.md", CLUSTER / "bare-metal" / "README.md"]


def commands(guide: Path) -> Iterator[str]:
    """The lines of the blocks of commands, and what stands in the text as code."""
    text = guide.read_text(encoding="utf-8").replace("\\\n", " ")
    for block in re.findall(r"```\n(.*?)```", text, re.DOTALL):
        yield from (line.strip() for line in block.splitlines())
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.parent.name)
def test_every_file_that_a_command_names_is_there(guide: Path) -> None:
    named = {path for line in commands(guide) for path in re.findall(r"(?<![\w~/])cluster/[\w./-]+", line)}
    assert named
    assert [path for path in named if not (REPOSITORY / path).exists()] == []


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.parent.name)
def test_every_command_of_serve_app_has_its_options(guide: Path) -> None:
    called = [line for line in commands(guide) if re.match(r"(venv/bin/)?serve-app [a-z]", line)]
    assert called
    for line in called:
        words = line.split("serve-app ", 1)[1].split()
        command = get_command(app)
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]  # type: ignore[attr-defined]
        options = {name for parameter in command.params for name in parameter.opts}
        assert not getattr(command, "commands", {}), line
        assert {word for word in words if word.startswith("--")} <= options, line


def test_every_file_of_the_folder_is_in_a_guide() -> None:
    text = " ".join(guide.read_text(encoding="utf-8") for guide in GUIDES)
    here = [path for path in CLUSTER.rglob("*") if path.is_file() and path.name != "README.md"]
    shown = re.findall(r"[\w.-]+", text)
    known = set(shown) | {f"serve-app-{role}.service" for role in ("head", "gateway", "accounting", "model")}
    known |= {f"{role}.env.template" for role in ("head", "gateway", "accounting", "model")}
    assert [path.name for path in here if path.name not in known] == []
