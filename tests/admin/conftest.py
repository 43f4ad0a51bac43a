"""The gateway's fixtures: operators come through a gateway."""

from tests.gateway.conftest import admin, empty_ledger, fast, http, make_world, world

__all__ = ["admin", "empty_ledger", "fast", "http", "make_world", "world"]
