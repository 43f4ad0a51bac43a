"""What `make serve` prints: a key that works and, with the console on, a link that signs in."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.launch import first_call
from serve_app.launch.first_call import banner, console_path
from serve_app.settings import read_config

BASE = "http://127.0.0.1:8000"


class Service:
    """Stands in for the service's API."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.keys: set[str] = set()
        self.console_starts = 2  # answers of 404 before the console is there

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(f"{request.method} {request.url.path}")
        match request.method, request.url.path:
            case "GET", "/models":
                known = request.headers["authorization"].removeprefix("Bearer ") in self.keys
                return httpx.Response(200 if known else 401)
            case "GET", "/console/sign-in":
                self.console_starts -= 1
                return httpx.Response(404 if self.console_starts >= 0 else 200)
            case "POST", "/admin/accounts":
                assert request.headers["idempotency-key"].startswith("first-account-")
                return httpx.Response(201, json={"id": "acct_1"})
            case "POST", "/admin/accounts/acct_1/keys":
                self.keys.add(key := f"sk-{len(self.keys)}")
                return httpx.Response(201, json={"key": key})
            case "POST", "/admin/accounts/acct_1/sign-in-link":
                assert request.headers["x-operator"] == "setup"
                return httpx.Response(200, json={"path": "/first/token"})
        raise AssertionError(request.url)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    made = Service()
    monkeypatch.setattr(httpx, "Client", partial(httpx.Client, transport=httpx.MockTransport(made)))
    monkeypatch.setattr("time.sleep", lambda _: None)
    return made


def facts(first: first_call.FirstCall) -> dict[str, Any]:
    return {
        "base_url": BASE, "api_key": first.api_key, "console_url": first.console_url, "sign_in_url": first.sign_in_url,
        "dashboard_url": None, "metrics_url": "", "ca_file": None, "home": "home",
    }  # fmt: skip


def test_the_banner_has_a_new_sign_in_link_at_each_start_and_keeps_the_first_key(
    service: Service, tmp_path: Path
) -> None:
    for _ in range(2):
        first = first_call.first_call(tmp_path, BASE, "operator", console="/console")
        assert first.api_key == "sk-0"
        assert first.sign_in_url == f"{BASE}/console/first/token"
        assert f"sign in         {first.sign_in_url}   (once, within 10 minutes)" in banner(facts(first))
        assert f"console         {BASE}/console\n" in banner(facts(first))
    assert service.asked.count("POST /admin/accounts/acct_1/sign-in-link") == 2
    assert "token" not in json.dumps([path.read_text() for path in (tmp_path / "secrets").iterdir()])


def test_without_the_console_there_is_no_link(service: Service, tmp_path: Path) -> None:
    first = first_call.first_call(tmp_path, BASE, "operator")
    assert (first.console_url, first.sign_in_url) == (None, None)
    assert "console         off" in banner(facts(first))
    assert service.asked == ["POST /admin/accounts", "POST /admin/accounts/acct_1/keys"]


def test_the_console_is_on_in_the_file_that_make_serve_starts_and_is_a_setting() -> None:
    config = read_config(Path(__file__).parents[2] / "config.yaml")
    assert console_path(config) == "/console"
    config["applications"] = [one for one in config["applications"] if one["name"] != "console"]
    assert console_path(config) is None
    assert console_path({}) is None
