"""The doctor finds what is wrong, says what to do, and works while the service is down."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from prometheus_client import CollectorRegistry, start_http_server

from serve_app.cli.doctor import LOCAL
from serve_app.launch.preflight import free_port

from .conftest import Result, Run
from .fake_service import OPERATOR_KEY, PROBLEM, FakeService, error
from .local_http import Answer, Drop


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user may enter, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def home(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state folder of a running service. Ray opens its own folder to all users."""
    home, run_folder = shared / ".serve-app", shared / "sa-1"
    for folder in (home, home / "secrets", run_folder):
        folder.mkdir(mode=0o700)
    key = home / "secrets" / "operator-key"
    key.write_text(OPERATOR_KEY, encoding="utf-8")
    key.chmod(0o600)
    session = run_folder / "ray" / "session_latest"
    for folder in (session / "logs", run_folder / "ha" / "node", home / "logs", home / "run"):
        folder.mkdir(parents=True)
    session.parent.chmod(0o777)
    (run_folder / "ha" / "node" / "admin.sock").touch(mode=0o600)
    (home / "logs" / "ray").symlink_to(session / "logs")
    (home / "run" / "lock").write_text(f"process {os.getpid()}")
    monkeypatch.setenv("SERVE_APP_HOME", str(home))
    return home


def statuses(result: Result) -> dict[str, str]:
    return {check["name"]: check["status"] for check in result.json["checks"]}


def check(result: Result, name: str) -> dict[str, str]:
    return next(check for check in result.json["checks"] if check["name"] == name)


def test_a_healthy_service_passes_every_check(run: Run, service: FakeService, home: Path) -> None:
    well = run("doctor", "--json")
    assert well.code == 0
    assert well.json["ok"] is True
    assert {name: status for name, status in statuses(well).items() if status != "ok"} == {}
    assert list(statuses(well)) == [
        "python",
        "memory",
        "disk",
        "state folder",
        "secrets",
        "sockets",
        "ports",
        "address",
        "health",
        "ready",
        "operator key",
        "model svc-chat",
        "model svc-coder",
        "ledger",
    ]


def test_for_people_every_check_is_a_line(run: Run, service: FakeService, home: Path) -> None:
    well = run("doctor")
    assert well.code == 0
    assert [line.split()[0] for line in well.out.splitlines()] == ["ok"] * 14


def test_a_service_that_is_down_fails_one_check_and_skips_what_follows(
    run: Run, service: FakeService, home: Path
) -> None:
    service.stop()
    down = run("doctor", "--json")
    assert down.code == 1
    assert statuses(down)["address"] == "fail"
    assert statuses(down)["python"] == "ok"
    assert statuses(down)["ledger"] == "skip"
    assert "→ start the service (`make serve`)" in run("doctor").out


def test_in_a_fresh_checkout_the_hint_is_to_start_the_service(run: Run, service: FakeService, monkeypatch) -> None:
    monkeypatch.delenv("SERVE_APP_OPERATOR_KEY")
    fresh = run("doctor", "--json")
    assert fresh.code == 1
    assert statuses(fresh)["state folder"] == "fail"
    assert statuses(fresh)["operator key"] == "fail"
    assert statuses(fresh)["health"] == "ok"


def test_secrets_that_others_may_read(run: Run, service: FakeService, home: Path) -> None:
    (home / "secrets" / "operator-key").chmod(0o644)
    found = run("doctor", "--json")
    assert found.code == 1
    assert "operator-key (0644)" in check(found, "secrets")["detail"]
    assert "chmod" in check(found, "secrets")["hint"]
    (home / "secrets" / "operator-key").chmod(0o600)
    (home / "secrets").chmod(0o755)
    assert statuses(run("doctor", "--json"))["secrets"] == "fail"


def test_folders_and_sockets_that_others_may_reach(run: Run, service: FakeService, home: Path) -> None:
    home.chmod(0o755)
    (home.parent / "sa-1").chmod(0o711)
    found = run("doctor", "--json")
    assert check(found, "state folder")["detail"] == f"other users can enter {home} (0755)"
    assert check(found, "state folder")["hint"] == f"chmod go= {home}"
    assert check(found, "sockets")["detail"] == f"other users can reach {home.parent}/sa-1, {home.parent}/sa-1/ray"
    home.chmod(0o700)
    (home.parent / "sa-1").chmod(0o700)
    assert statuses(run("doctor", "--json"))["state folder"] == "ok"
    (home.parent / "sa-1" / "ha" / "node" / "admin.sock").chmod(0o666)  # even in a closed folder
    assert "ha/node/admin.sock" in check(run("doctor", "--json"), "sockets")["detail"]


