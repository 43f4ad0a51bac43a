"""The runbooks: a section for each alert, and what a section names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dashboards import boards, rules
from dashboards.expressions import panels

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/runbooks.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", TEXT, re.MULTILINE | re.DOTALL))


def test_every_alert_has_a_section_and_every_section_an_alert() -> None:
    assert set(SECTIONS) == {alert.name for alert in rules.ALERTS}


@pytest.mark.parametrize("alert", rules.ALERTS, ids=lambda alert: f"{alert.name}-{alert.severity}")
def test_an_alert_leads_to_its_section(alert: rules.Alert) -> None:
    path, _, anchor = alert.runbook_url.partition("#")
    assert "://" in path or (ROOT / path).is_file()
    assert anchor in {name.lower() for name in SECTIONS}


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_says_what_to_look_at_what_to_do_and_when_it_is_over(name: str) -> None:
    parts = ("- **Users notice**", "- **Look at**", "- **Do:**", "- **Over**")
    assert [part for part in parts if part not in SECTIONS[name]] == []


@pytest.mark.parametrize("alert", rules.ALERTS, ids=lambda alert: f"{alert.name}-{alert.severity}")
def test_a_section_says_whether_it_wakes_somebody_up(alert: rules.Alert) -> None:
    said = {"page": "page", "warn": "warning"}[alert.severity]
    assert said in SECTIONS[alert.name].strip().partition(".")[0].lower()


def test_boards_and_panels_exist() -> None:
    titles = {board["title"]: {panel["title"] for panel in panels(board)} for board in boards.documents()}
    board, missing = "", []
    for part in re.findall(r'\*([A-Z][\w ]+)\*, (?=")|"([^"]+\?)"', TEXT):
        if part[0]:
            board = part[0]
        elif part[1] not in titles.get(board, ()):
            missing.append(f"{board}: {part[1]}")
    assert missing == []
