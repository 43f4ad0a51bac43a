"""Tests that what the documents name exists: serve-app commands with their options, make targets, modules, pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.main import get_command

from serve_app.cli.__main__ import app

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = get_command(app)
TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def code(document: Path) -> Iterator[str]:
    """The lines of its blocks without comments, and what stands in its text as code."""
    text = document.read_text(encoding="utf-8").replace("\\\n", " ")
    for block in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL):
        yield from (line.partition(" #")[0].strip() for line in block.splitlines())
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def called(pattern: str) -> list[str]:
    """Returns what follows a program's name, in all documents."""
    return sorted({found[1] for document in DOCUMENTS for line in code(document) if (found := re.match(pattern, line))})


@pytest.mark.parametrize("line", called(r"(?:\S+/)?serve-app ([a-z].*)"))
def test_a_command_of_serve_app_has_its_options(line: str) -> None:
    words = re.sub(r"\[(--[^]]*)\]", r"\1", line).split()  # [--optional]
    command = COMMAND
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]  # type: ignore[attr-defined]
    groups = getattr(command, "commands", {})
    assert not groups or getattr(command, "invoke_without_command", False) or words in ([], ["…"])
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options | {"--json"}


@pytest.mark.parametrize("target", called(r"make ([a-z][\w-]*)"))
def test_a_target_is_in_the_makefile(target: str) -> None:
    assert target in TARGETS


@pytest.mark.parametrize("module", called(r"(?:\S+=\S+ )*(?:\S+/)?python -m (\S+)"))
def test_a_module_is_there(module: str) -> None:
    assert find_spec(module) is not None


def anchors(document: Path) -> set[str]:
    """Returns the anchors of a document's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_link_leads_to_a_page_and_its_heading(document: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        name, _, heading = link.partition("#")
        target = document.parent / name if name else document
        if "://" not in link and not (target.exists() and (not heading or heading in anchors(target))):
            broken.append(link)
    assert not broken


def test_most_of_the_command_line_is_in_the_documents() -> None:
    """Were the documents read in another way than they are written, nothing above would fail."""
    assert len(called(r"(?:\S+/)?serve-app ([a-z].*)")) > 70
    assert len(called(r"make ([a-z][\w-]*)")) > 15
    assert len(called(r"(?:\S+=\S+ )*(?:\S+/)?python -m (\S+)")) > 10
