"""Expiring grants and corrections: what the operator posts, what the account then shows, and nothing twice."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx

from tests.gateway.answers import refused
from tests.gateway.connections import Call
from tests.gateway.world import NANO, World

HOUR_S = 3600.0


def later(**of: float) -> str:
    return (datetime.now(UTC) + timedelta(**of)).isoformat(timespec="seconds").replace("+00:00", "Z")


async def account(world: World, admin: httpx.AsyncClient) -> dict[str, Any]:
    shown: dict[str, Any] = (await admin.get(f"/admin/accounts/{world.account_id}")).json()
    return shown


async def test_a_grant_shows_when_it_expires_soonest_first(world: World, admin: httpx.AsyncClient) -> None:
    path = f"/admin/accounts/{world.account_id}/credit"
    month, week = later(days=30), later(days=7)
    for amount, expires_at in (("2", month), ("3", week), ("4", None)):
        body = {"amount": amount, "kind": "grant", "expires_at": expires_at, "memo": f"grant of {amount}"}
        assert (await admin.post(path, json=body)).status_code == 200
    shown = await account(world, admin)
    assert shown["expiring"] == [{"expires_at": week, "left": "3.00"}, {"expires_at": month, "left": "2.00"}]
    assert (shown["balance"], shown["available"], shown["granted"]) == ("10.00", "10.00", "9.00")
    grants = (await admin.get(f"/admin/accounts/{world.account_id}/grants")).json()["data"]
    assert [(g["amount"], g["left"], g["expires_at"], g["status"], g["memo"]) for g in grants] == [
        ("2.00", "2.00", month, "open", "grant of 2"),
        ("3.00", "3.00", week, "open", "grant of 3"),
        ("4.00", "4.00", None, "open", "grant of 4"),
    ]


async def test_an_expired_grant_is_not_available_and_not_in_the_users_balance(
    world: World, admin: httpx.AsyncClient
) -> None:
    path = f"/admin/accounts/{world.account_id}"
    await admin.post(f"{path}/credit", json={"amount": "3", "kind": "grant", "expires_at": later(hours=1)})
    user = {"authorization": f"Bearer {world.key}"}
    [before] = (await admin.get("/user/balance", headers=user)).json()["balance_infos"]
    now = world.admin.now()
    world.admin.now = lambda: now + 2 * HOUR_S
    [after] = (await admin.get("/user/balance", headers=user)).json()["balance_infos"]
    shown = await account(world, admin)
    [grant] = (await admin.get(f"{path}/grants")).json()["data"]

    assert (before["total_balance"], before["granted_balance"], before["topped_up_balance"]) == ("4.00", "3.00", "1.00")
    assert (after["total_balance"], after["granted_balance"], after["topped_up_balance"]) == ("1.00", "0.00", "1.00")
    assert (shown["balance"], shown["available"], shown["expiring"]) == ("4.00", "1.00", [])
    assert (grant["status"], grant["left"]) == ("expired", "3.00")


async def test_a_user_with_only_an_expired_grant_has_no_balance(world: World, admin: httpx.AsyncClient) -> None:
    account_id, key = world.new_account(credit=0)
    body = {"amount": "3", "kind": "grant", "expires_at": later(hours=1)}
    await admin.post(f"/admin/accounts/{account_id}/credit", json=body)
    now = world.admin.now()
    world.admin.now = lambda: now + 2 * HOUR_S
    shown = (await admin.get("/user/balance", headers={"authorization": f"Bearer {key}"})).json()
    assert (shown["is_available"], shown["balance_infos"][0]["total_balance"]) == (False, "0.00")


async def test_an_account_can_open_with_a_grant_that_expires(world: World, admin: httpx.AsyncClient) -> None:
    expires_at = later(days=30)
    body = {"name": "trial", "credit": "2", "kind": "grant", "expires_at": expires_at}
    made = (await admin.post("/admin/accounts", json=body)).json()
    assert made["expiring"] == [{"expires_at": expires_at, "left": "2.00"}]


async def test_corrections_go_both_ways_and_say_why(world: World, admin: httpx.AsyncClient) -> None:
    path = f"/admin/accounts/{world.account_id}/correct"
    assert (await admin.post(path, json={"amount": "0.5", "memo": "outage"})).json()["balance"] == "1.50"
    assert (await admin.post(path, json={"amount": "-0.25", "memo": "booked twice"})).json()["balance"] == "1.25"
    assert world.books_balance()
    [second, first] = (await admin.get("/admin/audit")).json()["data"]
    assert (first["detail"]["amount"], first["detail"]["memo"]) == ("0.50", "outage")
    assert (second["detail"]["amount"], second["detail"]["memo"]) == ("-0.25", "booked twice")


async def test_a_correction_with_the_same_idempotency_key_is_booked_once(
    world: World, admin: httpx.AsyncClient
) -> None:
    path, headers = f"/admin/accounts/{world.account_id}/correct", {"idempotency-key": "fix-1"}
    for _ in range(3):
        await admin.post(path, json={"amount": "-0.5", "memo": "m"}, headers=headers)
    assert world.balance == NANO // 2
    assert len(world.ledger.audit_log()) == 1


async def test_a_correction_takes_no_more_than_there_is(world: World, admin: httpx.AsyncClient) -> None:
    path = f"/admin/accounts/{world.account_id}/correct"
    refused(await admin.post(path, json={"amount": "-1.000000001", "memo": "too much"}), 422, "1.00")
    assert world.balance == NANO
    assert world.ledger.audit_log() == []


async def test_a_grant_that_was_a_mistake_is_taken_back_once_and_says_why(
    world: World, admin: httpx.AsyncClient
) -> None:
    account_path = f"/admin/accounts/{world.account_id}"
    await admin.post(f"{account_path}/credit", json={"amount": "3", "kind": "grant"})
    [grant] = (await admin.get(f"{account_path}/grants")).json()["data"]
    path, headers = f"{account_path}/grants/{grant['id']}/take-back", {"idempotency-key": "t"}
    for _ in range(3):
        shown = (await admin.post(path, json={"memo": "wrong account"}, headers=headers)).json()
        assert (shown["granted"], shown["balance"]) == ("0.00", "1.00")
    [record, _] = (await admin.get("/admin/audit")).json()["data"]
    assert (record["action"], record["detail"]["grant"]) == ("take_back", grant["id"])
    assert (record["detail"]["amount"], record["detail"]["memo"]) == ("-3.00", "wrong account")
    refused(await admin.post(path, json={"memo": "again"}), 422, "nothing is left")
    refused(await admin.post(path, json={"memo": "x"}, headers=headers), 422)
    for body in ({}, {"memo": ""}, {"memo": "m", "amount": "1"}):
        assert (await admin.post(path, json=body)).status_code in (400, 422)
    for other in ("999999", "x", "-1", "0" * 30):
        refused(await admin.post(f"{account_path}/grants/{other}/take-back", json={"memo": "m"}), 404)
    stranger, _ = world.new_account()
    refused(await admin.post(f"/admin/accounts/{stranger}/grants/{grant['id']}/take-back", json={"memo": "m"}), 404)
    assert world.books_balance()


async def test_a_grant_that_was_taken_back_can_not_be_spent(world: World, admin: httpx.AsyncClient) -> None:
    account_id, key = world.new_account(credit=0)
    path = f"/admin/accounts/{account_id}"
    await admin.post(f"{path}/credit", json={"amount": "3", "kind": "grant"})
    assert (await Call(world, key).done()).status == 200
    [grant] = (await admin.get(f"{path}/grants")).json()["data"]
    taken = (await admin.post(f"{path}/grants/{grant['id']}/take-back", json={"memo": "mistake"})).json()
    assert taken["balance"] == "0.00"
    await world.limiter.service.follow()
    assert (await Call(world, key).done()).status == 402
    assert world.books_balance()


async def test_a_grant_with_the_same_idempotency_key_is_given_once(world: World, admin: httpx.AsyncClient) -> None:
    path, headers = f"/admin/accounts/{world.account_id}/credit", {"idempotency-key": "g"}
    body = {"amount": "1", "kind": "grant", "expires_at": later(days=1)}
    for _ in range(2):
        assert (await admin.post(path, json=body, headers=headers)).json()["granted"] == "1.00"
    refused(await admin.post(path, json={**body, "expires_at": later(days=2)}, headers=headers), 422)
    assert len(world.ledger.grants(world.account_id)) == 1
