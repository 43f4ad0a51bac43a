"""Pushing dashboards, against a stand-in for Grafana's API (no Grafana runs here)."""

import json
import socket
from pathlib import Path

import pytest

from .conftest import Run
from .fake_grafana import LOGIN, TOKEN, FakeGrafana
from .local_http import Answer, Drop

PUSH = ("dashboards", "push", "--grafana")


def test_every_dashboard_is_pushed_into_a_folder_of_its_own(run: Run, grafana: FakeGrafana) -> None:
    pushed = run(*PUSH, grafana.url, "--token", TOKEN, "--json")
    assert pushed.code == 0
    assert pushed.json["data"][0] == {
        "title": "serve-app",
        "uid": "serve-app",
        "url": f"{grafana.url}/d/serve-app/slug",
    }
    payload = grafana.dashboards["serve-app"]
    assert payload["overwrite"] is True
    assert payload["folderUid"] == "folder-1"
    assert payload["dashboard"]["id"] is None
    assert len(payload["dashboard"]["panels"]) > 20
    assert grafana.folders == [{"uid": "folder-1", "title": "serve-app"}]


def test_pushing_again_overwrites_and_makes_no_second_folder(run: Run, grafana: FakeGrafana) -> None:
    for _ in range(2):
        assert run(*PUSH, grafana.url, "--token", TOKEN, "--folder", "Team").code == 0
    assert [folder["title"] for folder in grafana.folders] == ["Team"]


def test_for_people_the_address_is_printed(run: Run, grafana: FakeGrafana) -> None:
    assert f"{grafana.url}/d/serve-app/slug" in run(*PUSH, grafana.url, "--token", TOKEN).out


def test_a_data_source_is_selected_by_its_name(run: Run, grafana: FakeGrafana) -> None:
    run(*PUSH, grafana.url, "--token", TOKEN, "--datasource", "Prometheus")
    variable = grafana.dashboards["serve-app"]["dashboard"]["templating"]["list"][0]
    assert variable["current"]["value"] == "prom-1"
    unknown = run(*PUSH, grafana.url, "--token", TOKEN, "--datasource", "Logs")
    assert "it has: Prometheus" in unknown.error_line


def test_the_token_comes_from_option_file_environment_or_address(
    run: Run, grafana: FakeGrafana, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n", encoding="utf-8")
    assert run(*PUSH, grafana.url, "--token-file", tmp_path / "token").code == 0
    user, password = LOGIN
    with_login = grafana.url.replace("http://", f"http://{user}:{password.replace('@', '%40').replace(':', '%3A')}@")
    pushed = run(*PUSH, with_login)
    assert pushed.code == 0
    assert "%40" not in pushed.out + pushed.err
    monkeypatch.setenv("GRAFANA_TOKEN", TOKEN)
    assert run(*PUSH, grafana.url).code == 0


def test_grafana_below_a_path(run: Run) -> None:
    with FakeGrafana(prefix="/grafana") as grafana:
        for address in (f"{grafana.url}/grafana", f"{grafana.url}/grafana/"):
            pushed = run(*PUSH, address, "--token", TOKEN, "--json")
            assert pushed.json["data"][0]["url"] == f"{grafana.url}/grafana/d/serve-app/slug"


def test_a_wrong_token_is_one_clear_line(run: Run, grafana: FakeGrafana) -> None:
    refused = run(*PUSH, grafana.url, "--token", "wrong-token")
    assert refused.code == 1
    assert "the token or password is not accepted" in refused.error_line
    assert "wrong-token" not in refused.err
    assert run(*PUSH, grafana.url, "--token", "wrong", "--json").error["status"] == 401


def test_a_token_without_permission_is_one_clear_line(run: Run, grafana: FakeGrafana) -> None:
    grafana.next.append(Answer(403, {"message": "Access denied"}))
    assert "needs the role Editor" in run(*PUSH, grafana.url, "--token", TOKEN).error_line


@pytest.mark.parametrize("answer", [Answer(200, "<html>login</html>"), Answer(200, {"other": "api"}), Answer(500, {})])
def test_another_program_at_the_address_is_one_clear_line(run: Run, grafana: FakeGrafana, answer: Answer) -> None:
    grafana.next.append(answer)
    failed = run(*PUSH, grafana.url, "--token", TOKEN)
    assert failed.code == 1
    assert grafana.url in failed.error_line


def test_an_unreachable_address_is_one_clear_line(run: Run, grafana: FakeGrafana) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    assert (
        f"no Grafana at http://127.0.0.1:{port}" in run(*PUSH, f"http://127.0.0.1:{port}", "--token", TOKEN).error_line
    )
    grafana.next.append(Drop())
    assert run(*PUSH, grafana.url, "--token", TOKEN).code == 1


@pytest.mark.parametrize("options", [[], ["--token", ""]])
def test_without_a_token_nothing_is_sent(run: Run, grafana: FakeGrafana, options: list[str]) -> None:
    assert run(*PUSH, grafana.url, *options).code == 2
    assert grafana.requests == []


@pytest.mark.parametrize("address", ["grafana.example.com", "ftp://host", "http://host:port"])
def test_an_invalid_address_is_a_usage_error(run: Run, address: str) -> None:
    assert run(*PUSH, address, "--token", TOKEN).code == 2


def test_a_file_that_is_no_dashboard_is_named_before_anything_is_pushed(
    run: Run, grafana: FakeGrafana, tmp_path: Path
) -> None:
    assert "no dashboards in" in run(*PUSH, grafana.url, "--token", TOKEN, "--from", tmp_path).error_line
    for content in ("{", json.dumps({"title": "x"}), "[]"):
        (tmp_path / "broken.json").write_text(content, encoding="utf-8")
        failed = run(*PUSH, grafana.url, "--token", TOKEN, "--from", tmp_path)
        assert "broken.json is not a Grafana dashboard" in failed.error_line
    assert grafana.requests == []
