"""`serve-app secrets` says whether the previous secret key can be removed."""

from __future__ import annotations

from serve_app.contracts.notices import CreateAlert, RemoveAlert
from serve_app.storage.sealing import SecretKeys, of_webhooks, seal
from tests.gateway.world import SECRET

from .conftest import Run
from .real_service import RealService

NEXT = b"the secret that follows it"


def test_it_says_what_to_do_in_each_step_of_a_rotation(real: RealService, run: Run) -> None:
    world = real.world
    before = world.admin.secret_keys
    stored = seal("whsec", SecretKeys(SECRET), of_webhooks(world.account_id))
    alert = world.ledger.run(CreateAlert(world.account_id, "day", 1, "https://example.org", stored))
    try:
        assert "The current secret key opens every stored secret." in run("secrets").out
        world.admin.secret_keys = SecretKeys(NEXT, SECRET)
        assert "Keep the previous secret key" in run("secrets").out
        world.admin.secret_keys = SecretKeys(NEXT)
        assert "Set SERVE_APP_SECRET_KEY_PREVIOUS" in run("secrets").out
        world.ledger.run(RemoveAlert(world.account_id, alert.alert_id))
        world.admin.secret_keys = SecretKeys(NEXT, SECRET)
        assert "You can remove the previous secret key" in run("secrets").out
        assert run("secrets", "--json").json == {"has_previous": True, "current": 0, "outdated": 0}
    finally:
        world.admin.secret_keys = before
