"""`serve-app keys secret` says what removing the secret before would cost."""

from __future__ import annotations

import re

from serve_app.contracts.key_format import KeySecrets, mark_of
from serve_app.contracts.key_secrets import KeyMove, MoveKeys
from serve_app.contracts.notices import CreateAlert, RemoveAlert
from serve_app.contracts.sealed import of_webhooks, seal
from tests.gateway.world import SECRET

from .conftest import Run
from .real_service import RealService

NEXT = b"the secret that follows it"


def test_it_lists_the_keys_that_would_stop_working_and_says_when_there_are_none(real: RealService, run: Run) -> None:
    world, shown = real.world, run("keys", "secret")
    assert re.search(r"secret before +none is set", shown.out)
    assert "replaced since" in shown.out  # the key of this service has no mark
    world.admin.key_secrets = KeySecrets(NEXT, SECRET)
    shown = run("keys", "secret")
    [key] = world.ledger.list_keys(world.account_id)
    assert re.search(rf"secret before +{mark_of(SECRET)}", shown.out)
    assert re.search(r"keys not moved +1", shown.out)
    assert re.search(rf"{key.key_id} +api +main", shown.out)
    assert "stop working (401)" in shown.out
    assert run("keys", "secret", "--json").json["data"][0]["id"] == key.key_id
    before, after = (KeySecrets(secret).hashed(world.key)[0] for secret in (SECRET, NEXT))
    world.ledger.run(MoveKeys((KeyMove(before, after),)))
    stored = seal("whsec", KeySecrets(SECRET), of_webhooks(world.account_id))
    alert = world.ledger.run(CreateAlert(world.account_id, "day", 1, "https://example.org", stored))
    assert "one-time codes and webhooks" in run("keys", "secret").out
    world.ledger.run(RemoveAlert(world.account_id, alert.alert_id))
    shown = run("keys", "secret")
    assert "Nothing needs the secret before" in shown.out
    assert key.key_id not in shown.out
    world.admin.key_secrets = KeySecrets(NEXT)
    assert "Only one secret is set, and it opens everything." in run("keys", "secret").out
