"""A push makes Grafana hold what is shipped, once, and nothing else: against a fake Grafana that keeps state.

No Grafana runs in the tests. `fake_grafana.py` answers and rejects as the documentation of its HTTP API says.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from .conftest import Result, Run
from .fake_grafana import TOKEN, FakeGrafana
from .local_http import Answer
from .shipped_files import RULES, board, rules_without, write_shipped

SECOND_PROMETHEUS = "http://127.0.0.1:9091"


class Push:
    """`dashboards push` of one folder into one Grafana."""

    def __init__(self, run: Run, grafana: FakeGrafana, folder: Path) -> None:
        self.run, self.grafana, self.folder = run, grafana, folder

    def __call__(self, *options: object, yes: bool = True) -> Result:
        base = ("dashboards", "push", "--grafana", self.grafana.url, "--token", TOKEN, "--from", self.folder)
        return self.run(*base, *(["--yes"] if yes else []), *options)

    def changes(self, *options: object, yes: bool = True) -> dict[str, list[str]]:
        """The names by action, without what is unchanged."""
        rows = self(*options, "--json", yes=yes).json["data"]
        found: dict[str, list[str]] = {}
        for row in rows:
            if row["action"] != "unchanged":
                found.setdefault(row["action"], []).append(f"{row['kind']} {row['name']}")
        return found


@pytest.fixture
def push(run: Run, grafana: FakeGrafana, tmp_path: Path) -> Push:
    return Push(run, grafana, write_shipped(tmp_path / "shipped"))


def rule(grafana: FakeGrafana, title: str) -> dict[str, Any]:
    return next(rule for rule in grafana.alerts.rules.values() if rule["title"] == title)


def test_a_first_push_makes_folder_dashboards_and_rules(push: Push, grafana: FakeGrafana) -> None:
    assert push.changes("--prometheus", "http://127.0.0.1:9090") == {
        "create": [
            "folder serve-app",
            "data source serve-app Prometheus",
            "dashboard serve-app: money",
            "dashboard serve-app: users",
            "alert rule Stuck",
            "alert rule Spool (page)",
            "alert rule Spool (warn)",
            "alert rule Slow",
            "rule group money",
            "rule group users/speed",
        ]
    }
    source = grafana.datasources[-1]
    assert (source["name"], source["url"]) == ("serve-app Prometheus", "http://127.0.0.1:9090")
    saved = grafana.dashboards["serve-app-users"]
    assert saved["meta"]["folderUid"] == "folder-1"
    assert saved["dashboard"]["tags"] == ["llm", "serve-app"]
    assert saved["dashboard"]["templating"]["list"][0]["current"]["value"] == source["uid"]
    assert grafana.alerts.intervals == {("folder-1", "money"): 30, ("folder-1", "users/speed"): 60}
    assert all(one["labels"]["managed_by"] == "serve-app" for one in grafana.alerts.rules.values())
    assert all("provenance" not in one for one in grafana.alerts.rules.values())


def test_a_second_push_finds_no_difference_and_writes_nothing(push: Push, grafana: FakeGrafana) -> None:
    for options in (["--prometheus", SECOND_PROMETHEUS], ["--datasource", "Prometheus"], ["--folder", "Team"]):
        push(*options)
        grafana.requests.clear()
        again = push(*options)
        assert again.code == 0
        assert "Nothing to change." in again.out
        assert grafana.writes == []


def test_a_change_is_shown_path_by_path_and_applied(push: Push, grafana: FakeGrafana) -> None:
    push()
    changed = board("users", "Refusals", "Requests", "Tokens")
    changed["panels"][1]["targets"][0]["expr"] = "rate(x[5m])"
    rules = copy.deepcopy(RULES)
    rules["groups"][0]["rules"][1] |= {"for": "2h", "expr": "up == 0"}
    rules["groups"][2]["interval"] = "20s"
    write_shipped(push.folder, changed, board("money"), rules=rules)
    shown = push()
    for line in (
        'panels[Requests].targets[A].expr: "ray_1" → "rate(x[5m])"',
        "panels[Refusals]: + {",
        'data[query].model.expr: "max by (cluster)',
        'for: "1h" → "2h"',
        "interval: 60 → 20",
    ):
        assert line in shown.out
    assert grafana.dashboards["serve-app-users"]["dashboard"]["panels"] == changed["panels"]
    assert grafana.dashboards["serve-app-users"]["dashboard"]["version"] == 2
    assert grafana.dashboards["serve-app-money"]["dashboard"]["version"] == 1
    assert rule(grafana, "Stuck")["for"] == "2h"
    assert grafana.alerts.intervals["folder-1", "users/speed"] == 20
    assert push.changes() == {}


def test_what_is_no_longer_shipped_is_removed(push: Push, grafana: FakeGrafana) -> None:
    push()
    write_shipped(push.folder, board("users"), rules=rules_without("Slow"))
    assert push.changes() == {"remove": ["dashboard serve-app: money", "alert rule Slow"]}
    assert list(grafana.dashboards) == ["serve-app-users"]
    assert [one["title"] for one in grafana.alerts.rules.values()] == ["Stuck", "Spool (page)", "Spool (warn)"]


def test_what_people_made_in_the_folder_survives(push: Push, grafana: FakeGrafana) -> None:
    push()
    by_hand = board("of-a-person") | {"uid": "hand-made"}  # its tag and its title alone don't make it ours
    grafana.put(by_hand | {"tags": ["serve-app"]}, "folder-1")
    grafana.put(board("untagged"), "folder-1")
    copied = rule(grafana, "Slow") | {"uid": "by-hand", "title": "Copied"}
    unmarked = copied | {"uid": "serve-app-unmarked", "title": "Unmarked", "labels": {}}
    grafana.alerts.rules |= {"by-hand": copied, "serve-app-unmarked": unmarked}
    write_shipped(push.folder, board("users"), rules={"groups": []})
    push()
    assert list(grafana.dashboards) == ["serve-app-users", "hand-made", "serve-app-untagged"]
    assert list(grafana.alerts.rules) == ["by-hand", "serve-app-unmarked"]


def test_a_rule_with_the_title_of_a_removed_one_is_made(push: Push, grafana: FakeGrafana) -> None:
    push()
    old = grafana.alerts.rules.pop(rule(grafana, "Slow")["uid"])
    grafana.alerts.rules["serve-app-of-an-earlier-version"] = old | {"uid": "serve-app-of-an-earlier-version"}
    assert push.changes() == {"remove": ["alert rule Slow"], "create": ["alert rule Slow"]}
    assert push.changes() == {}


def test_an_edit_in_grafana_is_shown_and_undone(push: Push, grafana: FakeGrafana) -> None:
    push()
    edited = copy.deepcopy(grafana.dashboards["serve-app-users"]["dashboard"])
    edited["panels"][0]["title"] = "Mine"
    grafana.put(edited, "somewhere-else", version=7)
    rule(grafana, "Slow")["labels"]["severity"] = "none"
    shown = push().out
    assert "panels[Mine]: - {" in shown
    assert 'folder: "somewhere-else" → "serve-app"' in shown
    assert 'labels.severity: - "none"' in shown
    assert grafana.dashboards["serve-app-users"]["dashboard"]["version"] == 8
    assert push.changes() == {}


def test_a_paused_rule_stays_paused(push: Push, grafana: FakeGrafana) -> None:
    push()
    rule(grafana, "Slow")["isPaused"] = True
    assert push.changes() == {}
    rules = copy.deepcopy(RULES)
    rules["groups"][2]["rules"][0]["expr"] = "serve_app:ttft > 20"
    write_shipped(push.folder, rules=rules)
    assert push.changes() == {"change": ["alert rule Slow"]}
    assert rule(grafana, "Slow")["isPaused"] is True


def test_a_dry_run_writes_nothing(push: Push, grafana: FakeGrafana) -> None:
    shown = push("--dry-run", yes=False)
    assert shown.code == 0
    assert "create   dashboard    serve-app: users" in shown.out
    assert "Applied" not in shown.out
    assert push("--dry-run", "--json", yes=False).json["applied"] is False
    assert grafana.writes == []


@pytest.mark.parametrize(("answer", "applied"), [("y\n", True), ("\n", False), ("n\n", False)])
def test_a_person_is_asked_first(
    push: Push, grafana: FakeGrafana, monkeypatch: pytest.MonkeyPatch, answer: str, applied: bool
) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

        def readline(self, *_: object) -> str:
            return answer

    monkeypatch.setattr("sys.stdin", Terminal())
    done = push(yes=False)
    assert bool(grafana.writes) is applied
    if applied:
        assert f"{grafana.url}/d/serve-app-users" in done.out
    else:
        assert done.code == 1
        assert "nothing was applied" in done.err


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_where_nobody_can_be_asked_nothing_is_sent(push: Push, grafana: FakeGrafana, options: list[str]) -> None:
    refused = push(*options, yes=False)
    assert refused.code == 2
    assert "--yes" in refused.err
    assert grafana.requests == []


def test_a_push_that_breaks_off_says_how_far_it_came_and_the_next_goes_on(push: Push, grafana: FakeGrafana) -> None:
    reads = 5  # folders, search, two dashboards, rules; then the data sources
    grafana.next.extend([None] * (reads + 1 + 2) + [Answer(500, {"message": "database is locked"})])
    failed = push()
    assert failed.code == 1
    assert "database is locked (create dashboard 'serve-app: users')" in failed.error_line
    assert "applied before it: folder 'serve-app', dashboard 'serve-app: money'; a second push goes on" in failed.err
    assert push.changes()["create"][0] == "dashboard serve-app: users"
    assert push.changes() == {}


def test_somebody_who_saves_in_between_is_not_overwritten(push: Push, grafana: FakeGrafana) -> None:
    push()
    write_shipped(push.folder, board("users", "New"), board("money"))
    grafana.before_writes = lambda: grafana.put(board("users", "Theirs"), "folder-1", version=2)
    failed = push()
    assert "changed by someone else" in failed.error_line
    assert grafana.dashboards["serve-app-users"]["dashboard"]["panels"][0]["title"] == "Theirs"


def test_a_data_source_is_selected_by_its_name(push: Push, grafana: FakeGrafana) -> None:
    grafana.datasources.append({"uid": "prom-2", "name": "Second", "type": "prometheus", "url": SECOND_PROMETHEUS})
    assert "name one with --datasource; Grafana has: Prometheus, Second" in push().error_line
    assert push("--datasource", "Second").code == 0
    variable = grafana.dashboards["serve-app-users"]["dashboard"]["templating"]["list"][0]
    assert variable["current"] == {"text": "Second", "value": "prom-2", "selected": True}
    assert {step["datasourceUid"] for one in grafana.alerts.rules.values() for step in one["data"]} == {
        "prom-2", "__expr__",
    }  # fmt: skip
    assert "none is named 'Third'" in push("--datasource", "Third").error_line
    assert "'Logs' is of type loki" in push("--datasource", "Logs").error_line


def test_the_address_of_a_data_source_is_changed_alone(push: Push, grafana: FakeGrafana) -> None:
    push("--prometheus", "http://127.0.0.1:9090")
    grafana.datasources[-1]["jsonData"] = {"timeInterval": "5s"}
    assert push.changes("--prometheus", SECOND_PROMETHEUS) == {"change": ["data source serve-app Prometheus"]}
    assert grafana.datasources[-1]["url"] == SECOND_PROMETHEUS
    assert grafana.datasources[-1]["jsonData"] == {"timeInterval": "5s"}
    assert len(grafana.datasources) == 3


def test_what_comes_from_files_is_refused_before_anything_is_written(push: Push, grafana: FakeGrafana) -> None:
    push("--prometheus", "http://127.0.0.1:9090")
    grafana.requests.clear()
    grafana.datasources[-1]["readOnly"] = True
    assert "comes from a file on Grafana's machine" in push("--prometheus", SECOND_PROMETHEUS).error_line
    grafana.dashboards["serve-app-users"]["meta"]["provisioned"] = True
    assert "'serve-app: users' comes from a file" in push().error_line
    assert grafana.writes == []


def test_alert_rules_can_be_left_to_prometheus(push: Push, grafana: FakeGrafana) -> None:
    push()
    before = copy.deepcopy(grafana.alerts.rules)
    (push.folder / "rules.yaml").unlink()
    assert "pass --no-alerts" in push().error_line
    assert push.changes("--no-alerts") == {}
    assert grafana.alerts.rules == before


def test_the_shipped_dashboards_and_rules_are_pushed_once(run: Run, grafana: FakeGrafana) -> None:
    push = ("dashboards", "push", "--yes", "--grafana", grafana.url, "--token", TOKEN)
    assert run(*push).code == 0
    assert len(grafana.dashboards) >= 5
    assert len(grafana.alerts.rules) >= 10
    grafana.requests.clear()
    assert "Nothing to change." in run(*push).out
    assert grafana.writes == []