def test_metrics_that_other_machines_may_read(
    run: Run, service: FakeService, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = CollectorRegistry()
    server, thread = start_http_server(0, "127.0.0.1", registry)
    listening = [("0.0.0.0", server.server_port), ("::", free_port()), ("127.0.0.1", server.server_port)]
    listening.append(("::ffff:127.0.0.1", server.server_port))
    connections = [
        SimpleNamespace(laddr=SimpleNamespace(ip=ip, port=port), status=psutil.CONN_LISTEN) for ip, port in listening
    ]
    monkeypatch.setattr(psutil.Process, "net_connections", lambda *_: connections)
    try:
        found = check(run("doctor", "--json"), "ports")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert (found["status"], found["detail"]) == (
        "fail",
        f"other machines can read metrics on 0.0.0.0:{server.server_port}",
    )
    assert statuses(run("doctor", "--json"))["ports"] == "ok"


def test_a_folder_of_another_service_is_not_judged(run: Run, service: FakeService, home: Path) -> None:
    (home / "run" / "config.yaml").write_text("http_options: {port: 1}\n")
    found = run("doctor", "--json")
    assert {statuses(found)[name] for name in LOCAL} == {"skip"}
    assert f"not that of {home}" in check(found, "sockets")["detail"]


def test_sockets_and_ports_of_a_service_that_does_not_run(run: Run, service: FakeService, home: Path) -> None:
    (home / "logs" / "ray").unlink()
    found = statuses(run("doctor", "--json"))
    assert (found["sockets"], found["ports"]) == ("skip", "skip")


def test_a_service_that_is_not_ready(run: Run, service: FakeService, home: Path) -> None:
    service.ready = False
    assert statuses(run("doctor", "--json"))["ready"] == "fail"


def test_a_service_that_goes_away_meanwhile(run: Run, service: FakeService, home: Path) -> None:
    service.next.extend([Answer(200, {}), Drop()])
    assert statuses(run("doctor", "--json"))["ready"] == "fail"


def test_a_wrong_operator_key(run: Run, service: FakeService, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVE_APP_OPERATOR_KEY", "wrong")
    found = run("doctor", "--json")
    assert statuses(found)["operator key"] == "fail"
    assert statuses(found)["ledger"] == "skip"


def test_an_identifier_that_no_replica_serves(run: Run, service: FakeService, home: Path) -> None:
    service.models[1]["backends"] = [
        {"name": "coder", "weight": 100, "status": "DEPLOYING", "replicas": 0},
        {"name": "spare", "weight": 0, "status": "RUNNING", "replicas": 1},
    ]
    found = run("doctor", "--json")
    assert statuses(found)["model svc-chat"] == "ok"
    assert statuses(found)["model svc-coder"] == "fail"
    service.models = []
    assert statuses(run("doctor", "--json"))["models"] == "fail"


def test_a_ledger_that_does_not_add_up(run: Run, service: FakeService, home: Path) -> None:
    service.problems = [PROBLEM]
    assert statuses(run("doctor", "--json"))["ledger"] == "fail"


def test_a_ledger_that_can_not_be_checked(run: Run, service: FakeService, home: Path) -> None:
    answers = [Answer(200, {}), Answer(200, {}), Answer(200, {"data": service.models})]
    service.next.extend([*answers, error(500, "database is away", "server_error")])
    assert "database is away" in check(run("doctor", "--json"), "ledger")["detail"]


def test_little_memory_and_disk(run: Run, service: FakeService, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.cli.doctor.MIN_MEMORY_GIB", 1e9)
    monkeypatch.setattr("serve_app.cli.doctor.MIN_DISK_GIB", 1e9)
    found = statuses(run("doctor", "--json"))
    assert (found["memory"], found["disk"]) == ("fail", "fail")


def test_a_service_elsewhere_is_not_judged_by_this_machine(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVE_APP_OPERATOR_KEY", OPERATOR_KEY)
    found = statuses(run("doctor", "--json", "--url", "http://service.invalid"))
    assert {found[name] for name in LOCAL} == {"skip"}
    assert found["address"] == "fail"
