"""A backend's life and an identifier's, with the commands, on the service itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serve_app.cli import models_backends

from .conftest import Run
from .real_service import RealService

CONFIG = """
applications:
  - {name: gateway, import_path: "deployments.apps:gateway"}
  - name: smollm2
    import_path: deployments.apps:model
    args: {model: bundled, dtype: int8}
    deployments: [{name: Model, max_ongoing_requests: 16, autoscaling_config: {min_replicas: 1, max_replicas: 2}}]
"""
PRICES = ("--input", "0.10", "--cached-input", "0.05", "--output", "0.30")
CREATE = ("create", "team-chat", "--backend", "fake", "--context-length", 8192, "--max-output", 1024, *PRICES)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], Any]]:
    """Returns the steps to run, one in each pause of a command that waits. An extra pause fails."""
    steps: list[Callable[[], Any]] = []
    monkeypatch.setattr(models_backends, "pause", lambda _: steps.pop(0)())
    return steps


@pytest.fixture
def two(real: RealService) -> RealService:
    report(real, "new", "RUNNING", 1)
    return real


def report(real: RealService, name: str, status: str, replicas: int) -> None:
    """Sets what Serve reports about an application from now on."""
    known = real.world.backends.report or {}
    real.world.backends.report = {**known, name: {"status": status, "replicas": replicas}}


def weights(model: dict[str, Any]) -> dict[str, int]:
    return {one["name"]: one["weight"] for one in model["backends"]}


def test_deploy_waits_until_the_backend_is_healthy(
    real: RealService, run: Run, pauses: list[Callable[[], Any]], tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    pauses += [
        lambda: report(real, "new", "DEPLOYING", 0),
        lambda: report(real, "new", "RUNNING", 2),
    ]
    done = run("models", "deploy", "new", "--like", "smollm2", "--arg", "num_threads=2", "--replicas", 2, "--json")
    assert (done.code, pauses) == (0, [])
    assert done.json["args"] == {"model": "bundled", "dtype": "int8", "num_threads": 2}
    assert done.json["options"] == {"max_ongoing_requests": 16, "num_replicas": 2}
    assert [line.split("  ")[-1] for line in done.err.splitlines()] == [
        "new: MISSING, 0 replicas ready",
        "new: DEPLOYING, 0 replicas ready",
        "new: RUNNING, 2 replicas ready",
    ]
    again = run("models", "deploy", "new", "--arg", "model=bundled")
    assert again.code == 1
    assert "deploy under a new name" in again.error_line


def test_deploy_says_when_serve_has_given_up(real: RealService, run: Run, pauses: list[Callable[[], Any]]) -> None:
    pauses.append(lambda: report(real, "new", "DEPLOY_FAILED", 0))
    failed = run("models", "deploy", "new", "--arg", "model=bundled", "--json")
    assert (failed.code, failed.out) == (1, "")
    assert '"code": "deploy_failed"' in failed.err.splitlines()[-1]
    assert "serve-app models retire new" in failed.err


def test_deploy_ends_after_its_timeout_and_can_be_repeated(
    real: RealService, run: Run, pauses: list[Callable[[], Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter((0.0, 0.0, 0.0, 5.0))
    monkeypatch.setattr(models_backends, "clock", lambda: next(times))
    pauses.append(lambda: None)
    late = run("models", "deploy", "new", "--arg", "model=bundled", "--timeout", 4)
    assert late.code == 1
    assert "new is not healthy after 4 s (MISSING)" in late.err
    report(real, "new", "RUNNING", 1)
    monkeypatch.setattr(models_backends, "clock", lambda: 0.0)
    assert run("models", "deploy", "new", "--arg", "model=bundled").code == 0


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--arg", "model"],
        ["--arg", "model=[", "--no-wait"],
        ["--like", "smollm2"],
        ["--args", "none.yaml"],
        ["--arg", "model=x", "--replicas", "0"],
    ],
)
def test_a_deployment_that_makes_no_sense_is_not_sent(real: RealService, run: Run, options: list[str]) -> None:
    assert run("models", "deploy", "new", *options).code == 2
    assert [one["name"] for one in run("models", "backends", "--json").json["data"]] == ["fake"]


def test_a_canary_a_promotion_and_a_rollback(two: RealService, run: Run) -> None:
    canary = run("models", "canary", "new", "--for", "svc-chat", "--share", 5, "--reason", "new weights", "--json")
    [chat] = canary.json["data"]
    assert weights(chat) == {"fake": 95, "new": 5}
    shown = run("models", "list").out
    rows = [line.split()[:4] for line in shown.splitlines() if line.startswith("svc-chat")]
    assert rows == [["svc-chat", "fake", "95%", "ready"], ["svc-chat", "new", "5%", "ready"]]
    promoted = run("models", "promote", "new", "--for", "svc-chat", "--for", "svc-coder")
    assert "A rollback of svc-chat restores: fake 100%." in promoted.out
    assert [weights(one) for one in run("models", "--json").json["data"]] == [{"new": 100}] * 2

    rolled_back = run("models", "rollback", "--for", "svc-chat", "--reason", "worse answers", "--json")
    assert weights(rolled_back.json["data"][0]) == {"fake": 100}
    again = run("models", "rollback", "--for", "svc-chat")
    assert again.code == 2
    assert "svc-chat is rolled back already" in again.error_line
    history = run("models", "show", "svc-chat").out
    assert "new weights" in history
    assert "worse answers" in history


def test_what_the_service_refuses_is_one_line(two: RealService, run: Run) -> None:
    report(two, "new", "DEPLOYING", 0)
    refused = run("models", "canary", "new", "--for", "svc-chat", "--share", 5)
    assert (refused.code, refused.error_line) == (
        1,
        "error: new is not ready: its application is DEPLOYING. It gets traffic only once a replica runs",
    )
    assert "does not exist" in run("models", "promote", "new", "--for", "svc-none").error_line
    assert "nothing to roll back" in run("models", "rollback", "--for", "svc-chat").error_line


def test_weights_are_set_and_given_back_to_the_configuration(two: RealService, run: Run) -> None:
    [chat] = run("models", "weights", "svc-chat", "fake=1", "new=3", "--json").json["data"]
    assert weights(chat) == {"fake": 1, "new": 3}
    [chat] = run("models", "weights", "svc-chat", "--as-configured", "--json").json["data"]
    assert (weights(chat), chat["traffic"]) == ({"fake": 100}, None)
    for wrong in ([], ["fake=x"], ["fake=1.5"], ["fake"], ["fake=1", "--as-configured"]):
        assert run("models", "weights", "svc-chat", *wrong).code == 2


def test_retire_waits_until_the_last_stream_has_ended(
    real: RealService, run: Run, pauses: list[Callable[[], Any]]
) -> None:
    run("models", "deploy", "new", "--arg", "model=bundled", "--no-wait")
    report(real, "new", "RUNNING", 1)
    run("models", "canary", "new", "--for", "svc-chat", "--share", 5)
    assert "still serves svc-chat" in run("models", "retire", "new").error_line
    run("models", "rollback", "--for", "svc-chat")

    def gone() -> None:
        real.world.backends.report = {"fake": {"status": "RUNNING", "replicas": 1}}

    pauses += [lambda: report(real, "new", "DELETING", 1), gone]
    retired = run("models", "retire", "new", "--json")
    assert (retired.code, retired.json["status"], pauses) == (0, "MISSING", [])
    assert "remove it there" in run("models", "retire", "fake").error_line


def test_an_identifier_is_created_changed_and_removed(two: RealService, run: Run) -> None:
    more = ("--default", "temperature=0.6", "--temperature", "coding=0", "--fallback", "new")
    made = run("models", *CREATE, *more, "--json").json
    assert (made["id"], weights(made), made["price"]["input"]) == ("team-chat", {"fake": 100}, "0.10")
    assert (made["sampling"], made["recommended_temperatures"]) == ({"temperature": 0.6}, {"coding": 0.0})
    assert made["fallback"] == "new"
    aliased = run("models", "update", "team-chat", "--alias", "gpt-4o", "--alias", "claude-*", "--json").json
    assert aliased["aliases"] == ["gpt-4o", "claude-*"]
    assert "gpt-4o, claude-*" in run("models", "show", "team-chat").out
    assert run("models", "update", "team-chat", "--alias", "none", "--json").json["aliases"] == []
    changed = run("models", "update", "team-chat", "--max-output", 2048, "--fallback", "none", "--json").json
    assert (changed["max_output"], changed["fallback"], changed["sampling"]) == (2048, None, {"temperature": 0.6})
    assert run("models", "update", "team-chat").code == 2
    shown = run("models", "show", "team-chat").out
    assert "2,048" in shown
    assert run("models", "remove", "team-chat", "--json").json == {"id": "team-chat"}
    assert "does not exist" in run("models", "show", "team-chat").error_line


def test_a_price_is_set_now_or_for_a_time_to_come(real: RealService, run: Run) -> None:
    scheduled = run("models", "price", "svc-chat", *PRICES, "--at", "30d", "--json").json
    assert scheduled["input"] == "0.10"
    assert run("models", "show", "svc-chat", "--json").json["price"]["input"] == "1"
    assert run("models", "price", "svc-chat", *PRICES).code == 0
    shown = run("models", "show", "svc-chat", "--json").json
    assert (shown["price"]["input"], len(shown["prices"])) == ("0.10", 2)
    assert run("models", "price", "svc-chat", *PRICES, "--at", "2020-01-01").code == 2
    assert run("models", "price", "svc-chat", *PRICES, "--at", "tomorrow").code == 2
