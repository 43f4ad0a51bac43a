"""The gateway's fixtures: operators come through a gateway."""

from tests.gateway.conftest import admin, fast, http, make_world, world

__all__ = ["admin", "fast", "http", "make_world", "world"]
