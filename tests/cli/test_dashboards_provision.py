"""The files from which a Grafana provisions itself: whole, repeatable, and never over somebody else's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from .conftest import Result, Run
from .shipped_files import board, write_shipped


@pytest.fixture
def provision(run: Run, tmp_path: Path, shipped: Path) -> Run:
    def provision(*options: object) -> Result:
        return run("dashboards", "provision", "--to", tmp_path / "out", *options)

    return provision


def actions(result: Result) -> dict[str, str]:
    return {Path(row["path"]).name: row["action"] for row in result.json["data"]}


def test_the_files_name_each_other(provision: Run, tmp_path: Path) -> None:
    assert provision("--prometheus", "http://prometheus:9090").code == 0
    out = tmp_path / "out"
    (source,) = yaml.safe_load((out / "provisioning/datasources/serve-app.yaml").read_text())["datasources"]
    assert (source["name"], source["type"], source["url"]) == (
        "serve-app Prometheus", "prometheus", "http://prometheus:9090",
    )  # fmt: skip
    (provider,) = yaml.safe_load((out / "provisioning/dashboards/serve-app.yaml").read_text())["providers"]
    assert (provider["folder"], provider["options"]["path"]) == ("serve-app", str(out / "dashboards"))
    boards = [json.loads(path.read_text()) for path in sorted((out / "dashboards").iterdir())]
    assert [one["uid"] for one in boards] == ["serve-app-money", "serve-app-users"]
    assert all(one["templating"]["list"][0]["current"]["value"] == source["uid"] for one in boards)
    assert (out / "prometheus/rules.yaml").read_text() == (tmp_path / "shipped/rules.yaml").read_text()


def test_a_container_sees_the_folder_elsewhere(provision: Run, tmp_path: Path) -> None:
    assert "GF_PATHS_PROVISIONING=/etc/boards/provisioning" in provision("--seen-at", "/etc/boards").out
    text = (tmp_path / "out/provisioning/dashboards/serve-app.yaml").read_text()
    assert "path: /etc/boards/dashboards" in text


def test_the_second_time_nothing_is_written(provision: Run, tmp_path: Path) -> None:
    assert set(actions(provision("--json")).values()) == {"created"}
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    assert set(actions(provision("--json")).values()) == {"unchanged"}
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before


def test_a_newer_version_changes_and_removes_what_an_older_one_wrote(provision: Run, tmp_path: Path) -> None:
    provision()
    (tmp_path / "out/dashboards/by-hand.json").write_text("{}")
    write_shipped(tmp_path / "shipped", board("users", "New"))
    done = actions(provision("--json"))
    assert (done["serve-app-users.json"], done["serve-app-money.json"]) == ("changed", "removed")
    assert sorted(path.name for path in (tmp_path / "out/dashboards").iterdir()) == [
        "by-hand.json", "serve-app-users.json",
    ]  # fmt: skip


@pytest.mark.parametrize("earlier", [False, True])
def test_a_file_of_somebody_else_is_not_overwritten(provision: Run, tmp_path: Path, earlier: bool) -> None:
    mine = tmp_path / "out/provisioning/datasources/serve-app.yaml"
    if earlier:
        provision()
        (tmp_path / "out/dashboards/serve-app-users.json").unlink()
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_text("mine: true\n")
    refused = provision()
    assert refused.code == 1
    assert str(mine) in refused.error_line
    assert "--force" in refused.error_line
    assert mine.read_text() == "mine: true\n"
    assert not (tmp_path / "out/dashboards/serve-app-users.json").exists()
    assert provision("--force").code == 0
    assert "serve-app Prometheus" in mine.read_text()
    assert provision().code == 0


def test_a_folder_that_can_not_be_written_is_one_clear_line(provision: Run, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    assert "can't write" in provision().error_line
