"""The console changes traffic and prices with the checks of `/admin`, and compares backends by the log."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from serve_app.admin.for_console import OPERATIONS, compare, run_for_console
from serve_app.contracts.books import Audit
from serve_app.contracts.units import utc_text
from serve_app.storage.request_log import recent_lines
from tests.gateway.world import World

ANN = Audit("ann@example.org", address="192.0.2.7")


async def run(world: World, operation: str, given: dict[str, Any] | None = None) -> dict[str, Any]:
    return await run_for_console(world.admin, operation, given or {}, ANN)


async def test_the_traffic_is_shifted_promoted_and_rolled_back_as_the_operator_of_the_page(world: World) -> None:
    [model, *_] = (await run(world, "models"))["models"]
    wanted, backend = model["id"], "new"
    world.backends.report = {name: {"status": "RUNNING", "replicas": 1} for name in ("fake", backend)}
    refused = await run(world, "canary", {"id": wanted, "body": {"backend": "none-such", "share": 5}})
    assert refused["refused"]["status"] == 422
    assert "none-such is not ready" in refused["refused"]["message"]
    refused = await run(world, "canary", {"id": wanted, "body": {"backend": backend, "share": 101}})
    assert (refused["refused"]["status"], refused["refused"]["param"]) == (422, "share")
    refused = await run(world, "model", {"id": "none-such"})
    assert refused["refused"]["status"] == 404
    done = await run(world, "promote", {"id": wanted, "body": {"backend": backend, "reason": "it is better"}})
    assert [one["name"] for one in done["backends"]] == [backend]
    shown = await run(world, "model", {"id": wanted})
    assert (shown["traffic"]["actor"], shown["traffic"]["reason"]) == (ANN.actor, "it is better")
    late = await run(world, "promote", {"id": wanted, "body": {"backend": "fake", "expected": 0}})
    assert late["refused"]["status"] == 422
    back = await run(world, "rollback", {"id": wanted, "body": {}})
    assert [one["name"] for one in back["backends"]] == ["fake"]


async def test_a_price_is_set_with_the_checks_of_the_api(world: World) -> None:
    wanted = (await run(world, "models"))["models"][0]["id"]
    body = {"input": "1.50", "cached_input": "0.50", "output": "3.00"}
    assert (await run(world, "price", {"id": wanted, "body": body}))["input"] == "1.50"
    for wrong in ({"input": "x"}, {"output": "-1"}, {"effective_at": "2001-01-01T00:00:00Z"}, {"other": 1}):
        assert (await run(world, "price", {"id": wanted, "body": body | wrong}))["refused"]["status"] == 422


def served(backend: str, **more: Any) -> dict[str, Any]:
    line = {"event": "request", "backend": backend, "outcome": "completed", "status": 200, "code": None}
    return line | {"first_token_ms": 100.0, "decode_ms": 90.0, "total_ms": 200.0, "completion_tokens": 10} | more


def test_backends_are_compared_by_what_their_requests_took() -> None:
    lines = [served("stable", first_token_ms=float(number)) for number in range(1, 22)]
    lines += [served("canary", first_token_ms=500.0), served("canary", outcome="failed", status=500)]
    lines += [served("canary", outcome="cancelled", code="server_error"), served("canary", outcome=None, status=429)]
    canary, stable = compare(lines)
    assert (stable["backend"], stable["requests"], stable["failed"]) == ("stable", 21, 0)
    assert stable["first_token_ms"] == {"p50": 11.0, "p95": 20.0}
    assert stable["per_token_ms"] == {"p50": 10.0, "p95": 10.0}
    assert (canary["requests"], canary["failed"], canary["first_token_ms"]) == (3, 2, {"p50": 500.0, "p95": 500.0})
    [no_figures] = compare([served("new", outcome="failed")])
    assert no_figures["total_ms"] is None
    assert compare([]) == []


async def test_refusals_of_an_account_at_a_time_come_with_their_reasons(world: World, tmp_path: Path) -> None:
    def line(seconds: float, account: str = "acct_1", **more: Any) -> dict[str, Any]:
        at = utc_text(world.admin.now() + seconds, "milliseconds")
        return {"time": at, "event": "request", "account": account, "model": "m", "status": 200, "code": None} | more

    late = {"status": 429, "code": "requests", "reason": "Requests per minute: the limit is 3 and 3 are used."}
    lines = [line(-500, **late), line(-60, **late), line(-50), line(-40, "acct_2", **late)]
    log = "".join(json.dumps(one, separators=(",", ":")) + "\n" for one in lines)
    (tmp_path / "gateway.jsonl").write_text(log)
    world.admin.recent_lines = partial(recent_lines, tmp_path)
    now = world.admin.now()
    found = await run(world, "refusals", {"account_id": "acct_1", "since": now - 120, "until": now})
    assert [(one["time"], one["reason"]) for one in found["lines"]] == [(lines[1]["time"], late["reason"])]
    compared = await run(world, "comparison", {"id": "m"})
    assert (compared["backends"], compared["is_complete"]) == ([], True)  # none of them was settled


async def test_requests_are_counted_by_minute_and_outcome(world: World, tmp_path: Path) -> None:
    world.admin.now = lambda: 1_700_000_010.0

    def line(seconds: float, **more: Any) -> dict[str, Any]:
        return served("b", time=utc_text(world.admin.now() + seconds, "milliseconds")) | more

    lines = [line(-4000), line(-400), line(-85, first_token_ms=300.0), line(-80), line(-80, status=429, outcome=None)]
    lines += [line(-75, outcome="cancelled"), line(-70, outcome="failed"), line(-65, status=499, outcome=None)]
    lines += [line(-10)]
    log = "".join(json.dumps(one, separators=(",", ":")) + "\n" for one in lines)
    (tmp_path / "gateway.jsonl").write_text(log)
    world.admin.recent_lines = partial(recent_lines, tmp_path)
    found = await run(world, "minutes", {"since": 0.0})
    assert [found["minutes"][0]["at"], found["minutes"][-1]["at"]] == [1_699_996_440.0, 1_699_999_920.0]  # an hour
    counts = {"completed": 2, "rejected": 1, "failed": 1, "cancelled": 2}
    assert found["minutes"][-1] == counts | {"at": 1_699_999_920.0, "first_token_ms": {"p50": 200.0, "p95": 290.0}}
    assert sum(one["completed"] for one in found["minutes"]) == 3
    assert found["latest"]["completed"] == 3  # with the one of the minute that has not ended
    assert found["latest"]["seconds"] == 300.0
    assert len((await run(world, "minutes", {"since": world.admin.now()}))["minutes"]) == 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serve_app.admin.for_console.MAX_COUNTED", 2)
        found = await run(world, "minutes", {"since": 0.0})
        assert (found["minutes"], found["latest"]["seconds"]) == ([], pytest.approx(64.8))  # since the first one's end
        with (tmp_path / "gateway.jsonl").open("a") as file:  # it arrived long before others that are not read
            file.write(json.dumps(line(-200, total_ms=195_000.0), separators=(",", ":")) + "\n")
        found = await run(world, "minutes", {"since": 0.0})
    assert (found["minutes"], found["latest"]["seconds"]) == ([], pytest.approx(9.8))


async def test_refusals_of_all_accounts_are_counted(world: World, tmp_path: Path) -> None:
    def line(account: str | None, status: int = 429, code: str = "requests", seconds: float = -60) -> dict[str, Any]:
        at = utc_text(world.admin.now() + seconds, "milliseconds")
        return {"time": at, "event": "request", "account": account, "status": status, "code": code}

    served_well = line("acct_2") | {"status": 200, "code": None}
    lines = [line("acct_1"), line("acct_2", 402, "budget_exceeded"), line("acct_2"), line("acct_2"), served_well]
    lines += [line("acct_1", 503, "server_error"), line(None, 401, "wrong_keys"), line("acct_1", seconds=-500)]
    missing = line("acct_3", 422, "model_not_found")
    lines += [missing | {"model": "svc-chat"}, missing | {"model": "none"}, missing | {"model": "svc-chat"}]
    log = "".join(json.dumps(one, separators=(",", ":")) + "\n" for one in sorted(lines, key=lambda one: one["time"]))
    (tmp_path / "gateway.jsonl").write_text(log)
    world.admin.recent_lines = partial(recent_lines, tmp_path)
    now = world.admin.now()
    assert await run(world, "refused", {"since": now - 120, "until": now}) == {
        "accounts": [
            {
                "account": "acct_2",
                "refused": 3,
                "code": "requests",
                "codes": [["requests", 2, 429, None], ["budget_exceeded", 1, 402, None]],
            },
            {
                "account": "acct_3",
                "refused": 3,
                "code": "model_not_found",
                "codes": [["model_not_found", 2, 422, "svc-chat"], ["model_not_found", 1, 422, None]],
            },
            {"account": "acct_1", "refused": 1, "code": "requests", "codes": [["requests", 1, 429, None]]},
        ],
        "unidentified": 1,
        "is_complete": True,
    }


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
async def test_what_does_not_exist_is_refused_and_no_error(world: World, operation: str) -> None:
    given = {"id": "none-such", "account_id": "none", "since": 0.0, "until": 1.0, "body": {}}
    found = await run(world, operation, given)
    assert isinstance(found, dict)
