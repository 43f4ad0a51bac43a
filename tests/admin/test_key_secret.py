"""What still needs the key secret before is counted and listed, so that it is known when it can be removed."""

from __future__ import annotations

from typing import Any

import httpx

from serve_app.contracts.commands import CreateKey
from serve_app.contracts.key_format import KeySecrets, hint, mark_of, new_key
from serve_app.contracts.key_secrets import KeyMove, MoveKeys
from serve_app.contracts.notices import CreateAlert
from serve_app.contracts.sealed import of_webhooks, seal
from tests.gateway.world import SECRET, World

NEXT = b"the secret that follows it"


async def show(admin: httpx.AsyncClient, **params: Any) -> dict[str, Any]:
    answer = await admin.get("/admin/key-secret", params=params)
    assert answer.status_code == 200, answer.text
    shown: dict[str, Any] = answer.json()
    return shown


async def test_keys_are_counted_until_the_last_one_is_moved(world: World, admin: httpx.AsyncClient) -> None:
    world.admin.key_secrets = KeySecrets(NEXT, SECRET)
    shown = await show(admin)
    assert (shown["mark"], shown["previous_mark"]) == (mark_of(NEXT), mark_of(SECRET))
    assert (shown["moved"], shown["unmoved"], shown["next"]) == (0, 1, None)
    [key] = world.ledger.list_keys(world.account_id)
    [row] = shown["data"]
    assert (row["kind"], row["id"], row["account_id"], row["name"]) == ("api", key.key_id, world.account_id, "main")
    assert (row["mark"], row["last_day"]) == (None, None)
    before, after = (KeySecrets(secret).hashed(world.key)[0] for secret in (SECRET, NEXT))
    world.ledger.run(MoveKeys((KeyMove(before, after),)))
    shown = await show(admin)
    assert (shown["moved"], shown["unmoved"], shown["data"]) == (1, 0, [])


async def test_keys_are_listed_page_by_page(world: World, admin: httpx.AsyncClient) -> None:
    for number in range(4):
        key = new_key()
        now, _ = KeySecrets(SECRET).hashed(key)
        world.ledger.run(CreateKey(world.account_id, f"key {number}", now.digest, hint(key), mark=now.mark))
    world.admin.key_secrets = KeySecrets(NEXT, SECRET)
    pages = [await show(admin, limit=2)]
    while (after := pages[-1]["next"]) is not None:
        pages.append(await show(admin, limit=2, after=after))
    assert [len(page["data"]) for page in pages] == [2, 2, 1]
    rows = [row for page in pages for row in page["data"]]
    assert {row["id"] for row in rows} == {key.key_id for key in world.ledger.list_keys(world.account_id)}
    assert {row["mark"] for row in rows} == {None, mark_of(SECRET)}


async def test_sealed_secrets_that_the_present_secret_does_not_open_are_counted(
    world: World, admin: httpx.AsyncClient
) -> None:
    both = KeySecrets(NEXT, SECRET)
    for secrets in (KeySecrets(SECRET), both):
        stored = seal("whsec", secrets, of_webhooks(world.account_id))
        world.ledger.run(CreateAlert(world.account_id, "day", 1, "https://example.org", stored))
    assert (await show(admin))["unsealed"] == 0
    world.admin.key_secrets = both
    assert (await show(admin))["unsealed"] == 1


async def test_no_secret_and_no_digest_is_shown(world: World, admin: httpx.AsyncClient) -> None:
    world.admin.key_secrets = KeySecrets(NEXT, SECRET)
    text = (await admin.get("/admin/key-secret")).text
    digests = [hashed.digest for hashed in world.admin.key_secrets.hashed(world.key) if hashed is not None]
    assert not any(secret in text for secret in (NEXT.decode(), SECRET.decode(), world.key, *digests))
