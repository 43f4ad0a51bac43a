"""Keys with terms of their own, as the operator sets and sees them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx

from serve_app.contracts.money import format_amount
from tests.gateway.answers import refused
from tests.gateway.connections import Call
from tests.gateway.world import World, price

IN_30_DAYS = (datetime.now(UTC) + timedelta(days=30)).isoformat(timespec="seconds").replace("+00:00", "Z")
TERMS: dict[str, Any] = {
    "models": ["svc-coder", "svc-chat"],
    "rpm": 30,
    "tpm": 5000,
    "concurrency": 2,
    "budget": "2.50",
    "budget_period": "day",
    "expires_at": IN_30_DAYS,
    "tags": ["team-a", "batch"],
    "addresses": ["10.0.0.0/8", "203.0.113.7/32"],
}
DAY_S = 86_400.0


async def new_key(world: World, admin: httpx.AsyncClient, **terms: Any) -> dict[str, Any]:
    answer = await admin.post(f"/admin/accounts/{world.account_id}/keys", json=terms)
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


async def shown(world: World, admin: httpx.AsyncClient, key_id: str) -> dict[str, Any]:
    keys = (await admin.get(f"/admin/accounts/{world.account_id}/keys")).json()["data"]
    [found] = [key for key in keys if key["id"] == key_id]
    return found


async def test_a_key_is_shown_with_all_of_its_terms(world: World, admin: httpx.AsyncClient) -> None:
    made = await new_key(world, admin, name="ci", **TERMS)
    assert made["models"] == ["svc-coder", "svc-chat"]
    assert made["limits"] == {"rpm": 30, "tpm": 5000, "concurrency": 2}
    assert (made["budget"], made["budget_period"], made["spent"]) == ("2.50", "day", "0.00")
    assert made["expires_at"] == IN_30_DAYS
    assert made["status"] == "active"
    assert (made["tags"], made["addresses"]) == (TERMS["tags"], TERMS["addresses"])
    del made["key"]
    assert await shown(world, admin, made["id"]) == made


async def test_a_key_without_terms_has_none(world: World, admin: httpx.AsyncClient) -> None:
    made = await new_key(world, admin)
    assert made["limits"] == {"rpm": None, "tpm": None, "concurrency": None}
    for field in (
        "models",
        "budget",
        "budget_period",
        "spent",
        "renews_at",
        "expires_at",
        "revoked_at",
        "tags",
        "addresses",
    ):
        assert made[field] is None


async def test_an_update_changes_what_it_names_and_null_takes_a_bound_away(
    world: World, admin: httpx.AsyncClient
) -> None:
    made = await new_key(world, admin, name="ci", **TERMS)
    path = f"/admin/keys/{made['id']}"
    changed = (await admin.patch(path, json={"rpm": 60, "name": "build"})).json()
    assert (changed["name"], changed["limits"]) == ("build", {"rpm": 60, "tpm": 5000, "concurrency": 2})
    assert (changed["budget"], changed["models"], changed["expires_at"]) == ("2.50", TERMS["models"], IN_30_DAYS)
    freed = (await admin.patch(path, json={"models": None, "rpm": None, "budget": None, "expires_at": None})).json()
    assert (freed["models"], freed["budget"], freed["budget_period"], freed["expires_at"]) == (None,) * 4
    assert freed["limits"] == {"rpm": None, "tpm": 5000, "concurrency": 2}
    assert (freed["tags"], freed["addresses"]) == (TERMS["tags"], TERMS["addresses"])
    open_to_all = (await admin.patch(path, json={"tags": ["b"], "addresses": None})).json()
    assert (open_to_all["tags"], open_to_all["addresses"]) == (["b"], None)
    assert (await admin.patch(path, json={"tags": None})).json()["tags"] is None


BAD: list[tuple[dict[str, Any], int, str]] = [
    ({"models": ["gpt"]}, 422, "models"),
    ({"rpm": 0}, 422, "rpm"),
    ({"budget": "-1"}, 422, "budget"),
    ({"budget": "1", "budget_period": None}, 422, "budget"),
    ({"expires_at": "2020-01-01T00:00:00Z"}, 422, "expires_at"),
    ({"name": ""}, 422, "name"),
    ({"nmae": "x"}, 400, "nmae"),
    ({"tags": []}, 422, "tags"),
    ({"tags": ["x" * 41]}, 422, "tags"),
    ({"tags": ["a,b"]}, 422, "no comma"),
    ({"tags": "a"}, 400, "tags"),
    ({"addresses": ["10.0.0.5/8"]}, 422, "write 10.0.0.0/8"),
    ({"addresses": ["example.com"]}, 422, "not a valid address or network"),
    ({"addresses": ["10.0.0.1"] * 51}, 422, "addresses"),
    ({"addresses": []}, 422, "addresses"),
    ({"addresses": "10.0.0.1"}, 400, "addresses"),
    ({"models": "svc-chat"}, 400, "models"),
]


async def test_a_bad_update_changes_nothing(world: World, admin: httpx.AsyncClient) -> None:
    made = await new_key(world, admin, name="ci", **TERMS)
    before, log = await shown(world, admin, made["id"]), len(world.ledger.audit_log())
    for body, status, says in BAD:
        refused(await admin.patch(f"/admin/keys/{made['id']}", json=body), status, says)
    assert len(world.ledger.audit_log()) == log
    assert await shown(world, admin, made["id"]) == before  # a read, which leaves a record


async def test_the_budget_shown_as_spent_is_the_usage_of_the_key(world: World, admin: httpx.AsyncClient) -> None:
    made = await new_key(world, admin, budget="1", budget_period="month")
    other = await new_key(world, admin)
    for key in (made, made, other, made):
        assert (await Call(world, key["key"]).done()).status == 200
    rows = (await admin.get("/admin/usage", params={"key": made["id"], "group_by": "key"})).json()["data"]
    [used] = [row for row in rows if row["key_id"] == made["id"]]
    key = await shown(world, admin, made["id"])
    assert key["spent"] == used["charged"] == format_amount(3 * price(10, 2))
    assert (await shown(world, admin, other["id"]))["spent"] is None


async def test_a_new_period_begins_with_nothing_spent(world: World, admin: httpx.AsyncClient) -> None:
    made = await new_key(world, admin, budget="1", budget_period="day")
    await Call(world, made["key"]).done()
    before = await shown(world, admin, made["id"])
    now = world.admin.now()
    world.admin.now = lambda: now + DAY_S
    after = await shown(world, admin, made["id"])
    assert (before["spent"] != "0.00", after["spent"]) == (True, "0.00")
    assert after["renews_at"] > before["renews_at"]


async def test_a_key_is_active_then_expired_and_a_revoked_one_stays_revoked(
    world: World, admin: httpx.AsyncClient
) -> None:
    expiring, revoked = [await new_key(world, admin, expires_at=IN_30_DAYS) for _ in range(2)]
    await admin.delete(f"/admin/keys/{revoked['id']}")
    now = world.admin.now()
    states = []
    for later in (0.0, 31 * DAY_S):
        world.admin.now = lambda later=later: now + later
        states.append([(await shown(world, admin, key["id"]))["status"] for key in (expiring, revoked)])
    assert states == [["active", "revoked"], ["expired", "revoked"]]


async def test_usage_is_grouped_and_filtered_by_tag_over_all_accounts(world: World, admin: httpx.AsyncClient) -> None:
    tagged = [await new_key(world, admin, tags=tags) for tags in (["a", "b"], ["b"])]
    for key in (tagged[0]["key"], tagged[1]["key"], world.key, tagged[1]["key"]):
        assert (await Call(world, key).done()).status == 200
    query = {"group_by": "account,tag"}
    rows = (await admin.get("/admin/usage", params=query)).json()["data"]
    assert [(row["account_id"], row["tag"], row["requests"]) for row in rows] == [
        (world.account_id, "", 1),
        (world.account_id, "a", 1),
        (world.account_id, "b", 3),
    ]
    for tag, requests in {"a": 1, "b": 3, "": 1, "c": 0}.items():
        sums = (await admin.get("/admin/usage", params={"tag": tag})).json()["data"]
        assert sum(row["requests"] for row in sums) == requests
        assert all(row["tag"] is None for row in sums)
        assert len((await admin.get("/admin/usage/requests", params={"tag": tag})).json()["data"]) == requests
        file = (await admin.get("/admin/usage/export", params={"tag": tag, "format": "json"})).json()
        assert len(file) == requests
    [read, *_] = [one for one in world.ledger.audit_log() if one.action == "export_usage"]
    assert read.detail["tag"] == "c"
