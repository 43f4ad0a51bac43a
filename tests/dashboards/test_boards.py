"""The boards: the committed files are what the code makes, and an operator finds on each what was promised."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import ray

from dashboards import __main__ as command
from dashboards import boards, rules
from dashboards.exported import RAYS
from dashboards.expressions import panels
from dashboards.lint import dead_metrics, problems
from dashboards.panels import Board

BOARDS = {board["uid"]: board for board in boards.documents()}
every_board = pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)


def test_there_are_the_five_boards() -> None:
    names = ("users", "capacity", "engine", "money", "cluster")
    assert list(BOARDS) == [f"serve-app-{name}" for name in names] == [board.uid for board in Board]


def test_the_files_are_what_the_code_makes() -> None:
    assert command.check() == []


def test_a_file_that_was_edited_a_missing_one_and_an_old_one_are_named(tmp_path: Path) -> None:
    for path, text in command.files().items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    folder = tmp_path / boards.FOLDER
    assert command.check(tmp_path) == []
    (folder / "serve-app-users.json").write_text("{}", encoding="utf-8")
    (folder / "serve-app-money.json").unlink()
    (folder / "serve-app.json").write_text("{}", encoding="utf-8")
    edited, missing, old = command.check(tmp_path)
    assert "serve-app-users.json is out of date" in edited
    assert "serve-app-money.json is out of date" in missing
    assert "serve-app.json is no longer generated" in old


@every_board
def test_the_linter_finds_nothing(board: dict[str, Any]) -> None:
    assert problems(board) == []


def test_every_metric_of_the_service_is_used() -> None:
    assert dead_metrics(BOARDS.values(), [rule.expr for group in rules.GROUPS for rule in group.rules]) == []


@every_board
def test_the_first_row_is_single_numbers_for_this_moment(board: dict[str, Any]) -> None:
    title, *others = board["panels"]
    first_row = list(takewhile(lambda panel: panel["type"] != "row", others))
    assert title["title"] == "Now"
    assert {panel["type"] for panel in first_row} == {"stat"}
    assert len(first_row) >= 6
    assert all(target["instant"] for panel in first_row for target in panel["targets"])


@every_board
def test_services_that_share_a_prometheus_can_be_chosen(board: dict[str, Any]) -> None:
    source, *others = board["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
    assert [variable["name"] for variable in others[:2]] == ["cluster", "namespace"]
    assert {variable["name"] for variable in others[2:]} <= {"identifier", "backend"}
    for variable in others:
        assert (variable["multi"], variable["includeAll"], variable["allValue"]) == (True, True, ".*")


@every_board
def test_panels_lie_side_by_side(board: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert taken.isdisjoint(cells), panel["title"]
        assert max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells


def test_from_each_board_the_others_are_linked() -> None:
    for board in BOARDS.values():
        (link,) = board["links"]
        assert (link["type"], link["includeVars"], link["keepTime"]) == ("dashboards", True, True)
        assert set(link["tags"]) <= set.intersection(*(set(other["tags"]) for other in BOARDS.values()))
        linked = {re.findall(r"/d/([\w-]+)", link["url"])[0] for panel in panels(board) for link in panel["links"]}
        assert linked <= BOARDS.keys() - {board["uid"]}


def test_rays_names_are_in_rays_sources() -> None:
    folder = Path(ray.__file__).parent
    files = [
        *(folder / "serve" / "_private").rglob("*.py"),
        *(folder / "dashboard" / "modules" / "reporter").glob("*.py"),
    ]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    text = text.replace("serve_num_{protocol_name}_", "serve_num_http_")
    assert [metric.name for metric in RAYS if f'"{metric.name}"' not in text] == []
