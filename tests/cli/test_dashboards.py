"""Tests of pushes that fail: the operator sees one clear line, and nothing is half done."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from .conftest import Result, Run
from .fake_grafana import LOGIN, TOKEN, FakeGrafana
from .local_http import Answer, Drop


@pytest.fixture
def push(run: Run, shipped: Path) -> Run:
    def push(address: str, *options: object) -> Result:
        return run("dashboards", "push", "--grafana", address, *options)

    return push


def test_the_token_comes_from_option_file_environment_or_address(
    push: Run, grafana: FakeGrafana, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n", encoding="utf-8")
    assert push(grafana.url, "--token-file", tmp_path / "token").code == 0
    user, password = LOGIN
    with_login = grafana.url.replace("http://", f"http://{user}:{password.replace('@', '%40').replace(':', '%3A')}@")
    pushed = push(with_login)
    assert pushed.code == 0
    assert "%40" not in pushed.out + pushed.err
    monkeypatch.setenv("GRAFANA_TOKEN", TOKEN)
    assert push(grafana.url).code == 0


def test_grafana_below_a_path(push: Run) -> None:
    with FakeGrafana(prefix="/grafana") as grafana:
        for address in (f"{grafana.url}/grafana", f"{grafana.url}/grafana/"):
            rows = push(address, "--token", TOKEN, "--json").json["data"]
            urls = [row["url"] for row in rows if row["url"]]
            assert f"{grafana.url}/grafana/d/serve-app-users" in urls


def test_a_wrong_token_is_one_clear_line(push: Run, grafana: FakeGrafana) -> None:
    refused = push(grafana.url, "--token", "wrong-token")
    assert refused.code == 1
    assert "the token or password is not accepted" in refused.error_line
    assert "wrong-token" not in refused.err
    assert push(grafana.url, "--token", "wrong", "--json").error["status"] == 401


def test_a_role_that_is_too_low_is_one_clear_line(push: Run) -> None:
    with FakeGrafana(role="Viewer") as grafana:
        refused = push(grafana.url, "--token", TOKEN)
        assert "needs the role Editor" in refused.error_line
    with FakeGrafana(role="Editor") as grafana:
        assert push(grafana.url, "--token", TOKEN).code == 0
        refused = push(grafana.url, "--token", TOKEN, "--prometheus", "http://127.0.0.1:9090")
        assert "Admin for --prometheus" in refused.error_line


@pytest.mark.parametrize("answer", [Answer(200, "<html>login</html>"), Answer(200, {"other": "api"}), Answer(500, {})])
def test_another_program_at_the_address_is_one_clear_line(push: Run, grafana: FakeGrafana, answer: Answer) -> None:
    grafana.next.append(answer)
    failed = push(grafana.url, "--token", TOKEN)
    assert failed.code == 1
    assert grafana.url in failed.error_line


def test_an_unreachable_address_is_one_clear_line(push: Run, grafana: FakeGrafana) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    refused = push(f"http://127.0.0.1:{port}", "--token", TOKEN)
    assert f"no Grafana at http://127.0.0.1:{port}" in refused.error_line
    grafana.next.append(Drop())
    assert push(grafana.url, "--token", TOKEN).code == 1


@pytest.mark.parametrize("options", [[], ["--token", ""]])
def test_without_a_token_nothing_is_sent(push: Run, grafana: FakeGrafana, options: list[str]) -> None:
    assert push(grafana.url, *options).code == 2
    assert grafana.requests == []


@pytest.mark.parametrize("address", ["grafana.example.com", "ftp://host", "http://host:port"])
def test_an_invalid_address_is_a_usage_error(push: Run, grafana: FakeGrafana, address: str) -> None:
    assert push(address, "--token", TOKEN).code == 2
    assert push(grafana.url, "--token", TOKEN, "--prometheus", address).code == 2
    assert grafana.requests == []
