"""Operators see whether the previous secret key is still needed."""

from __future__ import annotations

from typing import Any

import httpx

from serve_app.contracts.notices import CreateAlert
from serve_app.storage.sealing import SecretKeys, of_webhooks, seal
from tests.gateway.world import SECRET, World

NEXT = b"the secret that follows it"


async def show(admin: httpx.AsyncClient) -> dict[str, Any]:
    answer = await admin.get("/admin/sealed-secrets")
    assert answer.status_code == 200, answer.text
    shown: dict[str, Any] = answer.json()
    return shown


async def test_secrets_that_the_current_key_does_not_open_are_counted(world: World, admin: httpx.AsyncClient) -> None:
    both = SecretKeys(NEXT, SECRET)
    for keys in (SecretKeys(SECRET), both):
        stored = seal("whsec", keys, of_webhooks(world.account_id))
        world.ledger.run(CreateAlert(world.account_id, "day", 1, "https://example.org", stored))
    assert await show(admin) == {"has_previous": False, "current": 2, "outdated": 0}
    world.admin.secret_keys = both
    assert await show(admin) == {"has_previous": True, "current": 1, "outdated": 1}
