"""The files that the guides name are there, and the guides name all files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from .checks import CLUSTER, REPOSITORY
from .manifests import KUBERNETES, read_all

DEPLOY = REPOSITORY / "docs" / "deploy"
GUIDES = [DEPLOY / "cluster.md", DEPLOY / "launcher.md", DEPLOY / "bare-metal.md"]


def commands(guide: Path) -> Iterator[str]:
    """The lines of the blocks of commands, and what stands in the text as code."""
    text = guide.read_text(encoding="utf-8").replace("\\\n", " ")
    for block in re.findall(r"```\n(.*?)```", text, re.DOTALL):
        yield from (line.strip() for line in block.splitlines())
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_every_file_that_a_command_names_is_there(guide: Path) -> None:
    named = {path for line in commands(guide) for path in re.findall(r"(?<![\w~/])cluster/[\w./-]+", line)}
    assert named
    assert [path for path in named if not (REPOSITORY / path).exists()] == []


def test_every_file_of_the_folder_is_in_a_guide() -> None:
    text = " ".join(guide.read_text(encoding="utf-8") for guide in GUIDES)
    here = [path for path in CLUSTER.rglob("*") if path.is_file() and path.name != "README.md"]
    shown = re.findall(r"[\w.-]+", text)
    known = set(shown) | {f"serve-app-{role}.service" for role in ("head", "gateway", "accounting", "model")}
    known |= {f"{role}.env.template" for role in ("head", "gateway", "accounting", "model")}
    components = KUBERNETES / "components"  # a component is named as a whole
    names = {path.relative_to(components).parts[0] if components in path.parents else path.name for path in here}
    assert names - known - {path.name for path in (KUBERNETES / "base").iterdir()} == set()
    assert "base" in known


def test_a_command_makes_each_secret_of_the_template_with_all_of_its_keys() -> None:
    made: dict[str, set[str]] = {}
    for line in commands(DEPLOY / "cluster.md"):
        if found := re.search(r"create secret generic (\S+)(.*)", line):
            literals = re.findall(r"--from-literal=([\w.-]+)=", found[2])
            files = re.findall(r"--from-file=\S*?([\w.-]+)\"?(?=\s|$)", found[2])
            made[found[1]] = {*literals, *files}
    wanted = {one["metadata"]["name"]: set(one["stringData"]) for one in read_all("secrets.template.yaml")}
    assert made == wanted
