"""Tests of operators' work with identifiers, traffic and backends, and of the errors that they get."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from serve_app.admin import backends, models, traffic
from serve_app.contracts.money import Price
from serve_app.contracts.served import ModelSpec
from serve_app.contracts.served_commands import CreateModel, DeployBackend, SetTraffic
from tests.gateway.answers import refused
from tests.gateway.world import World

CHAT = "/admin/models/svc-chat"
PRICE = {"input": "0.10", "cached_input": "0.05", "output": "0.20"}
NEW_MODEL = {"id": "team-chat", "context_length": 8192, "max_output": 1024, "weights": {"fake": 100}, "price": PRICE}
NEW_BACKEND = {"name": "new", "args": {"model": "bundled"}, "options": {"num_replicas": 2}}


@pytest.fixture
def two(world: World) -> World:
    """Two backends run."""
    world.backends.report = {name: {"status": "RUNNING", "replicas": 1} for name in ("fake", "new")}
    return world


async def post(admin: httpx.AsyncClient, path: str, **body: Any) -> Any:
    answer = await admin.post(path, json=body)
    assert answer.is_success, answer.text
    return answer.json()


def weights(model: dict[str, Any]) -> dict[str, int]:
    return {one["name"]: one["weight"] for one in model["backends"]}


async def test_a_roll_out_from_its_first_share_to_its_rollback(two: World, admin: httpx.AsyncClient) -> None:
    canary = await post(admin, f"{CHAT}/canary", backend="new", share=5, reason="new weights")
    assert weights(canary) == {"fake": 95, "new": 5}
    assert canary["traffic"]["actor"].startswith("key:")
    assert (canary["traffic"]["reason"], canary["rollback"]) == ("new weights", {"fake": 100})
    assert weights(await post(admin, f"{CHAT}/canary", backend="new", share=50)) == {"fake": 50, "new": 50}
    assert weights(await post(admin, f"{CHAT}/promote", backend="new")) == {"new": 100}
    back = await post(admin, f"{CHAT}/rollback", reason="too slow")
    assert (weights(back), back["rollback"]) == ({"fake": 100}, None)
    shown = (await admin.get(CHAT)).json()
    assert [row["weights"] for row in shown["history"]][:2] == [{"fake": 100}, {"new": 100}]
    assert [row["actor"] for row in shown["history"]][-1] == "config.yaml"
    assert shown["history"][0]["undoes"] == shown["history"][1]["version"]
    assert weights((await admin.get("/admin/models/svc-coder")).json()) == {"fake": 100}


async def test_a_change_that_came_meanwhile_is_not_overwritten(two: World, admin: httpx.AsyncClient) -> None:
    first = await post(admin, f"{CHAT}/canary", backend="new", share=5, expected=0)
    await post(admin, f"{CHAT}/canary", backend="new", share=10)
    for change, body in (("canary", {"backend": "new", "share": 20}), ("rollback", {})):
        version = first["traffic"]["version"]
        refused(await admin.post(f"{CHAT}/{change}", json={**body, "expected": version}), 422, "look again")
    assert weights((await admin.get(CHAT)).json()) == {"fake": 90, "new": 10}


async def test_only_a_backend_that_is_ready_gets_more_traffic(two: World, admin: httpx.AsyncClient) -> None:
    two.backends.report = {
        "fake": {"status": "RUNNING", "replicas": 1},
        "new": {"status": "DEPLOYING", "replicas": 0},
        "asleep": {"status": "RUNNING", "replicas": 0},  # it starts with its first request
    }
    for change in ("canary", "promote"):
        body = {"backend": "new"} | ({"share": 5} if change == "canary" else {})
        refused(await admin.post(f"{CHAT}/{change}", json=body), 422, "new is not ready: its application is DEPLOYING")
    refused(await admin.post(f"{CHAT}/traffic", json={"weights": {"fake": 1, "nwe": 1}}), 422, "MISSING")
    await post(admin, f"{CHAT}/canary", backend="asleep", share=5)
    two.backends.report["asleep"]["status"] = "UNHEALTHY"
    assert weights(await post(admin, f"{CHAT}/canary", backend="asleep", share=0)) == {"fake": 100}


async def test_a_rollback_to_nothing_that_runs_is_refused(two: World, admin: httpx.AsyncClient) -> None:
    refused(await admin.post(f"{CHAT}/rollback", json={}), 422, "nothing to roll back")
    await post(admin, f"{CHAT}/promote", backend="new")
    two.backends.report = {"new": {"status": "RUNNING", "replicas": 1}}
    refused(await admin.post(f"{CHAT}/rollback", json={}), 422, "none of the backends to restore is ready: fake")


async def test_the_weights_of_the_configuration_can_hold_again(two: World, admin: httpx.AsyncClient) -> None:
    await post(admin, f"{CHAT}/traffic", weights={"fake": 1, "new": 3})
    model = await post(admin, f"{CHAT}/traffic", weights={})
    assert (weights(model), model["traffic"]) == ({"fake": 100}, None)


async def test_a_backend_of_the_configuration_is_shown_also_without_traffic(
    two: World, admin: httpx.AsyncClient
) -> None:
    for identifier in ("svc-chat", "svc-coder"):
        await post(admin, f"/admin/models/{identifier}/promote", backend="new")
    shown = (await admin.get("/admin/backends/fake")).json()
    assert (shown["source"], shown["serves"]) == ("config.yaml", [])
    assert "fake" in [one["name"] for one in (await admin.get("/admin/backends")).json()["data"]]


async def test_shares_that_leave_nothing_for_the_rest_are_refused(two: World, admin: httpx.AsyncClient) -> None:
    refused(await admin.post(f"{CHAT}/canary", json={"backend": "fake", "share": 50}), 422, "no other backend")
    refused(await admin.post(f"{CHAT}/canary", json={"backend": "new", "share": 101}), 422, "share")


async def test_a_model_from_its_creation_to_its_end(two: World, admin: httpx.AsyncClient) -> None:
    wanted = {
        **NEW_MODEL,
        "sampling": {"temperature": 0.6, "top_k": 40},
        "recommended_temperatures": {"chat": 0.7},
        "fallback": "new",
    }
    made = await post(admin, "/admin/models", **wanted)
    assert (made["source"], weights(made), made["price"], made["fallback"]) == ("ledger", {"fake": 100}, PRICE, "new")
    assert (made["sampling"], made["recommended_temperatures"]) == ({"temperature": 0.6, "top_k": 40}, {"chat": 0.7})
    changes = {"max_output": 2048, "sampling": {"temperature": None, "top_p": 0.9}, "fallback": None}
    changed = (await admin.patch("/admin/models/team-chat", json=changes)).json()
    assert (changed["max_output"], changed["context_length"], changed["fallback"]) == (2048, 8192, None)
    assert changed["sampling"] == {"top_p": 0.9}
    names = [one["id"] for one in (await admin.get("/admin/models")).json()["data"]]
    assert names == ["svc-chat", "svc-coder", "team-chat"]
    assert (await admin.delete("/admin/models/team-chat")).json() == {"id": "team-chat"}
    refused(await admin.get("/admin/models/team-chat"), 404, "svc-chat, svc-coder")


BAD_MODELS: list[tuple[dict[str, Any], int, str]] = [
    ({"id": "svc-chat"}, 422, "declared in config.yaml"),
    ({"id": "a/b"}, 422, "id"),
    ({"weights": {"nobody": 1}}, 422, "no backend 'nobody'"),
    ({"weights": {}}, 422, "weights"),
    ({"fallback": "nobody"}, 422, "no backend 'nobody'"),
    ({"price": {**PRICE, "input": "0.0001"}}, 422, "at most 3 decimals"),
    ({"sampling": {"temperature": 3}}, 422, "sampling.temperature"),
    ({"sampling": {"top": 3}}, 400, "sampling.top"),
    ({"max_output": 10_000}, 422, "below context_length"),
]


async def test_a_model_that_makes_no_sense_is_refused(two: World, admin: httpx.AsyncClient) -> None:
    for body, status, says in BAD_MODELS:
        refused(await admin.post("/admin/models", json={**NEW_MODEL, **body}), status, says)
    assert len((await admin.get("/admin/models")).json()["data"]) == 2


async def test_what_config_yaml_declares_is_changed_there(two: World, admin: httpx.AsyncClient) -> None:
    refused(await admin.patch(CHAT, json={"max_output": 5}), 422, "change it there")
    refused(await admin.delete(CHAT), 422, "change it there")
    refused(await admin.post("/admin/backends", json={**NEW_BACKEND, "name": "fake"}), 422, "config.yaml")
    refused(await admin.post("/admin/backends/fake/retire"), 422, "remove it there")


async def test_a_price_is_scheduled_and_seen(two: World, admin: httpx.AsyncClient) -> None:
    at = (datetime.now(UTC) + timedelta(hours=1)).isoformat(timespec="seconds").replace("+00:00", "Z")
    scheduled = await post(admin, f"{CHAT}/prices", **PRICE, effective_at=at)
    assert scheduled["effective_at"].startswith(at[:-1])
    shown = (await admin.get(CHAT)).json()
    assert (shown["price"]["input"], shown["prices"]) == ("1", [scheduled])
    await post(admin, f"{CHAT}/prices", **PRICE)
    assert (await admin.get(CHAT)).json()["price"] == PRICE
    refused(await admin.post(f"{CHAT}/prices", json={**PRICE, "effective_at": "2020-01-01T00:00:00Z"}), 422, "passed")
    refused(await admin.post(f"{CHAT}/prices", json={**PRICE, "input": "x"}), 422, "input")


async def test_a_backend_from_its_deployment_to_its_end(world: World, admin: httpx.AsyncClient) -> None:
    made = await post(admin, "/admin/backends", **NEW_BACKEND)
    assert (made["status"], made["healthy"], made["source"], made["serves"]) == ("MISSING", False, "ledger", [])
    assert (made["args"], made["options"]) == (NEW_BACKEND["args"], NEW_BACKEND["options"])
    other = {**NEW_BACKEND, "args": {"model": "bundled", "num_threads": 1}}
    refused(await admin.post("/admin/backends", json=other), 422, "deploy under a new name and shift the traffic")

    world.backends.report = {name: {"status": "RUNNING", "replicas": 2} for name in ("fake", "new")}
    await post(admin, f"{CHAT}/canary", backend="new", share=25)
    shown = (await admin.get("/admin/backends/new")).json()
    assert (shown["healthy"], shown["serves"]) == (
        True,
        [{"model": "svc-chat", "share": 0.25, "is_fallback": False}],
    )
    refused(await admin.post("/admin/backends/new/retire"), 422, "new still serves svc-chat")
    await post(admin, f"{CHAT}/rollback")
    retired = await post(admin, "/admin/backends/new/retire")
    assert (retired["healthy"], retired["status"]) == (False, "RUNNING")
    assert retired["retired_at"]
    assert [one["name"] for one in (await admin.get("/admin/backends")).json()["data"]] == ["fake", "new"]
    del world.backends.report["new"]
    assert [one["name"] for one in (await admin.get("/admin/backends")).json()["data"]] == ["fake"]


BAD_BACKENDS: list[tuple[dict[str, Any], int, str]] = [
    ({"args": {"model": "bundled", "dtyp": "int8"}}, 422, "args.dtyp: unknown key"),
    ({"args": {"model": "bundled"}, "options": {"replicas": 2}}, 400, "options.replicas"),
    ({"options": {"num_replicas": 1, "autoscaling_config": {}}}, 422, "use either"),
    ({"name": "app:adapter"}, 422, "name"),
]


async def test_a_backend_that_makes_no_sense_is_refused(world: World, admin: httpx.AsyncClient) -> None:
    for body, status, says in BAD_BACKENDS:
        refused(await admin.post("/admin/backends", json={**NEW_BACKEND, **body}), status, says)
    assert [one["name"] for one in (await admin.get("/admin/backends")).json()["data"]] == ["fake"]


async def test_a_fallback_is_not_retired(two: World, admin: httpx.AsyncClient) -> None:
    two.ledger.run(DeployBackend("new", {"model": "bundled"}))
    await post(admin, "/admin/models", **NEW_MODEL, fallback="new")
    refused(await admin.post("/admin/backends/new/retire"), 422, "new still serves team-chat")


async def test_models_are_shown_while_the_ledger_is_away(two: World, admin: httpx.AsyncClient) -> None:
    two.ledger.run(SetTraffic("svc-chat", {"new": 1}, configured={"fake": 100}))
    two.accounting.wire_call.down()
    [chat, _] = (await admin.get("/admin/models")).json()["data"]
    assert weights(chat) == {"fake": 100}  # as this gateway knows it


MODEL, BACKEND = "/admin/models/team-chat", "/admin/backends"
WRITES: list[tuple[str, str, dict[str, Any], str, str]] = [  # method, path, body, action and subject of the record
    ("POST", "/admin/models", {**NEW_MODEL, "id": "more"}, "create_model", "more"),
    ("PATCH", MODEL, {"max_output": 100}, "update_model", "team-chat"),
    ("DELETE", MODEL, {}, "remove_model", "team-chat"),
    ("POST", f"{MODEL}/prices", {**PRICE, "input": "9"}, "schedule_price", "team-chat"),
    ("POST", f"{MODEL}/canary", {"backend": "new", "share": 5}, "set_traffic", "team-chat"),
    ("POST", f"{MODEL}/promote", {"backend": "new"}, "set_traffic", "team-chat"),
    ("POST", f"{MODEL}/traffic", {"weights": {"new": 1}}, "set_traffic", "team-chat"),
    ("POST", f"{MODEL}/rollback", {}, "roll_back_traffic", "team-chat"),
    ("POST", BACKEND, {**NEW_BACKEND, "name": "newer"}, "deploy_backend", "newer"),
    ("POST", f"{BACKEND}/idle/retire", {}, "retire_backend", "idle"),
]


def test_every_endpoint_that_changes_what_is_served_is_in_the_list() -> None:
    declared = [*models.endpoint, *traffic.endpoint, *backends.endpoint]
    changing = {(one.method, one.path.format(id="team-chat", name="idle")) for one in declared if one.method != "GET"}
    assert {(method, path) for method, path, _, _, _ in WRITES} == changing


@pytest.mark.parametrize(("method", "path", "body", "action", "subject"), WRITES, ids=[w[1] + w[0] for w in WRITES])
async def test_each_change_leaves_one_record_of_who_and_what(
    two: World, admin: httpx.AsyncClient, method: str, path: str, body: dict[str, Any], action: str, subject: str
) -> None:
    two.ledger.run(CreateModel("team-chat", ModelSpec(8192, 1024), {"fake": 1}, Price(1, 1, 1)))
    two.ledger.run(DeployBackend("idle", {"model": "bundled"}))
    if path.endswith("/rollback"):
        two.ledger.run(SetTraffic("team-chat", {"fake": 1, "new": 1}))
    refused(await admin.request(method, path, json=body, headers={"authorization": "Bearer wrong"}), 401)
    answer = await admin.request(method, path, json=body, headers={"x-operator": "ada@desk", "x-request-id": "req-7"})
    assert answer.is_success, answer.text
    [record] = (await admin.get("/admin/audit")).json()["data"]
    assert (record["action"], record["subject"], record["account_id"]) == (action, subject, "")
    assert (record["actor"].split()[0], record["request_id"]) == ("ada@desk", "req-7")


async def test_aliases_are_set_changed_and_refused_if_unclear(two: World, admin: httpx.AsyncClient) -> None:
    made = await post(admin, "/admin/models", **NEW_MODEL, aliases=["gpt-4o", "claude-*"])
    assert made["aliases"] == ["gpt-4o", "claude-*"]
    refused(
        await admin.post("/admin/models", json={**NEW_MODEL, "id": "b", "aliases": ["svc-chat"]}), 422, "identifier"
    )
    refused(await admin.patch("/admin/models/team-chat", json={"aliases": ["svc-coder"]}), 422, "identifier")
    refused(await admin.patch("/admin/models/team-chat", json={"aliases": ["a*b"]}), 422, "aliases")
    unchanged = await admin.patch("/admin/models/team-chat", json={"max_output": 512})
    assert unchanged.json()["aliases"] == ["gpt-4o", "claude-*"]
    assert (await admin.patch("/admin/models/team-chat", json={"aliases": []})).json()["aliases"] == []
