"""A change that is repeated under its idempotency key while the secret key is replaced makes the same API key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from serve_app.contracts import key_format as keys
from serve_app.contracts.key_format import MANAGEMENT
from serve_app.contracts.management import CreateManagementKey
from serve_app.storage.sealing import SecretKeys
from tests.gateway.world import SECRET, World

NEXT = b"the secret that follows it"
BOTH, NEW = SecretKeys(NEXT, SECRET), SecretKeys(NEXT)


@pytest.mark.parametrize("path", ["/account/keys", "/account/keys/{}/rotate"])
async def test_a_repeated_creation_gets_the_same_key_across_the_rotation(
    make_world: Callable[..., Any], path: str
) -> None:
    old: World = await make_world()
    both: World = await make_world(beside=old, secret_keys=BOTH)
    new: World = await make_world(beside=old, secret_keys=NEW, name="gateway-3")
    managing = keys.new_key(MANAGEMENT)
    [first] = old.ledger.list_keys(old.account_id)
    old.ledger.run(CreateManagementKey(old.account_id, "robot", keys.digest(managing), keys.hint(managing)))

    async def create(world: World, idempotency_key: str) -> str:
        headers = {"authorization": f"Bearer {managing}", "idempotency-key": idempotency_key}
        transport = httpx.ASGITransport(world.app(), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            answer = await http.post(path.format(first.key_id), json={}, headers=headers)
        assert answer.status_code == 201, answer.text
        made: str = answer.json()["key"]
        return made

    assert await create(old, "a") == await create(both, "a")
    assert await create(both, "b") == await create(new, "b")
    assert len(old.ledger.list_keys(old.account_id)) == 3
