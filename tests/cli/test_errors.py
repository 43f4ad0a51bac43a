"""Every way to fail is one clear line on standard error, or one JSON object, and a fixed exit code."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from serve_app import __version__

from .conftest import Run
from .fake_service import OPERATOR_KEY, FakeService, error
from .local_http import Answer, Drop

CLI = [sys.executable, "-m", "serve_app.cli"]
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_a_service_that_is_down(run: Run, closed_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVE_APP_OPERATOR_KEY", OPERATOR_KEY)
    monkeypatch.setenv("PORT", str(closed_port))
    down = run("accounts", "list")
    assert down.code == 1
    assert f"no service at http://127.0.0.1:{closed_port}: is it running?" in down.error_line
    assert "make serve" in down.error_line
    assert down.out == ""


@pytest.mark.parametrize("command", [("accounts", "create", "\udced"), ("accounts", "show", "\udced")])
def test_an_argument_that_is_not_utf_8(run: Run, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]) -> None:
    monkeypatch.setenv("SERVE_APP_OPERATOR_KEY", OPERATOR_KEY)
    refused = run(*command)
    assert refused.code == 1
    assert "an argument is not valid UTF-8" in refused.error_line


@pytest.mark.parametrize("address", ["http://service.invalid", "http://10.0.0.1:8000", "http://localhost.invalid"])
def test_the_operator_key_does_not_cross_a_network_in_the_open(
    run: Run, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("SERVE_APP_OPERATOR_KEY", OPERATOR_KEY)
    sent: list[httpx.Request] = []

    def send(client: httpx.Client, request: httpx.Request, **_: object) -> httpx.Response:
        sent.append(request)
        raise httpx.ConnectError("no such host")

    monkeypatch.setattr(httpx.Client, "send", send)
    refused = run("accounts", "list", "--url", address)
    assert (refused.code, sent) == (1, [])
    for word in ("plain HTTP", "https://", "--insecure", "SERVE_APP_INSECURE=1"):
        assert word in refused.error_line
    assert run("accounts", "list", "--json", "--url", address).error["code"] == "insecure"
    grafana = ("dashboards", "push", "--grafana", address, "--token", "t")
    assert run(*grafana, "--json").error["code"] == "insecure"
    for allowed in (["--url", address, "--insecure"], ["--url", address.replace("http:", "https:")]):
        assert run("accounts", "list", "--json", *allowed).error["code"] == "unreachable"
    monkeypatch.setenv("SERVE_APP_INSECURE", "1")
    assert run("accounts", "list", "--json", "--url", address).error["code"] == "unreachable"


@pytest.mark.parametrize("address", ["http://localhost:1", "http://127.0.0.2:1", "http://[::1]:1"])
def test_this_machine_is_reached_over_plain_http(run: Run, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("SERVE_APP_OPERATOR_KEY", OPERATOR_KEY)
    assert run("accounts", "list", "--json", "--url", address).error["code"] == "unreachable"


def test_with_json_an_error_is_an_object_on_standard_error(run: Run, service: FakeService) -> None:
    service.stop()
    down = run("accounts", "list", "--json")
    assert (down.code, down.out) == (1, "")
    assert down.error["code"] == "unreachable"


def test_a_wrong_operator_key(run: Run, service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVE_APP_OPERATOR_KEY", "wrong-key")
    refused = run("accounts", "list")
    assert refused.code == 1
    assert "operator key not accepted" in refused.error_line
    assert "--operator-key-file" in refused.error_line
    assert "wrong-key" not in refused.err
    assert run("models", "--json").error["status"] == 401


def test_the_services_own_message_is_shown(run: Run, service: FakeService) -> None:
    missing = run("accounts", "show", "acct_9", "--json")
    assert missing.error == {
        "message": "there is no account acct_9",
        "code": "account_not_found",
        "status": 404,
    }


def test_a_fault_of_the_service_shows_the_request_id(run: Run, service: FakeService) -> None:
    service.next.append(error(500, "internal fault", "server_error", **{"x-request-id": "req_42"}))
    fault = run("models")
    assert fault.code == 1
    assert "500" in fault.error_line
    assert "req_42" in fault.error_line


def test_another_program_at_the_address(run: Run, service: FakeService) -> None:
    service.next.append(Answer(404, "<html>nothing here</html>"))
    assert "is a serve-app service there?" in run("models").error_line
    service.next.append(Answer(200, "<html>hello</html>"))
    assert "did not answer with JSON" in run("models").error_line


def test_a_redirect_does_not_carry_the_key_along(run: Run, service: FakeService) -> None:
    service.next.append(Answer(308, "", {"location": "https://elsewhere.example/"}))
    assert "set --url to the final address" in run("models").error_line
    assert len(service.requests) == 1


def test_a_lost_connection_is_tried_again_for_reads(run: Run, service: FakeService) -> None:
    service.next.extend([Drop(), Drop()])
    assert run("models", "--json").code == 0
    service.next.extend([Drop(), Drop(), Drop()])
    assert "closed the connection" in run("models").error_line


def test_no_operator_key_names_every_place_to_put_one(run: Run, bare_environment: Path) -> None:
    line = run("models").error_line
    for place in ("make serve", "SERVE_APP_OPERATOR_KEY", "--operator-key-file"):
        assert place in line


@pytest.mark.parametrize("content", ["", " \n", "two words", "caf\u00e9"])
def test_an_invalid_operator_key_is_not_shown(run: Run, tmp_path: Path, content: str) -> None:
    (tmp_path / "key").write_text(content, encoding="utf-8")
    refused = run("models", "--operator-key-file", tmp_path / "key")
    assert refused.code == 1
    assert "two words" not in refused.error_line


@pytest.mark.parametrize(
    "address", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:port", "http://host:99999"]
)
def test_an_invalid_address_is_a_usage_error(run: Run, address: str) -> None:
    assert run("models", "--url", address).code == 2


def test_usage_errors_are_exit_code_2_in_both_forms(run: Run) -> None:
    unknown = run("accounts", "creat")
    assert unknown.code == 2
    assert "serve-app accounts --help" in unknown.error_line
    assert run("accounts", "create").code == 2
    assert run("accounts", "create", "--json").error["code"] == "usage"
    assert run("--json", "keys").error["code"] == "usage"


def test_no_arguments_and_help_explain(run: Run) -> None:
    assert "accounts" in run().out
    assert run("--help").code == 0
    assert "--json" in run("accounts", "create", "--help").out


def test_version(run: Run) -> None:
    assert run("--version").out == f"serve-app {__version__}\n"


def test_shared_options_stand_before_or_after_the_command(run: Run, service: FakeService, tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text(f"{OPERATOR_KEY}\n", encoding="utf-8")
    shared = ["--url", service.url, "--operator-key-file", str(key_file), "--json"]
    assert run(*shared, "models").json == run("models", *shared).json


def test_the_key_is_found_in_the_state_folder(
    run: Run, service: FakeService, bare_environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SERVE_APP_OPERATOR_KEY")
    for home, variable in ((".serve-app", None), ("user/.serve-app", None), ("elsewhere", "elsewhere")):
        secrets = bare_environment / home / "secrets"
        secrets.mkdir(parents=True)
        (secrets / "operator-key").write_text(OPERATOR_KEY, encoding="utf-8")
        if variable:
            monkeypatch.setenv("SERVE_APP_HOME", variable)
        assert run("models").code == 0, home
        (secrets / "operator-key").unlink()
        secrets.rmdir()
        secrets.parent.rmdir()


def test_ctrl_c_ends_silently_and_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        environment = {**os.environ, "SERVE_APP_OPERATOR_KEY": OPERATOR_KEY}
        process = subprocess.Popen(
            [*CLI, "models", "--url", url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=REPOSITORY,
            env=environment,
            # A test runner started in the background ignores the signal, and its children would too.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
        )
        connection, _ = silent.accept()
        with connection:
            connection.recv(1)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (-signal.SIGINT, b"", b"")  # shells call it 130


def test_a_closed_pipe_is_no_traceback(service: FakeService) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run([*CLI, "models"], stdout=writer, stderr=subprocess.PIPE, cwd=REPOSITORY, timeout=300)
    os.close(writer)
    assert process.returncode == 1
    assert process.stderr == b""


def test_starting_up_loads_nothing_of_the_service() -> None:
    code = "import sys, serve_app.cli.__main__; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    modules = set(loaded.stdout.split())
    heavy = {"ray", "torch", "transformers", "fastapi", "sqlalchemy", "pydantic", "deployments", "grafana_client"}
    assert not modules & heavy
