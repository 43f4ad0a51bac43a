"""The doctor finds what is wrong, says what to do, and works while the service is down."""

from pathlib import Path

import pytest

from .conftest import Result, Run
from .fake_service import OPERATOR_KEY, PROBLEM, FakeService, error
from .local_http import Answer, Drop


@pytest.fixture
def home(bare_environment: Path) -> Path:
    home = bare_environment / ".serve-app"
    (home / "secrets").mkdir(parents=True, mode=0o700)
    key = home / "secrets" / "operator-key"
    key.write_text(OPERATOR_KEY, encoding="utf-8")
    key.chmod(0o600)
    return home


def statuses(result: Result) -> dict[str, str]:
    return {check["name"]: check["status"] for check in result.json["checks"]}


def check(result: Result, name: str) -> dict[str, str]:
    return next(check for check in result.json["checks"] if check["name"] == name)


def test_a_healthy_service_passes_every_check(run: Run, service: FakeService, home: Path) -> None:
    well = run("doctor", "--json")
    assert well.code == 0
    assert well.json["ok"] is True
    assert set(statuses(well).values()) == {"ok"}
    assert list(statuses(well)) == [
        "python",
        "memory",
        "disk",
        "state folder",
        "secrets",
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
    assert [line.split()[0] for line in well.out.splitlines()] == ["ok"] * 12


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
    assert {found[name] for name in ("memory", "disk", "state folder", "secrets")} == {"skip"}
    assert found["address"] == "fail"
