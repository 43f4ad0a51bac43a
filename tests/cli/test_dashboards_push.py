"""A push makes Grafana hold the shipped dashboards and nothing older of ours: against a fake Grafana that keeps state.

No Grafana runs in the tests. `fake_grafana.py` answers and rejects as the documentation of its HTTP API says.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Result, Run
from .fake_grafana import TOKEN, FakeGrafana
from .local_http import Answer
from .shipped_files import board, write_shipped

PROMETHEUS, SECOND_PROMETHEUS = "http://127.0.0.1:9090", "http://127.0.0.1:9091"


class Push:
    """`dashboards push` into one Grafana."""

    def __init__(self, run: Run, grafana: FakeGrafana, folder: Path) -> None:
        self.run, self.grafana, self.folder = run, grafana, folder

    def __call__(self, *options: object) -> Result:
        base = ("dashboards", "push", "--grafana", self.grafana.url, "--token", TOKEN)
        return self.run(*base, *options)


@pytest.fixture
def push(run: Run, grafana: FakeGrafana, shipped: Path) -> Push:
    return Push(run, grafana, shipped)


def test_a_push_makes_folder_data_source_and_dashboards(push: Push, grafana: FakeGrafana) -> None:
    pushed = push("--prometheus", PROMETHEUS)
    assert f"{grafana.url}/d/serve-app-users" in pushed.out
    source = grafana.datasources[-1]
    assert (source["name"], source["url"]) == ("serve-app Prometheus", PROMETHEUS)
    saved = grafana.dashboards["serve-app-users"]
    assert saved["meta"]["folderUid"] == "folder-1"
    assert saved["dashboard"]["tags"] == ["llm", "serve-app"]
    assert saved["dashboard"]["templating"]["list"][0]["current"]["value"] == source["uid"]


def test_a_second_push_replaces_what_was_changed_and_removes_what_is_gone(push: Push, grafana: FakeGrafana) -> None:
    push("--prometheus", PROMETHEUS)
    grafana.put(board("users", "Theirs"), "folder-1", version=2)
    grafana.put(board("mine") | {"uid": "by-hand", "tags": ["serve-app"]}, "folder-1")
    write_shipped(push.folder, board("users", "New"))
    rows = push("--prometheus", SECOND_PROMETHEUS, "--json").json["data"]
    assert [(row["action"], row["name"]) for row in rows] == [
        ("pushed", "serve-app: users"),
        ("removed", "serve-app: money"),
    ]
    assert grafana.dashboards["serve-app-users"]["dashboard"]["panels"][0]["title"] == "New"
    assert grafana.dashboards.keys() == {"serve-app-users", "by-hand"}
    assert len(grafana.folders) == 1
    assert [one["url"] for one in grafana.datasources if one["type"] == "prometheus"][1:] == [SECOND_PROMETHEUS]


def test_a_data_source_is_selected_by_its_name(push: Push, grafana: FakeGrafana) -> None:
    grafana.datasources.append({"uid": "prom-2", "name": "Second", "type": "prometheus", "url": SECOND_PROMETHEUS})
    assert "Grafana has: Prometheus, Second" in push().error_line
    assert push("--datasource", "Second").code == 0
    variable = grafana.dashboards["serve-app-users"]["dashboard"]["templating"]["list"][0]
    assert variable["current"] == {"text": "Second", "value": "prom-2", "selected": True}
    for other in ("Third", "Logs"):
        assert "--datasource" in push("--datasource", other).error_line


def test_what_comes_from_files_is_one_clear_line(push: Push, grafana: FakeGrafana) -> None:
    push("--prometheus", PROMETHEUS)
    grafana.dashboards["serve-app-users"]["meta"]["provisioned"] = True
    assert "Cannot save provisioned dashboard" in push("--prometheus", PROMETHEUS).error_line
    grafana.datasources[-1]["readOnly"] = True
    assert push("--prometheus", PROMETHEUS).code == 1


def test_a_push_that_broke_off_is_repeated(push: Push, grafana: FakeGrafana) -> None:
    grafana.next.extend([None] * 3 + [Answer(500, {"message": "database is locked"})])
    assert "database is locked" in push().error_line
    assert push().code == 0
    assert len(grafana.dashboards) == 2


def test_the_shipped_dashboards_are_pushed(run: Run, grafana: FakeGrafana) -> None:
    assert run("dashboards", "push", "--grafana", grafana.url, "--token", TOKEN).code == 0
    assert len(grafana.dashboards) >= 5
